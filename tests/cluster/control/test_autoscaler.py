"""Loads in, targets out: late to grow, later to shrink."""

import pytest

from diptych.cluster.common.config import ServiceLevel
from diptych.cluster.common.config_file import build
from diptych.cluster.control.autoscaler import (
    GROW_AFTER,
    LOOK_S,
    SHRINK_AFTER,
    Autoscaler,
    Bounds,
    PoolCounters,
    PoolLoad,
    Trend,
    targets,
)
from diptych.proto.worker_pb2 import LoadReport

LEVEL = ServiceLevel(ttft_s=1.0, tpot_s=0.1)
BOUNDS = Bounds(1, 8)


def settle(pool: str, load: PoolLoad, bounds: Bounds = BOUNDS, looks: int = GROW_AFTER) -> int:
    """The target after `looks` checks at the same load."""
    trend, replicas = Trend(), load.num_workers
    for _ in range(looks):
        decision = targets({pool: load}, LEVEL, {pool: bounds}, {pool: trend}, {pool: load.num_workers})[pool]
        trend, replicas = decision.trend, decision.replicas
        if replicas != load.num_workers:
            break
    return replicas


def test_one_look_moves_nothing() -> None:
    load = PoolLoad(1, num_waiting=50, num_waiting_tokens=50_000, prefill_tokens_per_s=1000)
    assert settle("prefill", load, looks=GROW_AFTER - 1) == 1
    assert settle("prefill", load, looks=GROW_AFTER) == 8


@pytest.mark.parametrize(
    ("pool", "load", "expected"),
    [
        # 3,000 tokens wait, a worker computes 1,000 in ttft_s.
        ("prefill", PoolLoad(1, num_waiting=3, num_waiting_tokens=3000, prefill_tokens_per_s=1000), 3),
        ("prefill", PoolLoad(2, num_waiting=3, num_waiting_tokens=3000, prefill_tokens_per_s=2000), 3),
        ("prefill", PoolLoad(1, num_waiting=12, num_waiting_tokens=3000), 3),
        ("decode", PoolLoad(2, num_running=2, kv_use=0.99), 3),
        # 40 sequences at 200 tokens per second: 0.2 s per token, twice the target.
        ("decode", PoolLoad(2, num_running=40, decode_tokens_per_s=200, kv_use=0.1), 4),
        # One sequence cannot be spread.
        ("decode", PoolLoad(1, num_running=1, decode_tokens_per_s=1, kv_use=0.1), 1),
        ("decode", PoolLoad(1, num_running=1, num_waiting=9, kv_use=0.1), 2),
        # Each of a gang has a queue.
        ("prefill", PoolLoad(1, num_waiting=16, num_waiting_tokens=3000, gang_size=2), 2),
        ("decode", PoolLoad(1, num_running=2, num_waiting=8, kv_use=0.1, gang_size=2), 1),
        ("decode", PoolLoad(1, num_running=2, num_waiting=9, kv_use=0.1, gang_size=2), 2),
        ("mixed", PoolLoad(1, num_waiting=3, num_waiting_tokens=3000, prefill_tokens_per_s=1000, kv_use=0.99), 3),
    ],
)
def test_a_pool_grows_by_what_it_lacks(pool: str, load: PoolLoad, expected: int) -> None:
    assert settle(pool, load) == expected


def test_an_idle_pool_shrinks_by_one_after_a_long_while() -> None:
    idle = PoolLoad(4)
    assert settle("decode", idle, looks=SHRINK_AFTER - 1) == 4
    assert settle("decode", idle, looks=SHRINK_AFTER) == 3


def test_bounds_hold() -> None:
    assert settle("decode", PoolLoad(2), Bounds(2, 4), SHRINK_AFTER) == 2
    assert settle("decode", PoolLoad(4, num_running=9, kv_use=1.0), Bounds(2, 4)) == 4


def test_a_quiet_look_forgets_the_urge_to_grow() -> None:
    busy = PoolLoad(1, num_running=9, kv_use=1.0)
    calm = PoolLoad(1, num_running=9, kv_use=0.5)
    trend = targets({"decode": busy}, LEVEL, {"decode": BOUNDS}, {}, {"decode": 1})["decode"].trend
    assert trend == Trend(grow=1)
    found = targets({"decode": calm}, LEVEL, {"decode": BOUNDS}, {"decode": trend}, {"decode": 1})
    assert found["decode"].trend == Trend()


def test_a_pool_without_workers_is_left_alone() -> None:
    assert targets({"decode": PoolLoad(0)}, LEVEL, {"decode": BOUNDS}, {}, {"decode": 1}) == {}


def counters(prefill_tokens: int, waiting_tokens: int) -> dict[str, PoolCounters]:
    report = LoadReport(
        num_waiting=1, num_waiting_tokens=waiting_tokens, num_prefill_tokens=prefill_tokens, num_blocks=10
    )
    return {"prefill": PoolCounters.of([report], 1), "decode": PoolCounters.of([LoadReport(num_blocks=10)], 1)}


def test_only_pools_with_room_between_their_bounds_move() -> None:
    config = build({"model": "m", "pools": {"prefill": {"min_replicas": 1, "max_replicas": 3}, "decode": {}}})
    autoscaler = Autoscaler(config)
    decided: dict[str, int] = {}
    for second in range(GROW_AFTER + 1):
        decided = autoscaler.look(
            counters(prefill_tokens=1000 * second, waiting_tokens=2500), second * LOOK_S, {"prefill": 1}
        )
    assert decided == {"prefill": 3}


def test_a_gang_is_as_large_as_its_pool_says() -> None:
    pool = {"min_replicas": 1, "max_replicas": 3, "data_parallel": 4}
    autoscaler = Autoscaler(build({"model": "m", "pools": {"prefill": pool, "decode": {}}}))
    waiting = [LoadReport(num_waiting=5, num_waiting_tokens=500) for _ in range(4)]
    decided: dict[str, int] = {}
    for second in range(GROW_AFTER + 1):
        decided = autoscaler.look({"prefill": PoolCounters.of(waiting, 1)}, second * LOOK_S, {"prefill": 1})
    assert decided == {"prefill": 2}


def test_looks_in_quick_succession_count_once() -> None:
    config = build({"model": "m", "pools": {"prefill": {"min_replicas": 1, "max_replicas": 3}, "decode": {}}})
    autoscaler = Autoscaler(config)
    for number in range(10 * GROW_AFTER):
        assert autoscaler.look(counters(0, waiting_tokens=10_000), number * LOOK_S / 1000, {"prefill": 1}) == {}


@pytest.mark.parametrize("num_ready", [1, 2, 3, 5])
def test_workers_that_start_or_leave_change_no_target(num_ready: int) -> None:
    """One that is replaced is not ready, and in an upgrade one more is: the target is what it was."""
    calm = PoolLoad(num_ready, num_running=9, kv_use=0.8 * 3 / num_ready if num_ready >= 3 else 0.5)
    decision = targets({"decode": calm}, LEVEL, {"decode": Bounds(2, 4)}, {}, {"decode": 3})["decode"]
    assert decision.replicas == 3
