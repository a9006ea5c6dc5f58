"""The source's half of the hand-off protocol, as a pure state machine: calls in, actions out. No clock, no I/O, no
torch. One object for each hand-off id:

    OPEN ──seal──> SEALED ──release by the sink, the lease never lapsed──> RELEASED
      ├──────────────┴──the lease lapses: nobody renewed it in time──> EXPIRED
      └──────────────┴──abort: the engine gives it up──> ABORTED

    RELEASED, EXPIRED and ABORTED each yield EndLease, once: only then may the leased blocks be freed.
    A live source's sequence runs on while it is OPEN; CaughtUp says that the sink has read nearly all that was
    announced, or gains on it no more (live_handoff.py). Then the sequence stops, and is sealed.
    A sink holds the hand-off from `subscribe` until its stream ends or it abandons; then another may take over.

Time: `now` comes in with every call (seconds, any monotonic clock); `wake_at` says when `tick` is due next: when the
lease lapses. A call on a machine that has ended does nothing: the peer's messages may still be under way.

A `sink` is the name of one attempt of one process, never used again: a late message of an earlier attempt is then known
as such, and `release` can be asked again when its answer was lost.
"""

from collections.abc import Iterable

from ..common.errors import DiptychError, HandoffError, LeaseLost
from ..core.live_handoff import SinkLag
from ..kv.segment import Segment
from .types import (
    Aborted,
    Answer,
    CaughtUp,
    EndLease,
    EndStream,
    Refuse,
    Seal,
    SourceAction,
    SourceState,
    Tell,
    why_over,
)


class SourceHandoff:
    """A hand-off at its source. `is_live`: the sequence runs on while it is OPEN; `prefix`: for one sink alone."""

    def __init__(
        self, num_blocks: int, num_layers: int, lease_s: float, now: float, is_live: bool = False, prefix: bool = False
    ) -> None:
        assert num_blocks > 0 and lease_s > 0
        self.state = SourceState.OPEN
        self.runs_on = is_live
        self.sink: str | None = None  # who may read, renew and release
        self._num_blocks = num_blocks
        self._is_prefix = prefix
        self._num_layers = num_layers
        self._lease_s = lease_s
        self._deadline = now + lease_s
        self._segments: list[Segment] = []
        self._seal: Seal | None = None
        self._over: DiptychError = LeaseLost("")  # answer to a sink that subscribes after the end
        self._lag = SinkLag()
        self._named: dict[int, tuple[int, int]] = {}  # position -> (block id, generation)
        self._layers: dict[int, int] = {}  # position -> mask of the layers announced

    @property
    def is_live(self) -> bool:
        return self.state in (SourceState.OPEN, SourceState.SEALED)

    @property
    def is_sealed(self) -> bool:
        """Return whether it was sealed, also after its end."""
        return self._seal is not None

    @property
    def wake_at(self) -> float | None:
        return self._deadline if self.is_live else None

    def is_late(self, now: float) -> bool:
        """Return whether the lease has less than half of its time left: sinks renew it sooner."""
        return self.is_live and self._deadline - now < self._lease_s / 2

    # From the engine

    def announce(self, segment: Segment, now: float) -> list[SourceAction]:
        """Announce blocks that are readable, and leased to this hand-off by the engine."""
        actions = self.tick(now)
        if not self.is_live:
            return actions
        assert self.state is SourceState.OPEN, "announced after the seal"
        assert segment.is_well_formed(self._num_blocks, self._num_layers), segment
        named = zip(segment.block_ids, segment.generations, strict=True)
        for position, name in zip(segment.positions, named, strict=True):
            assert self._named.setdefault(position, name) == name, f"position {position} was {self._named[position]}"
            assert not self._layers.get(position, 0) & segment.layer_mask, f"position {position} was announced before"
            self._layers[position] = self._layers.get(position, 0) | segment.layer_mask
        self._segments.append(segment)
        return actions + self._tell(segment)

    def seal(
        self,
        num_computed: int,
        output_token_ids: Iterable[int],
        now: float,
        num_draft_computed: int = 0,
        num_inexact: int = 0,
    ) -> list[SourceAction]:
        """Seal: no segments follow. `num_draft_computed`, `num_inexact`: see Seal."""
        actions = self.tick(now)
        if not self.is_live:
            return actions
        assert self.state is SourceState.OPEN, "sealed twice"
        self.state = SourceState.SEALED
        counts = num_draft_computed, num_inexact
        self._seal = Seal(len(self._segments), num_computed, tuple(output_token_ids), *counts)
        return actions + self._tell(self._seal)

    def abort(self, error: DiptychError, now: float) -> list[SourceAction]:
        """Give the hand-off up. Idempotent."""
        actions = self.tick(now)
        return actions + self._end(SourceState.ABORTED, error)

    # From sinks

    def subscribe(self, sink: str, now: float) -> list[SourceAction]:
        """Refuse the sink, or renew the lease for it and send it all that was announced so far."""
        actions = self.tick(now)
        if not self.is_live:
            return [*actions, Refuse(self._over)]
        if self.sink is not None:
            return [*actions, Refuse(HandoffError("another sink holds the hand-off, or an earlier attempt still does"))]
        self.sink = sink
        self._deadline = now + self._lease_s
        for what in self._segments if self._seal is None else [*self._segments, self._seal]:
            actions += self._tell(what)
        return actions

    def leave(self, sink: str, now: float) -> list[SourceAction]:
        """End the sink's hold: it abandons, or its stream ended. Another sink has one lease's time to take over. The
        hand-off of a sequence that still runs here, or of a prefix, ends instead."""
        actions = self.tick(now)
        if not self.is_held_by(sink):
            return actions
        self.sink = None
        self._deadline = now + self._lease_s
        is_over = self._is_prefix or (self.runs_on and self.state is SourceState.OPEN)
        return [*actions, EndStream(sink), *(self._end(SourceState.ABORTED, None) if is_over else [])]

    def renew(self, sink: str, now: float, num_read: int = 0) -> list[SourceAction]:
        """Renew the lease. `num_read`: the first so many segments are read."""
        actions = self.tick(now)
        held = self.is_held_by(sink)
        if held:
            self._deadline = now + self._lease_s
            if self.runs_on and self.state is SourceState.OPEN and self._lag.must_stop(self._segments, num_read):
                actions.append(CaughtUp())
        return [*actions, Answer(held)]

    def release(self, sink: str, now: float) -> list[SourceAction]:
        """Release after the sink's last read. Held: all that it read since `subscribe` was this sequence's KV."""
        actions = self.tick(now)
        if sink != self.sink:
            return [*actions, Answer(False)]
        if self.state is SourceState.SEALED:
            actions += self._end(SourceState.RELEASED, None)
        return [*actions, Answer(self.state is SourceState.RELEASED)]

    def is_held_by(self, sink: str) -> bool:
        return self.is_live and sink == self.sink

    def may_read(self, sink: str, segment: Segment, now: float) -> bool:
        """Return whether these very blocks, generations and layers are announced, and leased to `sink` now."""
        if not self.is_held_by(sink) or now >= self._deadline:
            return False
        if not segment.is_well_formed(self._num_blocks, self._num_layers):
            return False
        names = zip(segment.block_ids, segment.generations, strict=True)
        return all(
            self._named.get(position) == name and not segment.layer_mask & ~self._layers[position]
            for position, name in zip(segment.positions, names, strict=True)
        )

    # Time

    def tick(self, now: float) -> list[SourceAction]:
        if self.is_live and now >= self._deadline:
            error = LeaseLost(f"the lease of {self._lease_s:g} s was not renewed in time")
            return self._end(SourceState.EXPIRED, error)
        return []

    def _tell(self, what: Segment | Seal | Aborted) -> list[SourceAction]:
        return [] if self.sink is None else [Tell(self.sink, what)]

    def _end(self, state: SourceState, error: DiptychError | None) -> list[SourceAction]:
        if not self.is_live:
            return []
        self.state, self._over = state, why_over(state, error)
        for what in (self._segments, self._named, self._layers):
            what.clear()
        farewell = [] if error is None else self._tell(Aborted(type(error).__name__, error.message))
        return [*farewell, *([] if self.sink is None else [EndStream(self.sink)]), EndLease()]
