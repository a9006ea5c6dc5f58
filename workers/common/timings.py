"""Times of one sequence on one worker, and of the reads from one source. Pure: every instant comes in.

    SequenceClock   ready ──first step it is part of──> started ──its first token here──> SequenceTimings
    PullClock       announced ──first read──> reading* ──sealed, all read──> PullTimes ──commit──> HandoffTimings
    TransferCounters     all pulls from one source, for its PeerLink

Instants are seconds of `time.monotonic`, the engine's clock too: a PullTimes is made on the event loop and completed on
the engine's thread.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...proto import worker_pb2
from .errors import InternalError

MAX_READS = 16  # that a sink reports to its source
MAX_NAME_CHARS = 64  # of a transport or an incarnation that a peer names


@dataclass(frozen=True, slots=True)
class HandoffTimings:
    """Times of a hand-off at its sink, in seconds; proto/worker.proto defines them."""

    announce_to_pull_s: float
    pull_s: float
    last_segment_s: float
    release_s: float
    num_bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class SequenceTimings:
    """Times until a sequence's first token on a worker, in seconds."""

    queue_s: float
    compute_s: float
    handoff: HandoffTimings | None = None

    def to_proto(self, entry: int) -> worker_pb2.SequenceTimings:
        message = worker_pb2.SequenceTimings(entry=entry, queue_s=self.queue_s, compute_s=self.compute_s)
        if (handoff := self.handoff) is not None:
            message.handoff.announce_to_pull_s = handoff.announce_to_pull_s
            message.handoff.pull_s = handoff.pull_s
            message.handoff.last_segment_s = handoff.last_segment_s
            message.handoff.release_s = handoff.release_s
            message.handoff.num_bytes = handoff.num_bytes
            message.handoff.transport = handoff.transport
        return message

    @classmethod
    def from_proto(cls, message: worker_pb2.SequenceTimings) -> "SequenceTimings":
        """Read and check. Raises InternalError for times that are not finite or negative."""
        handoff = None
        if message.HasField("handoff"):
            h = message.handoff
            handoff = HandoffTimings(
                check_duration(h.announce_to_pull_s),
                check_duration(h.pull_s),
                check_duration(h.last_segment_s),
                check_duration(h.release_s),
                h.num_bytes,
                check_name(h.transport),
            )
        return cls(check_duration(message.queue_s), check_duration(message.compute_s), handoff)


def check_duration(seconds: float) -> float:
    """Return `seconds`. Raises InternalError unless it is finite and not negative."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InternalError(f"a worker reports a duration of {seconds} s: it must be finite and not negative")
    return seconds


def is_name(name: str) -> bool:
    """Return whether every peer accepts it as the name of a transport or a process."""
    return len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable()


def check_name(name: str) -> str:
    """Return the name of a transport or a process that a peer sent. Raises InternalError for an invalid one."""
    if not is_name(name):
        raise InternalError(f"a worker uses the name {name[:MAX_NAME_CHARS]!r}: at most {MAX_NAME_CHARS} plain letters")
    return name


@dataclass(slots=True)
class SequenceClock:
    """Clock of a sequence from receipt (a sink: from when it may compute) to its first token here."""

    ready_at: float
    handoff: HandoffTimings | None = None
    started_at: float | None = None

    def start(self, now: float) -> None:
        """Note the begin of its first step; later steps have no effect."""
        if self.started_at is None:
            self.started_at = now

    def commit(self, times: "PullTimes", waited_s: float) -> None:
        """Let a provisional sequence go on. `waited_s`: time in which its token was there, and the release's answer was
        not."""
        self.ready_at += waited_s
        if self.started_at is not None:
            self.started_at += waited_s
        self.handoff = times.committed(self.ready_at)

    def timings(self, now: float) -> SequenceTimings:
        assert self.started_at is not None, "a token without a step"
        return SequenceTimings(max(self.started_at - self.ready_at, 0.0), now - self.started_at, self.handoff)


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Times of a pull whose release was granted. `read_at`: the end of the last read, or the seal if that was later."""

    announce_to_pull_s: float = 0.0
    pull_s: float = 0.0
    last_segment_s: float = 0.0
    read_at: float = 0.0
    num_bytes: int = 0
    transport: str = ""

    def committed(self, now: float) -> HandoffTimings:
        release_s = max(now - self.read_at, 0.0)
        return HandoffTimings(
            self.announce_to_pull_s, self.pull_s, self.last_segment_s, release_s, self.num_bytes, self.transport
        )


@dataclass(slots=True)
class _Busy:
    """Time in which at least one of several operations was under way."""

    num: int = 0
    since: float = 0.0
    total_s: float = 0.0

    def begin(self, now: float) -> None:
        if self.num == 0:
            self.since = now
        self.num += 1

    def end(self, now: float) -> None:
        self.num -= 1
        if self.num == 0:
            self.total_s += now - self.since


@dataclass(slots=True)
class TransferCounters:
    """Counters of the pulls from one source."""

    transport: str = ""  # the last used
    num_bytes: int = 0
    num_reads: int = 0  # that succeeded
    num_failed: int = 0  # pulls
    reading: _Busy = field(default_factory=_Busy)

    def to_proto(self, incarnation: str) -> worker_pb2.PeerLink:
        return worker_pb2.PeerLink(
            incarnation=incarnation,
            transport=self.transport,
            num_bytes=self.num_bytes,
            read_s=self.reading.total_s,
            num_reads=self.num_reads,
            num_failed=self.num_failed,
        )


class PullClock:
    """Clock of one pull. `traffic`: counters of its source."""

    def __init__(self, traffic: TransferCounters, clock: Callable[[], float] | None = None) -> None:
        self.num_bytes = 0
        self.reads: deque[tuple[int, float]] = deque(maxlen=MAX_READS)  # (bytes, seconds) of the latest read
        self._together: list[int] = []  # bytes of the reads since a read last ran alone
        self._traffic = traffic
        self._clock = clock or time.monotonic
        self._reading = _Busy()
        self._announced_at: float | None = None
        self._first_read_at: float | None = None
        self._last_read_at = 0.0
        self._sealed_at = 0.0

    def announced(self) -> None:
        if self._announced_at is None:
            self._announced_at = self._clock()

    def sealed(self) -> None:
        self._sealed_at = self._clock()
        if self._announced_at is None:  # nothing was
            self._announced_at = self._sealed_at

    @contextmanager
    def reading(self, transport: str, num_bytes: int) -> Generator[None]:
        """Time one read; its bytes count if it succeeds."""
        traffic, now = self._traffic, self._clock()
        if self._first_read_at is None:
            self._first_read_at = now
        traffic.transport = transport
        self._reading.begin(now)
        traffic.reading.begin(now)
        try:
            yield
            self._together.append(num_bytes)
            self.num_bytes += num_bytes
            traffic.num_bytes += num_bytes
            traffic.num_reads += 1
        finally:
            self._last_read_at = self._clock()
            self._reading.end(self._last_read_at)
            self._count_together()
            traffic.reading.end(self._last_read_at)

    def _count_together(self) -> None:
        """Count reads that were under way at once as equal parts: they shared the link."""
        if self._reading.num == 0 and self._together:
            num, num_bytes = len(self._together), sum(self._together)
            self.reads.append((num_bytes // num, (self._last_read_at - self._reading.since) / num))
            self._together.clear()

    def times(self, transport: str) -> PullTimes:
        """Times of the pull; call it after the last read and the seal."""
        assert self._announced_at is not None, "nothing was announced or sealed"
        read_at = max(self._last_read_at, self._sealed_at)
        first_read_at = self._announced_at if self._first_read_at is None else self._first_read_at
        return PullTimes(
            announce_to_pull_s=first_read_at - self._announced_at,
            pull_s=self._reading.total_s,
            last_segment_s=read_at - self._sealed_at,
            read_at=read_at,
            num_bytes=self.num_bytes,
            transport=transport,
        )
