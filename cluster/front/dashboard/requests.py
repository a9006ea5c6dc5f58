"""Rows of the dashboard's table of requests: one for each, with its phase and the times of its phases.

    queue ──sent to a worker──> prefill ──first token──> pull ──the decode worker's first token──> decode ──> ended
      ^ └─────────────── one worker does all ──────────────────────────────────────────────────────^  └> migrate ┘
      └── no worker computes it: it will be resumed

A worker reports how long a request waited there and was computed with its first token: until then `prefill` is both.
The same holds for the phases of a hand-off, which come with the second token.
"""

from collections.abc import MutableMapping, Sequence
from weakref import WeakKeyDictionary

from ...routing.actions import Part, WorkerRequest
from ...routing.request_driver import RequestDriver

MAX_NAME_CHARS = 64  # of what a client may choose

# Times are seconds on the router's clock, null where they have not come; workers are numbers of the snapshot's `names`.
COLUMNS = (
    "id",
    "phase",
    "tier",
    "key",
    "started_at",
    "routed_at",
    "first_at",
    "second_at",
    "num_prompt",
    "num_cached",
    "num_output",
    "max_output",
    "source",  # worker that computes the prompt
    "worker",  # worker that decodes, or will
    "num_attempts",
    "num_migrations",
    "timings",  # durations in seconds, of PHASES; null until the first token
    "handoff_bytes",
    "transport",
    "outcome",  # null while it runs
    "ended_at",
)
PHASES = (
    "queue",
    "prefill",
    "deliver_first",
    "last_segment",
    "commit",
    "first_decode",
    "deliver_second",
    "announce_to_pull",
    "pull",
)
Row = list[object]


class WorkerNumbers:
    """Numbers of the workers that the rows of a snapshot name, by incarnation."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, incarnation: str | None) -> int | None:
        return None if incarnation is None else self._numbers.setdefault(incarnation, len(self._numbers))

    @property
    def incarnations(self) -> list[str]:
        return list(self._numbers)


class RequestRows:
    """Maker of rows. The timings of a request that has its second token are read once."""

    def __init__(self) -> None:
        self._known: MutableMapping[RequestDriver, tuple[list[float], int, str]] = WeakKeyDictionary()

    def row(self, driver: RequestDriver, numbers: WorkerNumbers, outcome: str | None, ended_at: float | None) -> Row:
        """Row of a request. `outcome`, `ended_at` (loop s): None while it runs."""
        state, times = driver.state, driver.times
        request, delivered = state.request, times.delivered_at
        timings, num_bytes, transport = self._timings(driver) if delivered else (None, 0, "")
        running = state.worker_requests()
        source, worker = _workers(driver, running)
        return [
            request.request_id[:MAX_NAME_CHARS],
            phase_of(driver, running) if outcome is None else "ended",
            request.level.tier[:MAX_NAME_CHARS],
            request.tenant.decode(errors="replace")[:MAX_NAME_CHARS],
            round(times.started_at, 4),
            _rounded(times.routed_at),
            _rounded(delivered[0]) if delivered else None,
            _rounded(delivered[1]) if len(delivered) > 1 else None,
            len(request.prompt_token_ids),
            state.output.notes.num_cached,
            len(state.token_ids),
            request.max_new_tokens,
            numbers.of(source),
            numbers.of(worker),
            state.num_attempts,
            state.num_migrations,
            timings,
            num_bytes,
            transport,
            outcome,
            _rounded(ended_at),
        ]

    def _timings(self, driver: RequestDriver) -> tuple[list[float] | None, int, str]:
        """Durations of PHASES, bytes and transport of the hand-off, as far as they are known."""
        if (found := self._known.get(driver)) is not None:
            return found
        timings = driver.timings()
        if timings is None:
            return None, 0, ""
        durations = [round(getattr(timings, f"{name}_s"), 5) for name in PHASES]
        found = durations, timings.handoff_bytes, timings.transport
        if len(driver.times.delivered_at) > 1:
            self._known[driver] = found
        return found


def phase_of(driver: RequestDriver, running: Sequence[WorkerRequest]) -> str:
    """Phase of a request that runs. `running`: its worker requests."""
    if not running:
        return "queue"
    waiting = [each.part for each in running if not each.has_token]
    if any(part is not Part.DECODE for part in waiting):
        return "prefill"
    if driver.state.moving() is not None:
        return "migrate"
    return "pull" if waiting else "decode"


def _workers(driver: RequestDriver, running: Sequence[WorkerRequest]) -> tuple[str | None, str | None]:
    """Incarnations of the workers that compute its prompt and decode it, as far as they are chosen."""
    origins = driver.state.output.notes.origins
    if origins:
        return origins[0][1], running[-1].worker if running else origins[-1][1]
    return (running[0].worker, running[-1].worker) if running else (None, None)


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 4)
