"""Layouts on GPUs, against lists and numbers of bytes computed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from diptych.cluster.common.config import interchangeable
from diptych.cluster.common.config_file import build
from diptych.cluster.planning.layouts import (
    MOST_SPLITS,
    LayoutKind,
    PlannedLevel,
    PlannedPool,
    Ranks,
    Routes,
    WorkerMemory,
    beside,
    layouts_of,
    ranks_that_fit,
    settings_of,
)
from diptych.cluster.preflight.checks import check_model
from diptych.cluster.simulate.gpus import GPUS
from diptych.workers.common.errors import ConfigError

from .shapes import LARGE, LLAMA, MIXTURE, checkpoint

ONE, TWO, FOUR = Ranks(1, 1, 50_000), Ranks(2, 1, 90_000), Ranks(4, 1, 200_000)
LEVEL = PlannedLevel(0.5, 0.05)


def memory(gpu: str, needed: int = 8192) -> WorkerMemory:
    return WorkerMemory(GPUS[gpu], 0.85, needed, 8192)


def pools_of(num_gpus: int, *ranks: Ranks) -> list[tuple[str, str]]:
    """Pools and ranks, each once."""
    return list(dict.fromkeys((each.pools_text, each.ranks_text) for each in layouts_of(num_gpus, ranks)))


def test_all_splits_of_four_gpus() -> None:
    assert pools_of(4, ONE, TWO) == [
        ("4 mixed", "1"),
        ("2 mixed", "2"),
        ("1 prefill + 3 decode", "1"),
        ("2 prefill + 2 decode", "1"),
        ("3 prefill + 1 decode", "1"),
        ("2 prefill + 1 decode", "1 + 2"),
        ("1 prefill + 2 decode", "2 + 1"),
        ("1 prefill + 1 decode", "2"),
    ]
    assert all(layout.num_gpus == 4 for layout in layouts_of(4, (ONE, TWO)))
    assert pools_of(3, TWO) == [], "one of three GPUs would be left over"


def test_the_dial_needs_workers_that_are_alike() -> None:
    for layout in layouts_of(4, (ONE, TWO, FOUR)):
        others = [each.routes for each in layouts_of(4, (ONE, TWO, FOUR)) if each.pools == layout.pools]
        workers = sum(pool.num_workers for pool in layout.pools)
        alike = workers > 1 and len({pool.ranks for pool in layout.pools}) == 1
        assert others == [Routes.ROLES, Routes.PREDICTED] + [Routes.DIAL] * alike


def test_splits_of_many_gpus_are_thinned_evenly() -> None:
    splits = [each for each in layouts_of(64, (ONE,)) if each.kind == LayoutKind.DISAGGREGATED]
    numbers = list(dict.fromkeys(each.pools[0].num_workers for each in splits))
    assert numbers == [1, 11, 22, 32, 42, 53, 63]
    assert len(numbers) == MOST_SPLITS


def test_splits_beside_a_split() -> None:
    layouts = layouts_of(8, (ONE, TWO))
    of = {(each.pools_text, each.ranks_text): each for each in layouts if each.routes == Routes.DIAL}
    near = beside(of["1 prefill + 7 decode", "1"], layouts)
    assert [str(each) for each in near] == ["2 prefill + 6 decode, TP 1, dial"]
    near = beside(of["2 prefill + 2 decode", "2"], layouts)
    assert [str(each) for each in near] == ["1 prefill + 3 decode, TP 2, dial", "3 prefill + 1 decode, TP 2, dial"]
    assert beside(of["8 mixed", "1"], layouts) == []


def test_ranks_are_those_that_hold_the_model_and_the_load(tmp_path: Path) -> None:
    large = check_model(checkpoint(tmp_path, LARGE))
    # 141 GB of weights: 71 on each of two, 35 on each of four.
    assert [each.tensor_parallel for each in ranks_that_fit(large, memory("H100"), 8)] == [2, 4, 8]
    assert [each.tensor_parallel for each in ranks_that_fit(large, memory("L40S"), 8)] == [4, 8]
    assert [each.tensor_parallel for each in ranks_that_fit(large, memory("H100", 100_000), 8)] == [4, 8]
    with pytest.raises(
        ConfigError, match=r"1: the weights take 141,\d{3},\d{3},\d{3} bytes on each, but a GPU has 80,"
    ):
        ranks_that_fit(large, memory("H100"), 1)
    with pytest.raises(ConfigError, match=r"2: .*but the load needs 100,000 tokens \(16,384,000,000 bytes\)"):
        ranks_that_fit(large, memory("H100", 100_000), 2)


def test_weights_and_kv_in_few_bits_leave_room(tmp_path: Path) -> None:
    spec = check_model(checkpoint(tmp_path, LARGE))
    plain, few = memory("H100"), replace(memory("H100"), quantize="int4", kv_dtype="int8")
    assert [each.tensor_parallel for each in ranks_that_fit(spec, plain, 8)] == [2, 4, 8]
    found = ranks_that_fit(spec, few, 8)
    assert [each.tensor_parallel for each in found] == [1, 2, 4, 8]
    assert found[1].kv_tokens > 1.9 * ranks_that_fit(spec, plain, 8)[0].kv_tokens  # of two ranks
    written = settings_of(layouts_of(1, found)[0], "m", few, LEVEL)
    assert (written["quantize"], written["kv_dtype"]) == ("int4", "int8")
    built = build(written | {"model": "tiny"}).worker("mixed")
    assert (built.model.quantize, built.kv_dtype) == ("int4", "int8")


def test_heads_that_do_not_divide_are_no_layout(tmp_path: Path) -> None:
    odd = check_model(
        checkpoint(tmp_path, LLAMA | {"hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 6})
    )
    assert [each.tensor_parallel for each in ranks_that_fit(odd, memory("H100"), 4)] == [1, 2]


def test_experts_that_cannot_be_sliced_are_whole(tmp_path: Path) -> None:
    sliced = check_model(checkpoint(tmp_path, MIXTURE))
    assert [each.expert_parallel for each in ranks_that_fit(sliced, memory("H200"), 2)] == [1, 1]
    whole = check_model(checkpoint(tmp_path, MIXTURE | {"intermediate_size": 14337}))
    assert [(each.tensor_parallel, each.expert_parallel) for each in ranks_that_fit(whole, memory("H200"), 2)] == [
        (1, 1),
        (2, 2),
    ]


@pytest.mark.parametrize("routes", Routes)
def test_settings_are_those_of_a_cluster(routes: Routes) -> None:
    found = {each.routes: each for each in layouts_of(4, (TWO,)) if each.kind == LayoutKind.COLOCATED}
    config = build(settings_of(found[routes], "tiny", memory("H100"), LEVEL))
    assert config.pools.targets == {"prefill": 0, "decode": 0, "mixed": 2}
    assert config.worker("mixed").parallel.tensor_parallel == 2
    assert (config.router.predict, config.dial) == (routes != Routes.ROLES, routes == Routes.DIAL)
    assert (config.service_level.ttft_s, config.service_level.tpot_s) == (0.5, 0.05)
    if config.dial:
        assert interchangeable(config.pools) == [frozenset({"prefill", "decode", "mixed"})]


def test_pools_have_ranks_of_their_own() -> None:
    layout = next(each for each in layouts_of(6, (TWO, FOUR)) if each.ranks_text == "4 + 2")
    assert layout.pools == (PlannedPool("prefill", 1, FOUR), PlannedPool("decode", 1, TWO))
    config = build(settings_of(layout, "tiny", memory("H100"), LEVEL))
    assert [config.worker(pool).parallel.tensor_parallel for pool in ("prefill", "decode")] == [4, 2]


def test_a_worker_starts_where_a_context_has_no_room() -> None:
    """A part of the room is served at most, and the load's longest request always."""
    context = {
        needed: settings_of(layouts_of(1, (Ranks(1, 1, 10_000),))[0], "tiny", memory("H100", needed), LEVEL)
        for needed in (1000, 9000)
    }
    assert {needed: settings["max_context_tokens"] for needed, settings in context.items()} == {1000: 8000, 9000: 8192}
