"""Computes the phases of a request from the times of its router and the durations of its workers. Pure.

    receipt      ──queue, prefill, deliver_first──────────────────────> first token
    first token  ──last_segment, commit, first_decode, deliver_second──> second token
    during the prefill, and in no sum: announce_to_pull, pull

Each row sums exactly to the time that the router measured. Workers send durations, never times, so no two clocks are
compared: delivery is the rest. The sink begins before the router has the first token, so its phases may exceed the time
between the two tokens; the excess is taken off the earliest of them, because nothing waited for it.

The phases of a token are those of the attempt that delivered it. Time lost before that attempt is queue, or commit for
the second token. Without a hand-off, first_decode is the whole time between the first two tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter

from ...proto import inference_pb2
from ...workers.common.errors import DiptychError
from ...workers.common.timings import SequenceTimings
from .worker_stats import NO_DRAFTS, Drafts

MAX_EVENTS = 128  # that are kept of one request


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Phases of one completion, as in proto/inference.proto. The second row is 0 without a second token."""

    queue_s: float
    prefill_s: float
    deliver_first_s: float
    last_segment_s: float = 0.0
    commit_s: float = 0.0
    first_decode_s: float = 0.0
    deliver_second_s: float = 0.0
    announce_to_pull_s: float = 0.0
    pull_s: float = 0.0
    total_s: float = 0.0
    handoff_bytes: int = 0
    transport: str = ""  # empty without a hand-off
    num_attempts: int = 1
    num_migrations: int = 0
    num_drafted: int = 0  # tokens
    num_accepted: int = 0  # of them

    def to_json(self, index: int) -> dict[str, float | int | str]:
        """JSON object with the names of the protobuf message."""
        return {"index": index} | asdict(self)

    def to_proto(self, index: int) -> inference_pb2.Timings:
        return inference_pb2.Timings(
            index=index,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            deliver_first_s=self.deliver_first_s,
            last_segment_s=self.last_segment_s,
            commit_s=self.commit_s,
            first_decode_s=self.first_decode_s,
            deliver_second_s=self.deliver_second_s,
            announce_to_pull_s=self.announce_to_pull_s,
            pull_s=self.pull_s,
            total_s=self.total_s,
            handoff_bytes=self.handoff_bytes,
            transport=self.transport,
            num_attempts=self.num_attempts,
            num_migrations=self.num_migrations,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )


_PHASES = (
    ("queue", "waiting for a step"),
    ("prefill", "reading the prompt"),
    ("deliver_first", "delivering the first token"),
    ("last_segment", "hand-off: last KV"),
    ("commit", "hand-off: commit"),
    ("first_decode", "making the second token"),
    ("deliver_second", "delivering the second token"),
    ("announce_to_pull", "within the prefill: waiting for blocks"),
    ("pull", "within the prefill: pulling KV"),
    ("total", "until the last token"),
)
_seconds_of = attrgetter(*(f"{name}_s" for name, _ in _PHASES))


def server_timing(timings: RequestTimings) -> str:
    """Value of a Server-Timing header (W3C): durations in milliseconds."""
    phases = zip(_PHASES, _seconds_of(timings), strict=True)
    return ", ".join([f'{name};dur={seconds * 1000:.3f};desc="{what}"' for (name, what), seconds in phases])


def fit(total_s: float, *phases_s: float) -> tuple[float, ...]:
    """Phases in their order, then the rest of `total_s`. An excess over `total_s` is taken off the earliest phases."""
    excess = max(sum(phases_s) - total_s, 0.0)
    fitted: list[float] = []
    for phase in phases_s:
        cut = min(phase, excess)
        excess -= cut
        fitted.append(phase - cut)
    return (*fitted, max(total_s - sum(fitted), 0.0))


@dataclass(slots=True)
class RequestTimes:
    """Times of a request at its router: seconds on one monotonic clock. The lists are of the first two tokens."""

    started_at: float
    routed_at: float | None = None  # when its first workers were chosen
    submitted_at: float = 0.0  # of the newest worker request
    last_token_at: float | None = None
    num_delivered: int = 0
    delivered_at: list[float] = field(default_factory=list[float])
    submits_at: list[float] = field(default_factory=list[float])  # of the worker requests that made them
    worker_timings: list[SequenceTimings | None] = field(default_factory=list[SequenceTimings | None])

    def accept(self, timings: Sequence[SequenceTimings | None]) -> None:
        """Take the workers' timings of the first tokens so far, at most two."""
        for each in timings[len(self.worker_timings) :]:
            self.worker_timings.append(each)
            self.submits_at.append(self.submitted_at)

    def delivered(self, num_tokens: int, now: float) -> bool:
        """Note tokens that go to the front door. Returns whether one of the first two is among them."""
        self.num_delivered += num_tokens
        num_new = min(self.num_delivered, 2) - len(self.delivered_at)
        self.delivered_at += [now] * num_new
        return num_new > 0

    def timings(
        self, now: float, num_attempts: int = 1, num_migrations: int = 0, drafts: Drafts = NO_DRAFTS
    ) -> RequestTimings | None:
        """Timings so far; None before the first token. `now`: delivery of the last token."""
        if not self.delivered_at:
            return None
        has_second = len(self.delivered_at) > 1
        second = self.worker_timings[1] if has_second else None
        handoff = second.handoff if second else None
        queue_s, prefill_s, deliver_first_s = self._until_first()
        last_segment_s, commit_s, decode_s, deliver_second_s = self._until_second() if has_second else (0.0,) * 4
        return RequestTimings(
            queue_s=queue_s,
            prefill_s=prefill_s,
            deliver_first_s=deliver_first_s,
            last_segment_s=last_segment_s,
            commit_s=commit_s,
            first_decode_s=decode_s,
            deliver_second_s=deliver_second_s,
            announce_to_pull_s=handoff.announce_to_pull_s if handoff else 0.0,
            pull_s=handoff.pull_s if handoff else 0.0,
            total_s=now - self.started_at,
            handoff_bytes=handoff.num_bytes if handoff else 0,
            transport=handoff.transport if handoff else "",
            num_attempts=num_attempts,
            num_migrations=num_migrations,
            num_drafted=drafts.num_drafted,
            num_accepted=drafts.num_accepted,
        )

    def _until_first(self) -> tuple[float, float, float]:
        """queue, prefill, deliver_first."""
        total_s, queue_s = self.delivered_at[0] - self.started_at, self.submits_at[0] - self.started_at
        worker = self.worker_timings[0]
        if worker is None:
            return queue_s, total_s - queue_s, 0.0
        queue_s, prefill_s, deliver_s = fit(total_s, queue_s + worker.queue_s, worker.compute_s)
        return queue_s, prefill_s, deliver_s

    def _until_second(self) -> tuple[float, float, float, float]:
        """last_segment, commit, first_decode, deliver_second."""
        total_s = self.delivered_at[1] - self.delivered_at[0]
        worker = self.worker_timings[1]
        if worker is None:
            return 0.0, 0.0, total_s, 0.0
        lost_s = max(self.submits_at[1] - self.delivered_at[0], 0.0)
        last_segment_s, commit_s = 0.0, lost_s + worker.queue_s
        if worker.handoff is not None:
            last_segment_s = worker.handoff.last_segment_s
            commit_s += worker.handoff.release_s
        last_segment_s, commit_s, decode_s, deliver_s = fit(total_s, last_segment_s, commit_s, worker.compute_s)
        return last_segment_s, commit_s, decode_s, deliver_s


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something that befell a request at its router. `at`: seconds, as in RequestTimes."""

    at: float
    what: str
    worker: str  # name, or incarnation where it has none
    detail: str  # part of the request that the worker computes, or code of an error


@dataclass(slots=True, eq=False)
class RequestJournal:
    """Record of one request at its router, kept where somebody wants it. It is the request's `trace`; without one,
    `traceparent` is empty. Complete once `ended_at` is set."""

    index: int = 0  # of the completion in its call
    traceparent: str = ""
    tracestate: str = ""
    events: list[RequestEvent] = field(default_factory=list[RequestEvent])
    times: RequestTimes | None = None  # once the router has it
    timings: RequestTimings | None = None  # None: it got no token
    error: DiptychError | None = None
    num_cached: int = 0  # tokens of the prompt
    ended_at: float | None = None

    def note(self, at: float, what: str, worker: str, detail: str) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(RequestEvent(at, what, worker, detail))
