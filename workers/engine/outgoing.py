"""Hand-offs to other workers as the engine sees them: which blocks are leased to sinks.

    open -> announce* -> seal -> (blocks leased only) -> end_lease
               └─ end (finished, failed, aborted) ──────┘   the leases stay until end_lease
    open_live: the sequence decodes on between announcements, at most as far as was offered, and is sealed once its sink
    has caught up; if the hand-off ends before, it simply runs on here
    open_prefix: blocks of the prefix cache, sealed at once; no sequence

Block bookkeeping only: the protocol is in handoff/machines.py.
"""

from dataclasses import dataclass, field

from ..common.errors import DiptychError, OutOfBlocks
from ..core.block_manager import BlockManager
from ..core.live_handoff import offered_tokens
from ..core.prefix_cache import PrefixCache
from ..core.sequence import ScheduledSequence, Sequence, SequenceStatus
from ..kv.layout import blocks_for
from .events import HandoffEnded, HandoffEvent, HandoffOpened, HandoffSealed, SegmentReady


@dataclass(slots=True)
class _Outgoing:
    handoff_id: str
    sequence: Sequence | None  # None: a prefix
    max_computed: int | None = None  # of a running sequence: with so many tokens computed it waits for its sink
    leased: list[int] = field(default_factory=list[int])  # by position in the table
    replaced: dict[int, int] = field(default_factory=dict[int, int])  # position -> the cache's equal block, leased too
    is_sealed: bool = False
    has_ended: bool = False


class OutgoingHandoffs:
    def __init__(self, manager: BlockManager, cache: PrefixCache, num_layers: int) -> None:
        self._manager = manager
        self._cache = cache
        self._num_layers = num_layers
        self._outgoing: dict[str, _Outgoing] = {}
        self._sealed: dict[str, str] = {}  # sequence key -> hand-off id
        self.num_sent = 0  # sequences
        self.num_migrated_out = 0

    @property
    def num_open(self) -> int:
        return len(self._outgoing)

    def open(self, handoff_id: str, sequence: Sequence) -> None:
        """The sequence is handed off once it has its first token."""
        self._outgoing[handoff_id] = _Outgoing(handoff_id, sequence)

    def open_live(self, handoff_id: str, sequence: Sequence) -> list[HandoffEvent]:
        """The sequence decodes here, and goes on doing so until it is sealed."""
        assert sequence.is_decoding and sequence.handoff_id is None
        num_remaining = sequence.max_num_tokens - sequence.num_tokens
        num_tokens = offered_tokens(sequence.num_tokens, num_remaining, self._cache.block_size)
        sequence.handoff_id = handoff_id
        self._outgoing[handoff_id] = _Outgoing(handoff_id, sequence, num_tokens)
        opened = HandoffOpened(handoff_id, sequence.key, num_tokens, is_live=True)
        return [opened, *self.announce(sequence)]

    def open_prefix(self, handoff_id: str, blocks: list[int]) -> list[HandoffEvent]:
        """`blocks`: of the prefix cache, from a prompt's start on."""
        outgoing = self._outgoing[handoff_id] = _Outgoing(handoff_id, None, is_sealed=True)
        num_tokens = len(blocks) * self._cache.block_size
        return [
            HandoffOpened(handoff_id, None, num_tokens, is_live=False),
            *self._lease(outgoing, blocks),
            HandoffSealed(handoff_id, None, num_tokens, ()),
        ]

    def is_open(self, handoff_id: str) -> bool:
        return handoff_id in self._outgoing

    def announce(self, sequence: Sequence) -> list[SegmentReady]:
        """Lease and announce the full blocks that are computed and were not announced yet."""
        outgoing = self._outgoing_of(sequence)
        return self._lease(outgoing, sequence.block_table[len(outgoing.leased) : self._num_full(sequence)])

    def lease_next(self, entry: ScheduledSequence) -> SegmentReady | None:
        """Lease what this step makes readable, after `announce`: full blocks, and the last one of a sequence that stops
        here with its next token. The segment is the caller's to announce, a few layers at a time."""
        outgoing = self._outgoing_of(entry.sequence)
        num_computed = entry.sequence.num_computed + entry.num_new
        is_whole = outgoing.max_computed is None and entry.samples
        block_size = self._cache.block_size
        num_readable = blocks_for(num_computed, block_size) if is_whole else num_computed // block_size
        leased = self._lease(outgoing, entry.sequence.block_table[len(outgoing.leased) : num_readable])
        return leased[0] if leased else None

    def keep_replaced(self, sequence: Sequence, first_block: int) -> None:
        """The prefix cache may have put equal blocks into the table, from `first_block` on. The announced ones stay,
        and the cache's are leased too, for who holds a block of its tree holds that block's ancestors."""
        outgoing = self._outgoing_of(sequence)
        for position in range(first_block, len(outgoing.leased)):
            block = sequence.block_table[position]
            if block != outgoing.leased[position]:
                self._manager.lease((block,))
                outgoing.replaced[position] = block

    def must_seal(self, sequence: Sequence) -> bool:
        """Whether an offered sequence stops here with the token that it has just got; one that ran may have to wait."""
        outgoing = self._outgoing_of(sequence)
        sequence.is_held = outgoing.max_computed is not None and sequence.num_computed >= outgoing.max_computed
        return outgoing.max_computed is None

    def seal(self, sequence: Sequence) -> list[HandoffEvent]:
        """All tokens but the last have their KV: from here on only the leases hold the blocks."""
        assert sequence.num_uncomputed == 1
        outgoing = self._outgoing_of(sequence)
        num_blocks = blocks_for(sequence.num_computed, self._cache.block_size)
        last = self._lease(outgoing, sequence.block_table[len(outgoing.leased) : num_blocks])
        assert len(outgoing.leased) == num_blocks
        is_live = outgoing.max_computed is not None
        outgoing.is_sealed = True
        self._sealed[sequence.key] = outgoing.handoff_id
        sequence.status = SequenceStatus.HANDED_OFF
        sequence.is_held = False
        self._manager.release(sequence.block_table)
        sequence.block_table = []
        self.num_sent += 1
        self.num_migrated_out += is_live
        outputs = tuple(sequence.output_token_ids)
        return [*last, HandoffSealed(outgoing.handoff_id, sequence.key, sequence.num_computed, outputs, is_live)]

    def end_preempted(self) -> list[HandoffEvent]:
        """A running sequence that was preempted is computed again, into other blocks: nothing comes of its hand-off."""
        error = OutOfBlocks("the sequence lost its KV blocks where it ran, before its sink had them all")
        ended: list[HandoffEvent] = []
        for outgoing in self._outgoing.values():
            sequence = self._live(outgoing)
            if sequence is not None and self._num_full(sequence) < len(outgoing.leased):
                sequence.handoff_id = None
                ended.append(self.end(outgoing.handoff_id, error))
        return ended

    def end(self, handoff_id: str, error: DiptychError) -> HandoffEnded:
        self._outgoing[handoff_id].has_ended = True
        return HandoffEnded(handoff_id, error)

    def end_sealed(self, key: str, error: DiptychError) -> list[HandoffEvent]:
        """The router aborts a sequence that was handed off already: its sink is told, its blocks come back."""
        handoff_id = self._sealed.get(key)
        return [] if handoff_id is None else [self.end(handoff_id, error)]

    def still_computing(self, handoff_id: str) -> Sequence | None:
        """The offered sequence, if it is neither sealed nor given up."""
        outgoing = self._outgoing.get(handoff_id)
        return None if outgoing is None or outgoing.is_sealed or outgoing.has_ended else outgoing.sequence

    def still_running(self, handoff_id: str) -> Sequence | None:
        """The same, if it ran before it was offered."""
        outgoing = self._outgoing.get(handoff_id)
        return None if outgoing is None else self._live(outgoing)

    def end_lease(self, handoff_id: str) -> None:
        """RELEASED, EXPIRED or ABORTED: nobody reads these blocks any more. Idempotent."""
        outgoing = self._outgoing.pop(handoff_id, None)
        if outgoing is not None:
            if outgoing.is_sealed and outgoing.sequence is not None:
                self._sealed.pop(outgoing.sequence.key, None)
            by_position = [(block, outgoing.replaced.get(i)) for i, block in enumerate(outgoing.leased)]
            self._manager.end_lease([block for pair in by_position for block in pair if block is not None])

    def _outgoing_of(self, sequence: Sequence) -> _Outgoing:
        assert sequence.handoff_id is not None
        return self._outgoing[sequence.handoff_id]

    def _live(self, outgoing: _Outgoing) -> Sequence | None:
        is_live = outgoing.max_computed is not None and not (outgoing.is_sealed or outgoing.has_ended)
        return outgoing.sequence if is_live else None

    def _lease(self, outgoing: _Outgoing, blocks: list[int]) -> list[SegmentReady]:
        if not blocks:
            return []
        first = len(outgoing.leased)
        self._manager.lease(blocks)
        outgoing.leased += blocks
        generations = tuple(self._manager.generations[b] for b in blocks)
        return [SegmentReady(outgoing.handoff_id, first, tuple(blocks), generations, 0, self._num_layers)]

    def _num_full(self, sequence: Sequence) -> int:
        return sequence.num_computed // self._cache.block_size

    def check_integrity(self) -> None:
        """Assert that every sequence on offer knows of it."""
        for handoff_id in self._outgoing:
            sequence = self.still_computing(handoff_id)
            assert sequence is None or sequence.handoff_id == handoff_id
