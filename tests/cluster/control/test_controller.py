"""Decisions of the controller: their reasons, and what is noticed of their results."""

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.control.autoscaler import GROW_AFTER, SHRINK_AFTER, PoolCounters
from diptych.cluster.control.budgets import BARRED_S
from diptych.cluster.control.controller import REPAID, START_LIMIT_S, Controller
from diptych.proto.worker_pb2 import LoadReport, StepCost

CONFIG = {"model": "fake", "pools": {"decode": {"replicas": 1, "min_replicas": 1, "max_replicas": 4}}}
FULL = {"num_running": 9, "num_waiting": 3, "num_waiting_tokens": 700, "num_prefill_tokens": 0, "num_decode_tokens": 0}


def counters(num_workers: int, num_free: int) -> dict[str, PoolCounters]:
    return {"decode": PoolCounters(num_workers=num_workers, num_blocks=100, num_free_blocks=num_free, **FULL)}


def grown(controller: Controller) -> float:
    """Look at a full pool until it grows; returns the time."""
    for second in range(1, GROW_AFTER + 3):
        if controller.replicas(counters(1, 0), {"decode": 1}, float(second)) == {"decode": 2}:
            return float(second)
    raise AssertionError("it did not grow")


def test_a_growth_says_why_and_how_long_its_worker_took() -> None:
    controller = Controller(build(CONFIG))
    at = grown(controller)
    [decision] = controller.log.statuses(at)
    assert (decision.subject, decision.action, decision.result) == ("decode", "1 -> 2 workers", "")
    assert decision.reason == (
        "The pool needs 2 workers: 9 sequences run, 3 wait with 700 prompt tokens, and 100% of the KV memory is used."
    )
    controller.replicas(counters(2, 90), {"decode": 2}, at + 12)
    [decision] = controller.log.statuses(at + 12)
    assert (decision.result, decision.has_failed) == ("a worker came after 12 s", False)
    assert (controller.log.num_verified, controller.log.num_failed["replicas"]) == ({"replicas": 1}, 0)


def test_a_start_that_brings_no_worker_is_noted_once() -> None:
    controller = Controller(build(CONFIG))
    at = grown(controller)
    for second in range(1, int(START_LIMIT_S) + 20):
        changed = controller.replicas(counters(1, 0), {"decode": 2}, at + second)
        assert changed == {} or second > START_LIMIT_S, "the start is not taken back"
    first = controller.log.statuses(at)[-1]
    assert first.has_failed and first.result == "no worker has come within 120 s"
    for second in range(int(START_LIMIT_S) + 20, int(BARRED_S)):
        assert controller.replicas(counters(1, 0), {"decode": 1}, at + second) == {}
    assert controller.log.num_failed == {"replicas": 1}
    later = [controller.replicas(counters(1, 0), {"decode": 1}, at + BARRED_S + second) for second in range(5)]
    assert {"decode": 2} in later


def test_growth_that_brings_no_worker_is_taken_back_and_a_worker_that_is_replaced_is_not() -> None:
    controller = Controller(build(CONFIG))
    target, at = 2, grown(controller)
    for second in range(1, int(START_LIMIT_S) + 20):
        target = controller.replicas(counters(1, 0), {"decode": target}, at + second).get("decode", target)
    assert target == 1
    target, later = 3, at + START_LIMIT_S + 20
    controller = Controller(build(CONFIG))
    for second, num_ready in enumerate((3, 3, 2, 2, 2, 4, 4, 4)):
        calm = counters(num_ready, 40)
        assert controller.replicas(calm, {"decode": target}, later + second) == {}


def test_a_worker_whose_start_took_long_stays_long() -> None:
    """Without that it would leave after SHRINK_AFTER seconds."""
    controller = Controller(build(CONFIG))
    at = grown(controller)
    start_s = 30
    left = None
    for second in range(start_s, start_s + int(REPAID * start_s) + 2 * SHRINK_AFTER):
        if controller.replicas(counters(2, 100), {"decode": 2}, at + second) == {"decode": 1}:
            left = second
            break
    assert left is not None and left >= REPAID * start_s > start_s + SHRINK_AFTER


def reports(tokens: int) -> dict[str, list[tuple[str, LoadReport]]]:
    cost = StepCost(fixed_s=0.02, decode_s=0.001, prefill_s=0.0005, prefill_is_measured=True, decode_is_measured=True)
    load = LoadReport(
        prefill_budget=2047,
        step_tokens=2048,
        decode_role_tokens=256,
        num_prefill_tokens=tokens,
        num_decoding=10,
        step_cost=cost,
        num_blocks=100,
        num_free_blocks=100,
    )
    return {"mixed": [("mixed-1", load), ("mixed-2", load)]}


def test_budgets_move_only_where_the_dial_is_on() -> None:
    for dial in (False, True):
        pools = {"mixed": {"replicas": 2}, "prefill": {"replicas": 0}, "decode": {"replicas": 0}}
        config = build(
            {"model": "fake", "dial": dial, "pools": pools, "service_level": {"ttft_s": 3.0, "tpot_s": 0.05}}
        )
        controller, moved = Controller(config), {}
        for second in range(60):
            moved |= controller.budgets(reports(second * 750), float(second), 0.0)
            assert controller.budgets(reports(second * 750), second + 0.5, 0.0) == {}, "one look a second"
        assert sorted(moved.values()) == ([256, 2048] if dial else [])
        assert [f.pools for f in controller.forecasts] == (["decode+mixed+prefill"] if dial else [])
        if dial:
            [forecast] = controller.forecasts
            assert forecast.prompt_tokens_per_s == pytest.approx(2 * 750)
            assert (forecast.num_decodes, forecast.num_prefill, forecast.best_num_prefill) == (20, 0, 1)
            assert forecast.expected_misses > forecast.best_expected_misses
