"""Settings of a worker: their rules, their names, and the flags that are made of them."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.common.settings import Scope
from diptych.workers.config.worker_config import SECTIONS, SETTINGS, WorkerConfig
from diptych.workers.device.kv_cache import STORED
from diptych.workers.kv.dtypes import KV_DTYPES
from diptych.workers.kv.layout import AXIS_ORDERS
from diptych.workers.kv.wire import WIRE_DTYPES
from diptych.workers.models.checkpoint.weights import DTYPES
from diptych.workers.models.plan.expert_placement import IN_ORDER
from diptych.workers.models.plan.formats import QUANTIZE
from diptych.workers.parallel.rendezvous import PeerGroup
from diptych.workers.server.worker import parse_args

from ...support.other_settings import NEEDS, OTHER


@pytest.mark.parametrize(("device", "asked", "expected"), [("cpu", 0, 768), ("cuda:1", 0, 8192), ("cpu", 7, 7)])
def test_a_steps_budget_is_the_devices_unless_it_is_given(device: str, asked: int, expected: int) -> None:
    config = WorkerConfig.of("model", device=device, max_batch_tokens=asked)
    assert config.device_scheduler.max_batch_tokens == expected


@pytest.mark.parametrize(
    ("ranks", "experts", "copies", "message"),
    [
        (1, 2, 0, r"expert_parallel must be 1 or tensor_parallel \(1\), got 2"),
        (4, 2, 0, r"expert_parallel must be 1 or tensor_parallel \(4\), got 2"),
        (2, 0, 0, "expert_parallel: Input should be greater than or equal to 1, got 0"),
        (2, 2, -1, "expert_copies: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_all_ranks_have_whole_experts_or_none(ranks: int, experts: int, copies: int, message: str) -> None:
    WorkerConfig.of("model", tensor_parallel=4, expert_parallel=4, expert_copies=2)
    with pytest.raises(ConfigError, match=message):
        WorkerConfig.of("model", tensor_parallel=ranks, expert_parallel=experts, expert_copies=copies)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_parallel": 0}, "data_parallel: Input should be greater"),
        ({"data_parallel": 65}, "data_parallel: Input should be less"),
        ({"data_rank": 2}, r"data_rank must be in \[0, 1\]"),
        ({"data_rank": -1}, "data_rank: Input should be greater"),
        ({"rendezvous": None}, "needs a rendezvous"),
        ({"tensor_parallel": 2}, "without tensor_parallel and look_ahead"),
        ({"look_ahead": True}, "without tensor_parallel and look_ahead"),
    ],
)
def test_workers_that_share_experts(wrong: dict[str, Any], message: str) -> None:
    config = WorkerConfig.of("model", data_parallel=2, data_rank=1, rendezvous="place")
    assert config.parallel.peer_group == PeerGroup(1, 2, Path("place"))
    with pytest.raises(ConfigError, match=message):
        config.changed(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"trusted_network": False},
            r"machines_per_worker \(2\) needs trusted_network: ranks on several machines send",
        ),
        (
            {"tensor_parallel": 3},
            r"machines_per_worker must divide tensor_parallel \(3\), for each machine has as many",
        ),
        ({"tensor_parallel": 1}, r"machines_per_worker must divide tensor_parallel \(1\)"),
        ({"data_parallel": 2, "rendezvous": "place"}, r"machines_per_worker \(2\) does not work with data_parallel"),
        ({"machines_per_worker": 65}, "machines_per_worker: Input should be less"),
        ({"rank_hosts": ()}, r"rank_hosts must name 1 \(machines_per_worker - 1\), got 0"),
        ({"machines_per_worker": 1}, r"rank_hosts must name 0 \(machines_per_worker - 1\), got 1"),
        ({"rank_hosts": ("10.0.0.2",)}, r"rank_hosts: String should match pattern .*, got '10\.0\.0\.2'"),
        ({"machines_per_worker": 4, "rank_hosts": ("a:1", "b:1", "a:1")}, "rank_hosts must differ, .* got a:1,b:1,a:1"),
    ],
)
def test_ranks_on_several_machines(wrong: dict[str, Any], message: str) -> None:
    spread = {"machines_per_worker": 2, "rank_hosts": ("[fd00::2]:41231",), "trusted_network": True}
    config = WorkerConfig.of("model", tensor_parallel=4, **spread)
    assert (config.parallel.ranks_per_machine, config.changed(tensor_parallel=2).parallel.ranks_per_machine) == (2, 1)
    with pytest.raises(ConfigError, match=message):
        config.changed(**wrong)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_drafts(device: str) -> None:
    WorkerConfig.of("model", speculation="ngram", max_draft_tokens=16, device=device)
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        WorkerConfig.of("model", speculation="ngram", max_draft_tokens=17, device=device)


@pytest.mark.parametrize(
    ("method", "given", "num_ranks"),
    [
        ("draft", {"draft_model": "m"}, 4),
        ("draft", {"draft_model": "m", "draft_tensor_parallel": 4}, 4),
        ("draft", {"draft_model": "m", "draft_tensor_parallel": 1}, 1),
        ("self", {"skipped_layers": "layers.json"}, 4),
        ("eagle3", {"draft_model": "m"}, 1),
        ("mtp", {}, 1),
    ],
)
def test_ranks_that_compute_drafts(method: str, given: dict[str, Any], num_ranks: int) -> None:
    config = WorkerConfig.of("model", speculation=method, tensor_parallel=4, **given)
    assert config.num_draft_ranks == config.changed(device="cuda").num_draft_ranks == num_ranks
    expected = r"must be 1 or tensor_parallel \(4\), got 2: the draft's KV is divided"
    if method != "draft":
        expected = f"is given, but speculation {method} does not use it"
    with pytest.raises(ConfigError, match=f"draft_tensor_parallel {expected}"):
        config.changed(draft_tensor_parallel=2)


def test_workers_that_share_experts_draft_with_those_on_devices_alone() -> None:
    shared = {"data_parallel": 2, "rendezvous": "place"}
    own = {"speculation": "self", "skipped_layers": "layers.json"}
    for device in ("cpu", "cuda"):
        assert WorkerConfig.of("model", speculation="mtp", device=device, **shared).num_draft_ranks == 1
    assert WorkerConfig.of("model", device="cuda", **own, **shared).speculation.speculation == "self"
    with pytest.raises(ConfigError, match="self does not work with data_parallel on cpu: each pass would need the"):
        WorkerConfig.of("model", **own, **shared)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sparse_budget_tokens": 63}, r"sparse_budget_tokens must be at least 4 blocks \(64 tokens\), got 63"),
        ({"block_size": 32}, r"sparse_budget_tokens must be at least 4 blocks \(128 tokens\), got 64"),
        ({"sparse_budget_tokens": 0}, "sparse_budget_tokens: Input should be greater"),
        ({"sparse_attention": "h2o"}, "sparse_attention: Input should be 'none' or 'quest', got 'h2o'"),
    ],
)
def test_sparse_attention_has_a_budget_of_some_blocks(wrong: dict[str, Any], message: str) -> None:
    config = WorkerConfig.of("model", sparse_attention="quest", sparse_budget_tokens=64)
    assert config.cache.sparse_budget == 64
    with pytest.raises(ConfigError, match=message):
        config.changed(**wrong)


def test_attention_is_full_by_default() -> None:
    config = WorkerConfig.of("model", sparse_budget_tokens=1, device="cuda", tensor_parallel=2)
    assert (config.cache.sparse_attention, config.cache.sparse_budget) == ("none", 0)


def test_ranks_do_not_look_ahead() -> None:
    WorkerConfig.of("model", look_ahead=True)
    with pytest.raises(ConfigError, match="look_ahead works only with one rank"):
        WorkerConfig.of("model", look_ahead=True, tensor_parallel=2)


def test_kv_is_narrowed_over_grpc_alone() -> None:
    WorkerConfig.of("model", wire_dtype="int8", transports=("nixl", "grpc"))
    with pytest.raises(ConfigError, match="wire_dtype int8 needs the transport grpc"):
        WorkerConfig.of("model", wire_dtype="int8", transports=("nixl",))


def test_kv_of_few_bits_is_refused_by_name_where_it_does_not_work() -> None:
    assert WorkerConfig.of("model", dtype="float32").kv_dtype == "float32"
    assert WorkerConfig.of("model", dtype="float32", kv_dtype="int8").kv_dtype == "int8"
    assert WorkerConfig.of("model", kv_dtype="int8", device="cuda:1").kv_dtype == "int8"
    with pytest.raises(ConfigError, match="kv_dtype fp8 does not work with sparse_attention"):
        WorkerConfig.of("model", kv_dtype="fp8", sparse_attention="quest")


def test_a_worker_that_others_can_reach_asks_for_a_token() -> None:
    WorkerConfig.of("model", host="0.0.0.0", auth_token="secret")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 needs an auth_token"):
        WorkerConfig.of("model", host="0.0.0.0")


def test_what_is_wrong_in_several_sections_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig.of("model", dtype="int8", block_size=0, transports=())
    assert [part.partition(":")[0] for part in caught.value.message.split("; ")] == [
        "dtype",
        "block_size",
        "transports",
    ]


def test_choices_are_those_that_are_known_where_they_are_used() -> None:
    """The settings must not import torch, nor what does."""

    def choices(name: str) -> set[object]:
        annotation = SETTINGS[name].field.annotation
        found = {choice for arm in get_args(annotation) for choice in get_args(arm) or (arm,)}
        return found - {type(None)}

    assert choices("dtype") == set(DTYPES)
    assert choices("quantize") == set(QUANTIZE)
    assert choices("kv_axis_order") == set(AXIS_ORDERS)
    assert choices("wire_dtype") == set(WIRE_DTYPES)
    assert choices("kv_dtype") == {"auto", *KV_DTYPES} == {"auto", *STORED} - set(DTYPES)
    assert SETTINGS["expert_placement"].field.default == IN_ORDER


OF_FILES = ("auth_token", "tls")  # flags name their files


def test_every_field_is_a_setting_of_its_own_name() -> None:
    of_sections = [field.name for kind in SECTIONS.values() for field in fields(kind)]
    own = [field.name for field in fields(WorkerConfig) if field.name not in SECTIONS]
    assert [*of_sections, *own] == list(SETTINGS)


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, setting in SETTINGS.items() if not setting.help and name not in OF_FILES] == []


# Other settings that such a value needs; those that the cluster sets itself, too.
SPREAD = {"tensor_parallel": 2, "trusted_network": True}
WITH: dict[str, dict[str, object]] = {
    **NEEDS,
    "machines_per_worker": SPREAD | {"rank_hosts": ("10.0.0.2:41231",)},
    "rank_hosts": SPREAD | {"machines_per_worker": 2},
    "data_parallel": {"rendezvous": "place"},
    "data_rank": {"data_parallel": 2, "rendezvous": "place"},
}


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in OF_FILES])
def test_every_setting_is_a_flag_of_the_worker(name: str) -> None:
    def flag(name: str, value: object) -> list[str]:
        given = SETTINGS[name].flag
        if isinstance(value, bool):
            return [given if value else f"--no-{given[2:]}"]
        return [given, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]

    setting, args, expected = SETTINGS[name], ["--model", "m"], OTHER[name]
    for each, value in (WITH.get(name, {}) | {name: expected}).items():
        args += flag(each, value)
    config = parse_args(args)
    holder = getattr(config, setting.section) if setting.section else config
    assert getattr(holder, name) == expected != setting.field.default


def test_flags_of_a_wrong_type_or_value_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--model", "m", "--max-running", "many"])
    assert caught.value.code == 2 and "--max-running: invalid int value: 'many'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="max_running: Input should be greater than or equal to 1, got 0"):
        parse_args(["--model", "m", "--max-running", "0"])


def test_what_the_cluster_sets_itself_is_no_setting_of_a_pool() -> None:
    own = {name for name, setting in SETTINGS.items() if setting.scope is Scope.PROCESS}
    assert own == {
        "tpot_s",
        "ttft_s",
        "decode_role_prefill_tokens",
        "data_rank",
        "rendezvous",
        "rank_hosts",
        "role",
        "cores",
        "host",
    } | {
        "port",
        "auth_token",
        "tls",
    }
