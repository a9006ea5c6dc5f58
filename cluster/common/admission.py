"""Decides whether a request is refused that would rather be refused than late. Pure.

The queue before a first token, the wait for KV memory included, shortens by a second each second. Where that is not
enough, or where tokens come too slowly, sequences have to end first: those that run now end evenly over the time D that
a request takes on average (Little's law), and the predicted time falls meanwhile from what it is to that of idle
workers. Requests that come later are not known.
"""

import math
from dataclasses import dataclass

from ...workers.common.errors import Overloaded
from .prediction import Level, WorkerTimes, prefill_s, tpot_s, ttft_s

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """Predicted times of a request by a route, in seconds."""

    ttft_s: float
    queue_s: float  # part of ttft_s, for prompts that wait and for memory
    tpot_s: float


def forecast(
    source: WorkerTimes, sink: WorkerTimes, num_cached: int, num_tokens: int, memory_s: float = 0.0
) -> RouteForecast:
    """Predict for a request of `num_tokens` tokens, of which `source` has cached `num_cached`. source, sink: the
    workers that compute its prompt and decode it, or the same one twice. `memory_s`: until `source` has memory."""
    own_s, queue_s = prefill_s(source, num_cached, num_tokens), source.queue_s * source.stretch
    return RouteForecast(ttft_s(source, own_s) + memory_s, queue_s + memory_s, tpot_s(sink, 0.0, num_tokens))


def memory_wait_s(num_missing: int, num_used: int, mean_duration_s: float) -> float:
    """Time until so many more blocks are free, if all that are used come free evenly over that duration."""
    return mean_duration_s * num_missing / num_used if num_missing > 0 else 0.0


def refusal(now: RouteForecast, idle: RouteForecast, level: Level, mean_duration_s: float) -> Overloaded | None:
    """Refusal of a request whose level is predicted to be missed; None: it is met. `idle`: if its workers were idle;
    `mean_duration_s`: of requests."""
    ttft_wait_s = _wait_s(now.ttft_s, level.ttft_s, now.queue_s, idle.ttft_s, mean_duration_s)
    tpot_wait_s = _wait_s(now.tpot_s, level.tpot_s, 0.0, idle.tpot_s, mean_duration_s)
    wait_s, name, now_s, asked_s, idle_s = max(
        (ttft_wait_s, "time to the first token", now.ttft_s, level.ttft_s, idle.ttft_s),
        (tpot_wait_s, "time per output token", now.tpot_s, level.tpot_s, idle.tpot_s),
    )
    if not wait_s:
        return None
    helps = wait_s < math.inf
    remedy = f"try again in {wait_s:.3g} s" if helps else f"an idle worker takes {_ms(idle_s)}: ask for more time"
    return Overloaded(
        f"the {name} is predicted to be {_ms(now_s)}, {_ms(asked_s)} are asked for: {remedy}, or let the request wait "
        "(the header x-diptych-admission: wait; gRPC: ADMISSION_WAIT)",
        retry_after_s=min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S),
        retry_helps=helps,
    )


def _wait_s(now_s: float, level_s: float, queue_s: float, idle_s: float, mean_duration_s: float) -> float:
    """Time until a predicted time has fallen to its level; infinite where it never does."""
    late_s = now_s - level_s
    if late_s <= queue_s:
        return max(late_s, 0.0)
    if idle_s > level_s:
        return math.inf
    # Here now_s - queue_s > level_s >= idle_s.
    return max(queue_s, mean_duration_s * (late_s - queue_s) / (now_s - queue_s - idle_s))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
