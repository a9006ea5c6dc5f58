"""Errors of settings name the key, the line and the remedy."""

from pathlib import Path

import pytest

from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.common.config_file import build, load, merge
from diptych.cluster.placement import supervisor_calls as control
from diptych.workers.common.errors import ConfigError
from diptych.workers.common.settings import Scope, parse_bytes
from diptych.workers.config.worker_config import SETTINGS

from ...support.other_settings import NEEDS, OTHER, SHARED_NEEDS


def refusal(settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        build(settings)  # type: ignore[arg-type]
    return caught.value.message


def test_defaults_are_one_prefill_and_one_decode_worker_on_loopback() -> None:
    config = build({"model": "m"})
    assert config.pools.targets == {"prefill": 1, "decode": 1, "mixed": 0}
    assert config.router.host == "127.0.0.1"
    assert not config.pools.prefill.autoscaled


def test_an_unknown_key_is_named_with_the_one_that_was_meant() -> None:
    message = refusal({"model": "m", "pools": {"prefil": {"replicas": 1}}})
    assert "pools.prefil: unknown key" in message
    assert "Did you mean 'prefill'?" in message


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    assert "Known keys: prefill, decode, mixed" in refusal({"model": "m", "pools": {"zzz": 1}})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "model is missing"),
        ({"model": "m", "block_size": "16"}, "block_size: "),
        ({"model": "m", "block_size": True}, "block_size: "),
        ({"model": "m", "dtype": "int8"}, "dtype: Input should be 'bfloat16' or 'float32', got 'int8'"),
        ({"model": "m", "pools": {"decode": {"replicas": -1}}}, "pools.decode.replicas: "),
        ({"model": "m", "pools": {"decode": {"kv_memory_bytes": "2 parsecs"}}}, "'2 parsecs' is not a size"),
        ({"model": "m", "pools": {"decode": {"kv_memory_fraction": float("nan")}}}, "pools.decode.kv_memory_fraction"),
        ({"model": "m", "pools": {"decode": {"resources": {"tpu": "x"}}}}, "pools.decode.resources.tpu: "),
        ({"model": "m", "pools": {"decode": 3}}, "pools.decode: "),
        ({"model": "m", "pools": {"prefill": {"replicas": 2}}}, "the decode and mixed pools are both empty"),
        ({"model": "m", "pools": {"decode": {"replicas": 5, "max_replicas": 4}}}, "replicas (5) must lie in"),
        ({"model": "m", "router": {"host": "0.0.0.0"}}, "set api_key"),
        ({"model": "m", "router": {"http_port": 70000}}, "router.http_port: "),
        ({"model": "m", "router": {"http_port": 9000, "grpc_port": 9000}}, "give them different ports"),
        ({"model": "m", "router": {"replicas": 2, "http_port": 0}}, "instead of 0"),
        ({"model": "m", "router": {"http_tls": {"cert": "c.pem"}}}, "router.http_tls.key is missing"),
        ({"model": "m", "service_level": {"ttft_s": 0}}, "service_level.ttft_s: "),
        ({"model": "m", "service_level": {"admission": "never"}}, "service_level.admission: "),
        ({"model": "m", "service_level": {"tiers": {"flex": {"tpot_s": 61}}}}, "service_level.tiers.flex.tpot_s: "),
        ({"model": "m", "service_level": {"tiers": {"auto": {}}}}, "tiers must not name auto"),
        ({"model": "m", "service_level": {"tiers": {"Flex": {}}}}, "service_level.tiers.Flex"),
        ({"model": "m", "service_level": {"tiers": {f"t{i}": {} for i in range(17)}}}, "service_level.tiers: "),
        ({"model": "m", "served_models": {"chat": {"ttft_s": 0}}}, "served_models.chat.ttft_s: "),
        ({"model": "m", "served_models": {"chat": {"speed": 1}}}, "served_models.chat.speed"),
        ({"model": "m", "served_models": {"a b": {}}}, "served_models.a b: "),
        ({"model": "m", "served_models": {str(i): {} for i in range(65)}}, "served_models: "),
        ({"model": "m", "name": "A b"}, "name: "),
        ({"model": "m", "transports": []}, "transports: "),
        ({"model": "m", "transports": "nixl"}, "transports: "),
    ],
)
def test_a_bad_value_is_named_by_its_path(settings: object, expected: str) -> None:
    message = refusal(settings)
    assert expected in message
    assert message.count("transports") <= 1, "a union's arms are one problem"


def test_two_problems_are_both_named() -> None:
    message = refusal({"model": "m", "block_size": 0, "lease_s": -1})
    assert "block_size" in message
    assert "lease_s" in message


def test_another_machines_host_is_allowed_with_a_key() -> None:
    assert build({"model": "m", "router": {"host": "0.0.0.0", "api_key": "long enough"}}).router.host == "0.0.0.0"


def test_sizes_are_read_with_their_units() -> None:
    assert parse_bytes("2GiB") == 2 << 30
    assert parse_bytes("1.5 MiB") == 3 << 19
    assert parse_bytes("4096") == 4096
    assert parse_bytes(7) == 7


def test_transports_are_a_list_in_yaml() -> None:
    assert build({"model": "m", "transports": ["grpc", "nixl"]}).transports == ("grpc", "nixl")


def test_the_file_says_what_flags_say_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: m\npools:\n  prefill: {replicas: 2, chunk_tokens: 64}\n  decode: {replicas: 3}\n")
    config = load(path, {"dtype": None, "pools": {"prefill": {"replicas": 4}, "mixed": {"replicas": None}}})
    assert config.pools.targets == {"prefill": 4, "decode": 3, "mixed": 0}
    assert config.pools.prefill.chunk_tokens == 64
    same = build({"model": "m", "pools": {"prefill": {"replicas": 4, "chunk_tokens": 64}, "decode": {"replicas": 3}}})
    assert config == same


def test_the_line_of_a_bad_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: m\n\npools:\n  decode:\n    replica: 3\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml line 5: pools.decode.replica: unknown key.*'replicas'"):
        load(path, {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: 2024-02-30", "a date or a number in it is impossible"),
        (f"seed: {'9' * 5000}", "a date or a number in it is impossible"),
        ("model: " + "[" * 3000 + "]" * 3000, "it is nested too deep"),
        ("model: &m\n  pools: *m", "a mapping contains itself"),
    ],
)
def test_what_yaml_cannot_make_of_a_text_is_an_error_with_a_remedy(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load(path, {})


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: m\nmodel: n\n")
    with pytest.raises(ConfigError, match=r"line 2: model is given twice \(first on line 1\)"):
        load(path, {})


@pytest.mark.parametrize(
    ("text", "expected"), [("a: [", "not valid YAML"), ("- a\n", "must hold a mapping"), ("3\n", "must hold a mapping")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load(path, {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load(tmp_path / "absent.yaml", {})


def test_an_empty_file_takes_everything_from_flags(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("# nothing\n")
    assert load(path, {"model": "m"}).model == "m"


def test_merge_keeps_what_was_not_given() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9, "e": None}, "f": {}}) == {
        "a": {"b": 9, "c": 2},
        "d": 3,
    }


def test_settings_survive_the_way_to_another_process() -> None:
    config = build({"model": "m", "transports": ["grpc"], "pools": {"decode": {"kv_memory_bytes": "1GiB"}}})
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config


def test_workers_that_share_experts_have_one_rank_and_a_gpu_each() -> None:
    pools = {"decode": {"replicas": 3, "data_parallel": 2}}
    assert build({"model": "m", "pools": pools}).pools.num_workers == 6
    for pool in ({"tensor_parallel": 2}, {"look_ahead": True}):
        with pytest.raises(ConfigError, match=r"pools.decode.data_parallel \(2\) works only without tensor_parallel"):
            build({"model": "m", "pools": {"decode": pools["decode"] | pool}})
    on_cuda = build({"model": "m", "pools": pools, "device": "cuda"})
    assert on_cuda.gpus_of(on_cuda.pools.decode) == 1
    with pytest.raises(ConfigError, match=r"num_gpus \(0.5\) is less than 1, and workers that share experts"):
        build({"model": "m", "pools": {"decode": pools["decode"] | {"num_gpus": 0.5}}, "device": "cuda"})


def test_each_rank_on_cuda_has_a_gpu() -> None:
    def gpus(device: str, **pool: object) -> float:
        config = build({"model": "m", "device": device, "pools": {"decode": pool}})
        return config.gpus_of(config.pools.decode)

    assert (gpus("cpu"), gpus("cuda"), gpus("cpu", tensor_parallel=4), gpus("cuda", tensor_parallel=4)) == (0, 1, 0, 4)
    assert (gpus("cuda", num_gpus=0.5), gpus("cuda", tensor_parallel=2, num_gpus=3)) == (0.5, 3)
    with pytest.raises(ConfigError, match=r"pools.decode.num_gpus \(1\) is less than its tensor_parallel \(2\)"):
        gpus("cuda:0", tensor_parallel=2, num_gpus=1)


def test_each_machine_of_a_worker_has_an_equal_part_of_what_it_gets() -> None:
    def of(**pool: object) -> ClusterConfig:
        spread = {"tensor_parallel": 4, "machines_per_worker": 2}
        return build({"model": "m", "device": "cuda", "trusted_network": True, "pools": {"decode": spread | pool}})

    config = of(num_gpus=6, cores=8)
    parallel = config.worker("decode").parallel
    assert (parallel.machines_per_worker, parallel.ranks_per_machine, len(parallel.rank_hosts)) == (2, 2, 1)
    assert config.pools.decode.parallel.machines_per_worker == 2
    assert config.gpus_of(config.pools.decode) == 6 and of().gpus_of(of().pools.decode) == 4
    for pool, amount in (({"num_gpus": 5}, "num_gpus (5)"), ({"cores": 3}, "cores (3)")):
        with pytest.raises(ConfigError) as caught:
            of(**pool)
        assert f"pools.decode.{amount} must be a multiple of its machines_per_worker (2)" in caught.value.message


def test_the_dial_needs_predicted_routes() -> None:
    predicts, by_roles = build({"model": "m"}), build({"model": "m", "router": {"predict": False}})
    assert predicts.has_dial and not by_roles.has_dial
    assert build({"model": "m", "dial": True}).has_dial and not build({"model": "m", "dial": False}).has_dial
    with pytest.raises(ConfigError, match=r"router.predict: false turns off: leave router.predict out, or dial"):
        build({"model": "m", "dial": True, "router": {"predict": False}})


def test_a_machine_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setattr(control.ray, "nodes", lambda: [{}])
    config = {"model": "m", "device": "cuda", "pools": {"decode": {"tensor_parallel": 2}}}
    control.check_placeable(build(config))
    config["pools"] = {"decode": {"tensor_parallel": 4}}
    with pytest.raises(ConfigError, match=r"pools.decode: each worker needs 4 GPU and this machine has 2"):
        control.check_placeable(build(config))


def test_workers_that_need_more_gpus_than_there_are_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.ray, "nodes", lambda: [{}])

    def check(num_gpus: float, device: str = "cuda", **pools: dict[str, object]) -> None:
        monkeypatch.setattr(control.ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": num_gpus})
        config: dict[str, object] = {"model": "m", "device": device}
        control.check_placeable(build(config | {"pools": pools} if pools else config))

    def refused(num_gpus: float, **pools: dict[str, object]) -> str:
        with pytest.raises(ConfigError) as caught:
            check(num_gpus, **pools)
        return caught.value.message

    said = refused(1.0)  # the default pools
    assert "pools.prefill and pools.decode: 2 workers would take 2 GPU in total, but this machine has 1" in said
    assert "num_gpus: 0.5 in pools.prefill and pools.decode" in said and "--mixed 1" in said
    check(2.0)
    check(1.0, mixed={"replicas": 1})
    check(1.0, device="cpu")
    check(1.0, prefill={"num_gpus": 0.5}, decode={"num_gpus": 0.5})
    check(1.0, decode={"replicas": 10, "num_gpus": 0.1})
    said = refused(2.0, prefill={"replicas": 2, "num_gpus": 0.6}, decode={"replicas": 3})
    assert "5 workers would take 4.2 GPU in total, but this machine has 2: set num_gpus: 0.33 in" in said
    check(2.0, prefill={"replicas": 2, "num_gpus": 0.33}, decode={"replicas": 3, "num_gpus": 0.33})
    said = refused(3.0, decode={"replicas": 2, "tensor_parallel": 2})
    assert "pools.decode: 2 workers would take 4 GPU in total" in said and "num_gpus:" not in said
    said = refused(3.0, decode={"replicas": 2, "data_parallel": 2})
    assert "pools.decode: 4 workers would take 4 GPU in total" in said and "num_gpus:" not in said
    assert "each gang of 2 workers needs 2 GPU and this machine has 1" in refused(1.0, decode={"data_parallel": 2})
    check(2.0, decode={"data_parallel": 2})


OF_YAML = {name: setting for name, setting in SETTINGS.items() if setting.scope is not Scope.PROCESS}


@pytest.mark.parametrize("name", OF_YAML)
def test_every_setting_reaches_the_workers_that_it_is_for(name: str) -> None:
    setting, value = OF_YAML[name], OTHER[name]

    def of(config: ClusterConfig, pool: str) -> object:
        worker = config.worker(pool)
        return getattr(getattr(worker, setting.section) if setting.section else worker, name)

    if setting.scope in (Scope.POOL, Scope.BOTH):
        pools = {"prefill": {}, "decode": {name: value, **NEEDS.get(name, {})}}
        config = build({"model": "m", "pools": pools, **SHARED_NEEDS.get(name, {})})
        assert of(config, "decode") == value != of(config, "prefill")
    if setting.scope in (Scope.CLUSTER, Scope.BOTH):
        config = build({"model": "m", name: value})
        assert of(config, "prefill") == of(config, "decode") == value
    if setting.scope is Scope.POOL:
        assert f"{name}: unknown key" in refusal({"model": "m", name: value})
    if setting.scope is Scope.CLUSTER:
        assert f"pools.decode.{name}: unknown key" in refusal({"model": "m", "pools": {"decode": {name: value}}})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"pools": {"decode": {"expert_parallel": 3}}},
            "pools.decode.expert_parallel must be 1 or tensor_parallel (1)",
        ),
        (
            {"pools": {"decode": {"look_ahead": True, "tensor_parallel": 2}}},
            "pools.decode.look_ahead works only with one rank",
        ),
        (
            {"pools": {"decode": {"machines_per_worker": 2, "tensor_parallel": 2}}},
            "pools.decode.machines_per_worker (2) needs trusted_network",
        ),
        ({"pools": {"mixed": {"wire_dtype": "int8"}}, "transports": ["nixl"]}, "pools.mixed.wire_dtype int8 needs the"),
        ({"wire_dtype": "int8", "transports": ["nixl"]}, "wire_dtype int8 needs the transport grpc"),
    ],
)
def test_the_rules_of_a_worker_are_those_of_its_pool(settings: dict[str, object], expected: str) -> None:
    assert refusal({"model": "m"} | settings).startswith(expected)
