"""Decides whether a request is refused that would rather be refused than late. Pure.

The queue before a first token, the wait for KV memory included, shortens by a second each second. Where that is not
enough, or where tokens come too slowly, sequences have to end first: those that run now end evenly over the time D that
a request takes on average (Little's law), and the predicted time falls meanwhile from what it is to that of idle
workers. Requests that come later are not known.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ...workers.common.errors import InternalError, Overloaded
from .prediction import Level, WorkerTimes, prefill_s, tpot_s, ttft_s

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
MOST_S = 1e9  # of times that are told: what never comes is that late
MOST_COUNT = 1 << 31
MAX_TAG_CHARS = 64


@dataclass(frozen=True, slots=True)
class RouteForecast:
    """Predicted times of a request by a route, in seconds."""

    ttft_s: float
    queue_s: float  # part of ttft_s, for prompts that wait and for memory
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RouterOutlook:
    """Load of a router, and what its policy predicts for the least request that it could get now: one token of prompt.
    A request that is refused by it is refused by the router, too."""

    num_requests: int  # in flight
    max_requests: int
    mean_s: float  # duration of a request
    level: Level  # of requests that ask for none
    now: RouteForecast | None = None  # None: workers have not measured their steps, or there is none
    idle: RouteForecast | None = None  # if its workers were idle

    def excess(self, num_sequences: int) -> Overloaded | None:
        """Refusal of so many sequences more; None: there is room."""
        if self.num_requests + num_sequences <= self.max_requests:
            return None
        # Little's law: `max_requests` sequences end in the mean time that one takes.
        wait_s = self.mean_s * num_sequences / self.max_requests
        return Overloaded(
            f"{self.num_requests} sequences are in flight, and {num_sequences} more would exceed the "
            f"{self.max_requests} that this router accepts: try again later",
            retry_after_s=min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S),
        )

    def misses(self, ttft_s: float) -> Overloaded | None:
        """Refusal of any request that needs its first token so soon; None: the least one may run."""
        if self.now is None or self.idle is None:
            return None
        return refusal(self.now, self.idle, Level(ttft_s, math.inf), self.mean_s)

    def to_json(self) -> dict[str, object]:
        return {
            "requests": self.num_requests,
            "max_requests": self.max_requests,
            "mean_s": _told(self.mean_s),
            "level": {"ttft_s": self.level.ttft_s, "tpot_s": self.level.tpot_s},
            "now": _forecast_json(self.now),
            "idle": _forecast_json(self.idle),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> "RouterOutlook":
        """Raises InternalError for impossible numbers."""
        level = _numbers(found.get("level"), "ttft_s", "tpot_s")
        now, idle = (_forecast_from(found.get(name)) for name in ("now", "idle"))
        counts = [found.get("requests"), found.get("max_requests")]
        num, most = (n if isinstance(n, int) and 0 <= n <= MOST_COUNT else -1 for n in counts)
        [mean_s] = _numbers(found, "mean_s")
        if num < 0 or most < 1:
            raise InternalError(f"a router's load has impossible counts: {str(counts)[:80]}")
        return cls(num, most, mean_s, Level(*level), now, idle)


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Report of a router to whoever chooses between routers. `tag`: the ids of its calls begin with it."""

    tag: str
    ready: bool
    outlook: RouterOutlook

    def to_json(self) -> dict[str, object]:
        return {"router": self.tag, "ready": self.ready, **self.outlook.to_json()}

    @classmethod
    def from_json(cls, found: object) -> "RouterLoad":
        """Raises InternalError for what no router tells."""
        if not isinstance(found, Mapping):
            raise InternalError("a router's load is no JSON object")
        tag, ready = found.get("router"), found.get("ready")
        if not isinstance(tag, str) or len(tag) > MAX_TAG_CHARS or not isinstance(ready, bool):
            raise InternalError("a router's load lacks `router` or `ready`")
        return cls(tag, ready, RouterOutlook.from_json(found))


def _forecast_json(found: RouteForecast | None) -> dict[str, float] | None:
    return None if found is None else {name: _told(value) for name, value in asdict(found).items()}


def _forecast_from(found: object) -> RouteForecast | None:
    return None if found is None else RouteForecast(*_numbers(found, "ttft_s", "queue_s", "tpot_s"))


def _told(seconds: float) -> float:
    return min(seconds, MOST_S)  # JSON has no infinity


def _numbers(found: object, *names: str) -> list[float]:
    """Times of a JSON object. Raises InternalError where one is missing or impossible."""
    given = [found.get(name) for name in names] if isinstance(found, Mapping) else []
    numbers = [float(n) for n in given if isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= MOST_S]
    if len(numbers) != len(names):
        raise InternalError(f"a router's load lacks {' or '.join(names)}, or has an impossible one")
    return numbers


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
