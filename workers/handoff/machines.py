"""The protocol of a hand-off, as two pure state machines: calls in, actions out. No clock, no I/O, no torch.

Source, one a hand-off id:

    OPEN ──seal──> SEALED ──release by the sink, the lease never lapsed──> RELEASED
      ├──────────────┴──the lease lapses: nobody renewed it in time──> EXPIRED
      └──────────────┴──abort: the engine gives it up──> ABORTED

    RELEASED, EXPIRED and ABORTED each yield EndLease, once: only then may the leased blocks be freed.
    A live source's sequence runs on while it is OPEN; CaughtUp says that the sink has read nearly all that was
    announced, or gains on it no more (live_handoff.py). Then the sequence stops, and is sealed.
    A sink holds the hand-off from `subscribe` until its stream ends or it abandons; then another may take over.

Sink, one a pull:

    WAITING ──first segment: reserve──> PULLING ──sealed and all read: release──> PULLED ──held──> COMMITTED
       └───────────────────────────────────┴─────────────────────────────────────────┴──else──> FAILED

    PULLED begins the sequence: its next token is computed while the release is answered, and told when COMMITTED.
    FAILED frees the reserved blocks, or quarantines them while a read may still land, until `settled`.

Time: `now` comes in with every call (seconds, any monotonic clock); `wake_at` says when `tick` is due next. The
source's deadline is the lease. The sink's are `deadline` over all, `open_by` for the first answer, and two thirds of
the lease for every further sign of life. A call on a machine that has ended does nothing: the peer's messages may still
be under way.

A `sink` is the name of one attempt of one process, never used again: a late message of an earlier attempt is then known
as such, and `release` can be asked again when its answer was lost.
"""

from collections.abc import Iterable

from ..common.errors import DeadlineExceeded, DiptychError, HandoffError, LeaseLost, WorkerLost
from ..core.live_handoff import SinkLag
from ..kv.segment import Read, Segment
from .types import (
    Abandon,
    Aborted,
    Answer,
    Begin,
    CaughtUp,
    Commit,
    EndLease,
    EndStream,
    Fail,
    Offer,
    Refuse,
    Release,
    Renew,
    Reserve,
    Seal,
    Settle,
    SinkAction,
    SinkState,
    SourceAction,
    SourceState,
    Tell,
    why_over,
)

RENEW_AFTER = 1 / 3  # of the lease, since the source's last answer
ASK_AGAIN_AFTER = 1 / 6  # of the lease, when an answer is late
SILENT_AFTER = 2 / 3  # of the lease without an answer: the source is gone


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
        self._over: DiptychError = LeaseLost("")  # what a sink is told that comes after the end
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

    def seal(self, num_computed: int, output_token_ids: Iterable[int], now: float) -> list[SourceAction]:
        actions = self.tick(now)
        if not self.is_live:
            return actions
        assert self.state is SourceState.OPEN, "sealed twice"
        self.state = SourceState.SEALED
        self._seal = Seal(len(self._segments), num_computed, tuple(output_token_ids))
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


class SinkHandoff:
    """A hand-off at its sink. `deadline`: of the pull. `open_by`: deadline of the source's first answer."""

    def __init__(self, num_layers: int, *, deadline: float, open_by: float) -> None:
        self.state = SinkState.WAITING
        self._all_layers = (1 << num_layers) - 1
        self._num_layers = num_layers
        self._deadline = deadline
        self._silent_at = open_by
        self._ask_at = float("inf")
        self._lease_s: float | None = None
        self._offer = Offer(0, 0, 1, 0.0)
        self._layers: list[int] = []  # of each position: mask of the layers announced
        self._segments: list[Segment] = []
        self._table: tuple[int, ...] | None = None
        self._num_held = 0  # tokens
        self._reading: set[int] = set()
        self._num_told = 0  # segments that the source knows to be read
        self._may_still_land = False
        self._seal: Seal | None = None

    @property
    def is_over(self) -> bool:
        return self.state in (SinkState.COMMITTED, SinkState.FAILED)

    @property
    def wake_at(self) -> float | None:
        return None if self.is_over else min(self._deadline, self._silent_at, self._ask_at)

    # From the source

    def opened(self, offer: Offer, now: float) -> list[SinkAction]:
        """Begin: the subscription was accepted, and the layouts can be bridged."""
        if self.is_over:
            return []
        if self._lease_s is not None or offer.num_tokens < 1 or not 0 < offer.lease_s < float("inf"):
            return self._refuse("opened twice, or without tokens or a lease", now)
        if offer.block_size < 1 or offer.num_blocks != -(-offer.num_tokens // offer.block_size):
            return self._refuse(f"{offer.num_tokens} tokens in {offer.num_blocks} blocks of {offer.block_size}", now)
        self._offer = offer
        self._layers = [0] * offer.num_blocks
        self._lease_s = offer.lease_s
        self._heard(now)
        return []

    def announced(self, segment: Segment, now: float) -> list[SinkAction]:
        if self.is_over:
            return []
        if self._lease_s is None or self._seal is not None:
            return self._refuse("a segment before the opening or after the seal", now)
        if not segment.is_well_formed(len(self._layers), self._num_layers):
            return self._refuse(f"a segment outside {len(self._layers)} blocks and {self._num_layers} layers", now)
        for position in segment.positions:
            if self._layers[position] & segment.layer_mask:
                return self._refuse(f"block {position} twice", now)
            self._layers[position] |= segment.layer_mask
        self._segments.append(segment)
        if self.state is SinkState.WAITING:
            self.state = SinkState.PULLING
            return [Reserve(self._offer.num_tokens)]
        return [*self._read(len(self._segments) - 1), *self._say_when_read(now)]

    def sealed(self, seal: Seal, now: float) -> list[SinkAction]:
        if self.is_over:
            return []
        if self._seal is not None or seal.num_segments != len(self._segments):
            return self._refuse(f"{seal.num_segments} segments sealed, {len(self._segments)} announced", now)
        if not 0 < seal.num_computed <= self._offer.num_tokens:
            return self._refuse(f"{seal.num_computed} tokens sealed, {self._offer.num_tokens} offered", now)
        num_blocks = -(-seal.num_computed // self._offer.block_size)
        if any(mask != self._all_layers for mask in self._layers[:num_blocks]):
            return self._refuse("a seal before every block was announced", now)
        self._seal = seal
        return self._say_when_read(now)

    def renewed(self, held: bool, now: float) -> list[SinkAction]:
        if self.state not in (SinkState.WAITING, SinkState.PULLING):
            return []  # a renewal that was overtaken by the release says nothing
        if not held:
            return self.failed(LeaseLost("the source no longer holds the blocks for us"), now)
        self._heard(now)
        return []

    def released(self, held: bool, now: float) -> list[SinkAction]:
        if self.state is not SinkState.PULLED:
            return []
        if not held:
            return self.failed(LeaseLost("the lease lapsed before the last read was done: what was read is void"), now)
        assert self._seal is not None
        self.state = SinkState.COMMITTED
        return [Commit(self._seal)]

    def stream_ended(self, now: float) -> list[SinkAction]:
        """Note that the source ended its announcements in order: after a release, whose answer may come later."""
        if self.state is SinkState.PULLED:
            return []
        return self._refuse("it hung up before the end", now)

    # From our own side

    def reserved(self, table: tuple[int, ...], num_held: int, now: float) -> list[SinkAction]:
        """Read into `table`: our blocks for all the tokens, of which the first `num_held` have their KV already."""
        if self.is_over:
            return []
        assert self._table is None and num_held >= 0
        self._table = table
        self._num_held = num_held
        actions = [action for number in range(len(self._segments)) for action in self._read(number)]
        return actions + self._say_when_read(now)

    def read_done(self, number: int, now: float) -> list[SinkAction]:
        self._reading.remove(number)
        return self._say_when_read(now)

    def read_failed(self, number: int, error: DiptychError, now: float, *, may_still_land: bool) -> list[SinkAction]:
        self._reading.remove(number)
        self._may_still_land |= may_still_land
        return self.failed(error, now)

    def failed(self, error: DiptychError, now: float) -> list[SinkAction]:
        """Fail for another reason: no reservation, the stream broke, the source aborted, the request is gone."""
        if self.is_over:
            return []
        self.state = SinkState.FAILED
        quarantine = bool(self._reading) or self._may_still_land
        return [Fail(error, quarantine), *([] if self._lease_s is None else [Abandon()])]

    def settled(self) -> list[SinkAction]:
        """End the quarantine: no byte can arrive any more."""
        assert self.state is SinkState.FAILED
        return [Settle()]

    # Time

    def tick(self, now: float) -> list[SinkAction]:
        if self.is_over:
            return []
        if now >= self._deadline:
            return self.failed(DeadlineExceeded(f"the KV had not arrived in time (still {self.state.value})"), now)
        if now >= self._silent_at:
            return self.failed(WorkerLost(f"the source worker fell silent (while {self.state.value})"), now)
        if now < self._ask_at:
            return []
        return self._ask(now)

    @property
    def _num_read(self) -> int:
        """Number of segments, from the first on, that are read."""
        return 0 if self._table is None else min(self._reading, default=len(self._segments))

    def _heard(self, now: float) -> None:
        assert self._lease_s is not None
        self._ask_at = now + self._lease_s * RENEW_AFTER
        self._silent_at = now + self._lease_s * SILENT_AFTER

    def _ask(self, now: float) -> list[SinkAction]:
        assert self._lease_s is not None
        self._ask_at = now + self._lease_s * ASK_AGAIN_AFTER
        if self.state is SinkState.PULLED:
            return [Release()]
        self._num_told = self._num_read
        return [Renew(self._num_told)]

    def _read(self, number: int) -> list[SinkAction]:
        if self._table is None:
            return []
        segment = self._segments[number].without_first(self._num_held // self._offer.block_size)
        if not segment.block_ids:
            return []
        self._reading.add(number)
        return [Read(number, segment, self._table, self._num_held)]

    def _say_when_read(self, now: float) -> list[SinkAction]:
        """Ask for the release once all is sealed and read; tell a live source how much is read."""
        if self.state is not SinkState.PULLING or self._table is None:
            return []
        if self._seal is None:
            return self._ask(now) if self._offer.is_live and self._num_read > self._num_told else []
        if self._reading:
            return []
        self.state = SinkState.PULLED
        self._heard(now)
        seal = self._seal
        begin = [Begin(seal)] if seal.output_token_ids else []  # a prefix waits
        return [*begin, *self._ask(now)]

    def _refuse(self, what: str, now: float) -> list[SinkAction]:
        return self.failed(HandoffError(f"the source broke the protocol: {what}"), now)
