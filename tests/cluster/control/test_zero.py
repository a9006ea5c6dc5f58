"""A pool without workers: when its last one leaves, and when it gets one again."""

from dataclasses import replace

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.control.autoscaler import GROW_AFTER, PoolCounters
from diptych.cluster.control.controller import REPAID, Controller
from diptych.workers.common.errors import ConfigError

POOL = {"replicas": 1, "min_replicas": 0, "max_replicas": 2, "scale_to_zero_after_s": 30}
NONE = {"replicas": 0}
CONFIG = {"model": "fake", "pools": {"decode": POOL, "prefill": NONE}}
TARGETS = {"prefill": 0, "decode": 1, "mixed": 0}
ASLEEP = TARGETS | {"decode": 0}


def counters(num_running: int = 0, num_tokens: int = 0, num_waiting_tokens: int = 0) -> PoolCounters:
    return PoolCounters(1, num_running, 0, num_waiting_tokens, num_tokens, num_tokens, 100, 100)


def left_at(controller: Controller, looks: dict[int, PoolCounters], num_waiting: int = 0) -> int | None:
    """Look every second, at `looks` or an idle worker; return when the pool is emptied."""
    at = counters()
    for second in range(120):
        at = looks.get(second, at)
        decided = controller.replicas({"decode": at}, TARGETS, float(second), num_waiting)
        if decided:
            assert decided == {"decode": 0}
            return second
    return None


def test_the_last_worker_leaves_after_it_has_idled() -> None:
    controller = Controller(build(CONFIG))
    assert left_at(controller, {}) == 30
    [decision] = controller.log.statuses(30.0)
    assert (decision.action, decision.reason) == ("1 -> 0 workers", "The pool's last worker has had nothing to do.")


def test_work_of_any_kind_begins_the_time_anew() -> None:
    running = left_at(Controller(build(CONFIG)), {20: counters(num_running=1), 21: counters()})
    computed_between_looks = left_at(Controller(build(CONFIG)), {20: counters(num_tokens=5)})
    assert (running, computed_between_looks) == (50, 50)
    assert left_at(Controller(build(CONFIG)), {}, num_waiting=1) is None


def test_a_pool_that_keeps_one_worker_is_never_emptied() -> None:
    kept = build(CONFIG | {"pools": {"decode": POOL | {"min_replicas": 1}, "prefill": NONE}})
    assert left_at(Controller(kept), {}) is None


def test_requests_that_wait_wake_the_pool_at_once_and_its_start_is_explained() -> None:
    controller = Controller(build(CONFIG))
    controller.started("decode", 12.0)
    assert controller.replicas({}, ASLEEP, 100.0) == {}
    assert controller.replicas({}, ASLEEP, 100.01, 3) == {"decode": 1}
    [decision] = controller.log.statuses(100.01)
    assert decision.reason == "3 requests and no worker: a start of the pool takes up to 12 s."
    assert controller.replicas({}, TARGETS, 101.0, 3) == {}
    assert controller.ready_in_s(104.01) == pytest.approx(8.0)
    assert controller.ready_in_s(400.0) == 1.0
    assert controller.ready_in_s(104.01, {"decode"}) is None, "it waits for a machine"
    controller.replicas({"decode": counters()}, TARGETS, 115.01)
    [decision] = controller.log.statuses(115.01)
    assert (decision.result, controller.ready_in_s(115.01)) == ("a worker came after 15 s", None)


def test_a_start_that_was_never_measured_promises_nothing() -> None:
    controller = Controller(build(CONFIG))
    assert controller.replicas({}, ASLEEP, 1.0, 1) == {"decode": 1}
    assert (
        controller.log.statuses(1.0)[0].reason
        == "1 request and no worker: a start of the pool has not been measured yet."
    )
    assert controller.ready_in_s(1.0) is None


def test_a_worker_that_was_waited_for_stays_as_long_as_its_start_is_worth() -> None:
    controller = Controller(build(CONFIG))
    controller.replicas({}, ASLEEP, 0.0, 1)
    start_s, left = 20, None
    controller.started("decode", start_s)
    for second in range(start_s, 1000):
        if controller.replicas({"decode": counters()}, TARGETS, float(second)) == {"decode": 0}:
            left = second
            break
    assert left == REPAID * start_s


def test_a_pool_without_workers_helps_where_prompts_wait_too_long() -> None:
    pools = {"prefill": POOL, "decode": {"replicas": 1}}
    controller = Controller(build({"model": "fake", "pools": pools}))
    targets = {"prefill": 0, "decode": 1, "mixed": 0}
    assert controller.replicas({"decode": counters(1, 0)}, targets, 0.0) == {}
    found = [
        controller.replicas({"decode": replace(counters(1, 100 * look, 1000), prefill_s=look)}, targets, float(look))
        for look in range(1, 6)
    ]
    assert found[:GROW_AFTER] == [{}, {}, {"prefill": 1}]
    reason = controller.log.statuses(0.0)[0].reason
    assert reason == (
        "The pool has no workers, and the other pools have more to do than they can within the service level."
    )


def test_a_decode_pool_without_workers_comes_back_for_what_decodes_too_slowly_elsewhere() -> None:
    pools = {"prefill": POOL, "decode": POOL}
    level = {"ttft_s": 3.0, "tpot_s": 0.05}
    targets = {"prefill": 1, "decode": 0, "mixed": 0}

    def looks(tokens_per_s: int) -> list[dict[str, int]]:
        controller = Controller(build({"model": "fake", "pools": pools, "service_level": level}))
        at = [PoolCounters(1, 60, 0, 0, 0, second * tokens_per_s, 100, 50) for second in range(GROW_AFTER + 1)]
        return [controller.replicas({"prefill": found}, targets, float(second)) for second, found in enumerate(at)]

    assert not any(looks(60 * 25)), "40 ms a token"
    assert looks(60 * 7) == [*[{}] * GROW_AFTER, {"decode": 1}]


def test_requests_that_wait_for_a_worker_that_comes_anyway_wake_no_other_pool() -> None:
    pools = {"decode": {"replicas": 1}, "mixed": POOL | {"replicas": 0}, "prefill": NONE}
    controller = Controller(build({"model": "fake", "pools": pools}))
    assert controller.replicas({}, {"prefill": 0, "decode": 1, "mixed": 0}, 0.0, 5) == {}


def test_prefill_workers_must_not_be_left_alone() -> None:
    with pytest.raises(ConfigError, match="prefill pool must not keep some"):
        build({"model": "fake", "pools": {"prefill": {"replicas": 1}, "decode": POOL}})
    build({"model": "fake", "pools": {"prefill": POOL, "decode": POOL}})
