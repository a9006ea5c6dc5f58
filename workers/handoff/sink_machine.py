"""The sink's half of the hand-off protocol, as a pure state machine: calls in, actions out. No clock, no I/O, no
torch. One object for each pull; the other half is in source_machine.py:

    WAITING ──first segment: reserve──> PULLING ──sealed and all read: release──> PULLED ──held──> COMMITTED
       └───────────────────────────────────┴─────────────────────────────────────────┴──else──> FAILED

    WAITING reserves with the seal where no segment comes: of a source of full blocks alone that has none.
    PULLED begins the sequence: its next token is computed while the release is answered, and told when COMMITTED.
    FAILED frees the reserved blocks, or quarantines them while a read may still land, until `settled`.

Time: `now` comes in with every call (seconds, any monotonic clock); `wake_at` says when `tick` is due next. Deadlines
are `deadline` over all, `open_by` for the first answer, and two thirds of the lease for every further sign of life. A
call on a machine that has ended does nothing: the peer's messages may still be under way.
"""

from dataclasses import replace

from ..common.errors import DeadlineExceeded, DiptychError, HandoffError, LeaseLost, WorkerLost
from ..kv.segment import Read, Segment
from .types import (
    Abandon,
    Begin,
    Commit,
    Fail,
    Offer,
    Release,
    Renew,
    Reserve,
    Seal,
    Settle,
    SinkAction,
    SinkState,
)

RENEW_AFTER = 1 / 3  # of the lease, since the source's last answer
ASK_AGAIN_AFTER = 1 / 6  # of the lease, when an answer is late
SILENT_AFTER = 2 / 3  # of the lease without an answer: the source counts as lost


class SinkHandoff:
    """A hand-off at its sink. `deadline`: of the pull. `open_by`: deadline of the source's first answer."""

    def __init__(self, *, deadline: float, open_by: float) -> None:
        self.state = SinkState.WAITING
        self._deadline = deadline
        self._silent_at = open_by
        self._ask_at = float("inf")
        self._lease_s: float | None = None
        self._offer = Offer(0, 0, 1, 0.0, 1, 1)
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
        assert 0 < offer.num_target_layers <= offer.num_layers
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
        if (fault := self._fault_of(segment)) is not None:
            return self._refuse(fault, now)
        for position in segment.positions:
            self._layers[position] |= segment.layer_mask
        self._segments.append(segment)
        if self.state is SinkState.WAITING:
            return self._reserve()
        return [*self._read(len(self._segments) - 1), *self._say_when_read(now)]

    def sealed(self, seal: Seal, now: float) -> list[SinkAction]:
        if self.is_over:
            return []
        if (fault := self._fault_of_seal(seal)) is not None:
            return self._refuse(fault, now)
        if not self._offer.wants_draft:
            seal = replace(seal, num_draft_computed=0)
        if not self._has_all(seal):
            return self._refuse("a seal before every block was announced", now)
        self._seal = seal
        return self._reserve() if self.state is SinkState.WAITING else self._say_when_read(now)

    def renewed(self, held: bool, now: float) -> list[SinkAction]:
        if self.state not in (SinkState.WAITING, SinkState.PULLING):
            return []  # the answer to a renewal that was sent before the release has no meaning
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
        return self._refuse("it closed the stream before the end", now)

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

    def _reserve(self) -> list[SinkAction]:
        self.state = SinkState.PULLING
        return [Reserve(self._offer.num_tokens)]

    def _read(self, number: int) -> list[SinkAction]:
        """Read a segment, unless its blocks are held already, or they or its layers are of no use: then it counts as
        read. A live source may seal fewer tokens than it offered: what is of use is then known too late."""
        if self._table is None:
            return []
        offer = self._offer
        segment = self._segments[number].within(self._num_held // offer.block_size, offer.num_used_blocks)
        if not segment.block_ids or not self._wants(segment):
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

    def _wants(self, segment: Segment) -> bool:
        return self._offer.wants_draft or segment.first_layer < self._offer.num_target_layers

    def _has_all(self, seal: Seal) -> bool:
        """Return whether all was announced that the seal counts, of the wanted layers."""
        offer = self._offer
        target = (1 << offer.num_target_layers) - 1
        due = ((target, seal.num_computed), ((1 << offer.num_layers) - 1 - target, seal.num_draft_computed))
        return not any(layers & ~mask for layers, num in due for mask in self._layers[: -(-num // offer.block_size)])

    def _fault_of(self, segment: Segment) -> str | None:
        """Return what is wrong with an announced segment."""
        num_layers, num_target = self._offer.num_layers, self._offer.num_target_layers
        if self._lease_s is None or self._seal is not None:
            return "a segment before the opening or after the seal"
        if not segment.is_well_formed(len(self._layers), num_layers):
            return f"a segment outside {len(self._layers)} blocks and {num_layers} layers"
        if segment.first_layer < num_target < segment.first_layer + segment.num_layers:
            return f"a segment of layers on both sides of layer {num_target}, with which a draft's begin"
        twice = next((i for i in segment.positions if self._layers[i] & segment.layer_mask), None)
        return None if twice is None else f"block {twice} twice"

    def _fault_of_seal(self, seal: Seal) -> str | None:
        """Return what is wrong with the counts of a seal."""
        if self._seal is not None or seal.num_segments != len(self._segments):
            return f"{seal.num_segments} segments sealed, {len(self._segments)} announced"
        least = 0 if seal.multiple > 1 else 1
        if not least <= seal.num_computed <= self._offer.num_tokens:
            return f"{seal.num_computed} tokens sealed, {self._offer.num_tokens} offered"
        if not 0 <= seal.num_draft_computed <= seal.num_computed:
            return f"{seal.num_draft_computed} tokens sealed with a draft's KV, of {seal.num_computed} with KV"
        if not 0 <= seal.num_inexact <= seal.num_computed:
            return f"{seal.num_inexact} inexact tokens sealed, of {seal.num_computed}"
        return None

    def _refuse(self, what: str, now: float) -> list[SinkAction]:
        return self.failed(HandoffError(f"the source broke the protocol: {what}"), now)
