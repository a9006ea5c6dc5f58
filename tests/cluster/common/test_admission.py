"""Refusals by hand: which levels are missed, and when they would be met."""

import json
import math
from typing import Any

import pytest

from diptych.cluster.common.admission import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    RouteForecast,
    RouterLoad,
    RouterOutlook,
    forecast,
    memory_wait_s,
    refusal,
)
from diptych.cluster.common.prediction import Level, WorkerCost, WorkerState, WorkerTimes
from diptych.workers.common.errors import InternalError, Overloaded

LEVEL = Level(ttft_s=2.0, tpot_s=0.05)
DURATION_S = 20.0
NO_TPOT = {"tpot_s": 0.0, "idle_tpot_s": 0.0}


def refused(**times: float) -> Overloaded | None:
    """Refusal of a request. Idle workers need half a second plus 10 ms per token, unless `times` is given."""
    given = {"ttft_s": 1.0, "queue_s": 0.0, "tpot_s": 0.02, "idle_ttft_s": 0.5, "idle_tpot_s": 0.01} | times
    now = RouteForecast(given["ttft_s"], given["queue_s"], given["tpot_s"])
    return refusal(now, RouteForecast(given["idle_ttft_s"], 0.0, given["idle_tpot_s"]), LEVEL, DURATION_S)


@pytest.mark.parametrize("times", [{}, {"ttft_s": 2.0, "tpot_s": 0.05}, {"queue_s": 1.0}, NO_TPOT])
def test_a_level_that_is_met_is_no_reason(times: dict[str, float]) -> None:
    assert refused(**times) is None


@pytest.mark.parametrize(
    ("times", "retry_s"),
    [
        # A queue of five seconds, of which three have to be done.
        ({"ttft_s": 5.0, "queue_s": 4.5}, 3.0),
        ({"ttft_s": 2.1, "queue_s": 0.5}, MIN_RETRY_S),
        # Without the queue it takes 3 s, on an idle worker 0.5 s: two fifths of those that run have to end.
        ({"ttft_s": 4.0, "queue_s": 1.0}, 0.4 * DURATION_S),
        ({"ttft_s": 12.5, "queue_s": 10.0, "idle_ttft_s": 0.0}, 10.0),  # by then they have
        # Half of the sequences have to end.
        ({"tpot_s": 0.09}, 0.5 * DURATION_S),
        ({"tpot_s": 0.09, "ttft_s": 14.0, "queue_s": 13.0}, 12.0),
        ({"ttft_s": 500.0, "queue_s": 499.0}, MAX_RETRY_S),
    ],
)
def test_when_the_level_would_be_met(times: dict[str, float], retry_s: float) -> None:
    found = refused(**times)
    assert found is not None and found.retry_helps
    assert found.retry_after_s == pytest.approx(retry_s)
    assert "try again in" in found.message and "wait" in found.message


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({"ttft_s": 3.0, "idle_ttft_s": 2.5}, "time to the first token"),
        ({"tpot_s": 0.06, "idle_tpot_s": 0.06}, "time per output token"),
        ({"ttft_s": 5.0, "queue_s": 4.0, "tpot_s": 0.06, "idle_tpot_s": 0.06}, "time per output token"),
    ],
)
def test_a_level_that_an_idle_worker_misses_is_not_worth_another_try(times: dict[str, float], name: str) -> None:
    found = refused(**times)
    assert found is not None and not found.retry_helps
    assert found.retry_after_s == MAX_RETRY_S
    assert name in found.message and "ask for more time" in found.message


def test_a_route_by_hand() -> None:
    cost = WorkerCost(fixed_s=0.004, decode_s=0.001, context_s=0.0, prefill_s=0.001, pair_s=0.0)
    state = {"prefill_budget": 2048, "step_tokens": 2048, "num_context": 0, "prefill_share": 0.0}
    source = WorkerTimes.of(WorkerState(num_decodes=0, waiting_tokens=300, **state), cost, LEVEL)
    sink = WorkerTimes.of(WorkerState(num_decodes=9, waiting_tokens=0, **state), cost, LEVEL)
    found = forecast(source, sink, 100, 500, memory_s=2.0)
    assert (found.ttft_s, found.queue_s, found.tpot_s) == pytest.approx((2.704, 2.3, 0.014))


def test_memory_comes_free_as_sequences_end() -> None:
    assert memory_wait_s(-5, 100, DURATION_S) == memory_wait_s(0, 0, DURATION_S) == 0
    assert memory_wait_s(25, 100, DURATION_S) == DURATION_S / 4


def test_the_level_is_met_after_the_time_that_was_named() -> None:
    """The queue shortens by a second each second."""
    found = refused(ttft_s=5.0, queue_s=4.5)
    assert found is not None
    assert refused(ttft_s=5.0 - found.retry_after_s, queue_s=4.5 - found.retry_after_s) is None


OUTLOOK = RouterOutlook(3, 8, 4.0, LEVEL, RouteForecast(9.0, 8.0, 0.01), RouteForecast(0.5, 0.0, 0.01))


def test_a_router_refuses_what_exceeds_its_number_of_requests() -> None:
    assert OUTLOOK.excess(5) is None
    found = OUTLOOK.excess(6)
    assert found is not None
    assert found.retry_after_s == 3.0  # 8 end in 4 s, so 6 in 3
    assert "3 sequences are in flight, and 6 more would exceed the 8" in found.message


def test_what_a_router_tells_is_read_again() -> None:
    for outlook in (OUTLOOK, RouterOutlook(0, 1, 0.0, LEVEL)):
        load = RouterLoad("a1", True, outlook)
        assert RouterLoad.from_json(json.loads(json.dumps(load.to_json(), allow_nan=False))) == load
    never = RouterOutlook(0, 1, 0.0, LEVEL, RouteForecast(math.inf, 0.0, 0.0), RouteForecast(0.0, 0.0, 0.0))
    json.dumps(RouterLoad("a1", True, never).to_json(), allow_nan=False)


GOOD = RouterLoad("a1", True, OUTLOOK).to_json()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "load",
        {},
        *(
            {name: value for name, value in GOOD.items() if name != left}
            for left in ("router", "ready", "requests", "level")
        ),
        GOOD | {"router": "x" * 65},
        GOOD | {"ready": 1},
        GOOD | {"requests": -1},
        GOOD | {"requests": 1 << 40},
        GOOD | {"requests": 1.5},
        GOOD | {"max_requests": 0},
        GOOD | {"mean_s": -1},
        GOOD | {"mean_s": True},
        GOOD | {"mean_s": math.nan},
        GOOD | {"level": {"ttft_s": 1}},
        GOOD | {"now": {"ttft_s": "soon", "queue_s": 0, "tpot_s": 0}},
        GOOD | {"idle": 3},
    ],
)
def test_what_no_router_tells_is_an_error(wrong: Any) -> None:
    with pytest.raises(InternalError):
        RouterLoad.from_json(wrong)
