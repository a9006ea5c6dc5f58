"""Where a request's time went, by its router's clock and its workers' words. Pure: instants come in.

    receipt      ──queue, prefill, deliver_first──────────────────────> first token
    first token  ──last_segment, commit, first_decode, deliver_second──> second token
    beside the prefill, and in no sum: announce_to_pull, pull

Each row sums exactly to what the router saw between its ends. Workers tell durations, never instants, so no two clocks
are compared: the deliveries are what remains. The sink begins while the first token is still on its way, so its phases
may exceed the time between the two tokens; what is too much comes off the earliest of them, for nobody waited for it.

A token counts by the attempt that delivered it: what was lost before that began is queue (of the second token: commit).
Without a hand-off, first_decode is all there is between the first two tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from ...proto import inference_pb2
from ...workers.common.timings import SequenceTimings


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Of one completion; proto/inference.proto says what each means. The second row is 0 without a second token."""

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

    def to_json(self, index: int) -> dict[str, float | int | str]:
        """Under the names that the protobuf message has."""
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
        )


_PHASES: tuple[tuple[str, str, Callable[[RequestTimings], float]], ...] = (
    ("queue", "waiting for a step", lambda t: t.queue_s),
    ("prefill", "reading the prompt", lambda t: t.prefill_s),
    ("deliver_first", "delivering the first token", lambda t: t.deliver_first_s),
    ("last_segment", "hand-off: last KV", lambda t: t.last_segment_s),
    ("commit", "hand-off: commit", lambda t: t.commit_s),
    ("first_decode", "making the second token", lambda t: t.first_decode_s),
    ("deliver_second", "delivering the second token", lambda t: t.deliver_second_s),
    ("announce_to_pull", "within the prefill: waiting for blocks", lambda t: t.announce_to_pull_s),
    ("pull", "within the prefill: pulling KV", lambda t: t.pull_s),
    ("total", "until the last token", lambda t: t.total_s),
)


def server_timing(timings: RequestTimings) -> str:
    """The value of a Server-Timing header (W3C): durations in milliseconds."""
    return ", ".join(f'{name};dur={value(timings) * 1000:.3f};desc="{what}"' for name, what, value in _PHASES)


def fit(total_s: float, *phases_s: float) -> tuple[float, ...]:
    """The phases, in their order, and what remains of `total_s` after them. An excess comes off the earliest ones."""
    excess = max(sum(phases_s) - total_s, 0.0)
    fitted: list[float] = []
    for phase in phases_s:
        cut = min(phase, excess)
        excess -= cut
        fitted.append(phase - cut)
    return (*fitted, max(total_s - sum(fitted), 0.0))


@dataclass(slots=True)
class RequestTimes:
    """What a router notes of a request: seconds on one monotonic clock. The lists are of the first two tokens."""

    started_at: float
    routed_at: float | None = None  # to its first worker
    submitted_at: float = 0.0  # the newest worker request
    last_token_at: float | None = None
    num_delivered: int = 0
    delivered_at: list[float] = field(default_factory=list[float])
    submits_at: list[float] = field(default_factory=list[float])  # when the worker request that made it was submitted
    words: list[SequenceTimings | None] = field(default_factory=list[SequenceTimings | None])  # what its worker told

    def accepted(self, words: Sequence[SequenceTimings | None]) -> None:
        """`words` came with the first tokens so far, two at most."""
        for word in words[len(self.words) :]:
            self.words.append(word)
            self.submits_at.append(self.submitted_at)

    def delivered(self, num_tokens: int, now: float) -> bool:
        """They go to the front door. Returns whether one of the first two is among them."""
        self.num_delivered += num_tokens
        num_new = min(self.num_delivered, 2) - len(self.delivered_at)
        self.delivered_at += [now] * num_new
        return num_new > 0

    def timings(self, now: float, num_attempts: int = 1, num_migrations: int = 0) -> RequestTimings | None:
        """None before the first token; `now`: when the last one was delivered."""
        if not self.delivered_at:
            return None
        second = self.words[1] if len(self.delivered_at) > 1 else None
        handoff = second.handoff if second else None
        return RequestTimings(
            *self._until_first(),
            *(self._until_second() if len(self.delivered_at) > 1 else ()),
            announce_to_pull_s=handoff.announce_to_pull_s if handoff else 0.0,
            pull_s=handoff.pull_s if handoff else 0.0,
            total_s=now - self.started_at,
            handoff_bytes=handoff.num_bytes if handoff else 0,
            transport=handoff.transport if handoff else "",
            num_attempts=num_attempts,
            num_migrations=num_migrations,
        )

    def _until_first(self) -> tuple[float, float, float]:
        """queue, prefill, deliver_first."""
        total_s, queue_s = self.delivered_at[0] - self.started_at, self.submits_at[0] - self.started_at
        word = self.words[0]
        if word is None:
            return queue_s, total_s - queue_s, 0.0
        queue_s, prefill_s, deliver_s = fit(total_s, queue_s + word.queue_s, word.compute_s)
        return queue_s, prefill_s, deliver_s

    def _until_second(self) -> tuple[float, float, float, float]:
        """last_segment, commit, first_decode, deliver_second."""
        total_s = self.delivered_at[1] - self.delivered_at[0]
        word = self.words[1]
        if word is None:
            return 0.0, 0.0, total_s, 0.0
        lost_s = max(self.submits_at[1] - self.delivered_at[0], 0.0)
        last_segment_s, commit_s = 0.0, lost_s + word.queue_s
        if word.handoff is not None:
            last_segment_s = word.handoff.last_segment_s
            commit_s += word.handoff.release_s
        last_segment_s, commit_s, decode_s, deliver_s = fit(total_s, last_segment_s, commit_s, word.compute_s)
        return last_segment_s, commit_s, decode_s, deliver_s
