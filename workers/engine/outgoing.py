"""The engine's half of hand-offs to other workers: which blocks are leased to sinks, and what is announced of them.

    open ──────> announced while steps run ──> seal ──> (blocks leased only) ──> end_lease
                     └─ end (finished, failed, aborted) ─────────────────────────┘  the leases stay until end_lease
    offer: the sequence decodes on between announcements, at most as far as was offered, and is sealed once its sink
        has caught up; if the hand-off ends before, it simply runs on here
    offer_prefix: blocks of the prefix cache, sealed at once; no sequence

    begin_step: blocks computed before (a cached prefix)  ──> announced, before anything is computed
                blocks that this step will fill           ──> leased
    each group of layers computed                         ──> announced: those layers of those blocks
    end_step:   what the step took                        ──> the number of groups of later steps
    undo_step:  launched, and dropped before any of that  ──> what it would have filled is leased no more

Layers of a model that drafts are announced for themselves, of the same blocks: once their KV is counted, which a step
may leave to a later one. So what a sink has read of them never changes.
A step may begin while the one before it is computed: it leases the blocks after those. A step that fails leaves the
rest unannounced: its hand-offs are aborted, and the leases end as for any other.
Bookkeeping only: the protocol is in handoff/source_machine.py, the driver that sends `events` in handoff/source.py.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial

from ..common.errors import DiptychError, HandoffError, InvalidRequest, OutOfBlocks, SequenceEnded
from ..common.request import Request, check_cache_salt
from ..core.block_manager import BlockManager
from ..core.draft_kv import DraftKV
from ..core.live_handoff import offered_tokens, why_not_offered
from ..core.prefix_cache import PrefixCache, block_hashes
from ..core.runner import LayerWatch
from ..core.sequence import Batch, ScheduledSequence, Sequence, SequenceStatus
from ..handoff.types import (
    HandoffEnded,
    HandoffEvent,
    HandoffHeld,
    HandoffOpened,
    HandoffRefused,
    HandoffSealed,
    SegmentReady,
)
from ..kv.layout import KVLayout, blocks_for
from ..kv.segment import Segment
from .segment_cost import SegmentCost, group_ends
from .step_watch import StepWatch

ID_IN_USE = "the hand-off id is in use: ids are single-use"


def check_prefix(request: Request, block_size: int, handoff_id: str | None) -> None:
    """Raise InvalidRequest for a prefix that cannot be computed for the hand-off."""
    num_tokens = len(request.prompt_token_ids)
    if handoff_id is None or num_tokens % block_size or request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            f"a prefix of {num_tokens} tokens cannot be computed here: it must be offered, fill blocks of "
            f"{block_size} tokens, and ask for no token and no log-probabilities"
        )


@dataclass(slots=True)
class _OutgoingHandoff:
    handoff_id: str
    sequence: Sequence | None  # None: a prefix
    max_computed: int | None = None  # of a running sequence: with this many computed tokens it waits for its sink
    leased: list[int] = field(default_factory=list[int])  # by position in the table
    num_drafts: int = 0  # of `leased`, the first ones, whose draft layers are announced
    replaced: dict[int, int] = field(default_factory=dict[int, int])  # position -> the cache's equal block, leased too
    is_sealed: bool = False
    has_ended: bool = False

    @property
    def computing(self) -> Sequence | None:
        """The offered sequence, while it is neither sealed nor given up."""
        return None if self.is_sealed or self.has_ended else self.sequence

    @property
    def running(self) -> Sequence | None:
        """The offered sequence, if it ran before it was offered."""
        return None if self.max_computed is None else self.computing


class OutgoingHandoffs:
    """`sequences`: the engine's, by key. `num_groups`: of layers in a step; 0: chosen by measured cost."""

    def __init__(
        self,
        manager: BlockManager,
        cache: PrefixCache,
        sequences: Mapping[str, Sequence],
        layout: KVLayout,
        clock: Callable[[], float],
        draft_kv: DraftKV | None,
        num_groups: int = 0,
    ) -> None:
        self._manager = manager
        self._cache = cache
        self._sequences = sequences
        self._layout = layout
        self._clock = clock
        self._draft_kv = draft_kv
        self._num_layers = layout.num_target_layers
        groups = layout.layer_groups(0, self._num_layers)
        self._block_bytes = layout.tensor_parallel * sum(group.num_bytes for group in groups)
        self._forced = min(num_groups, self._num_layers)
        self._outgoing: dict[str, _OutgoingHandoff] = {}
        self._sealed: dict[str, str] = {}  # sequence key -> hand-off id
        self._cost = SegmentCost(self._num_layers)
        self.events: list[HandoffEvent] = []  # not reported yet
        self.num_sent = 0  # sequences
        self.num_migrated_out = 0

    @property
    def num_open(self) -> int:
        return len(self._outgoing)

    def is_open(self, handoff_id: str) -> bool:
        return handoff_id in self._outgoing

    def open(self, handoff_id: str, sequence: Sequence) -> None:
        """Hand the sequence off once it has its first token; a prefix, once it is computed."""
        self._outgoing[handoff_id] = _OutgoingHandoff(handoff_id, sequence)

    def refuse(self, handoff_id: str, error: DiptychError) -> None:
        """End a hand-off whose request is not taken."""
        self.events.append(HandoffEnded(handoff_id, error))

    def offer(self, key: str, handoff_id: str) -> None:
        """Hand a running sequence off. It decodes on until its sink has caught up, and to its end if none does. What
        cannot be handed off is refused by an event, and runs on."""
        sequence = self._sequences.get(key)
        if handoff_id in self._outgoing:
            error = HandoffError(ID_IN_USE)
        elif sequence is None:
            error = SequenceEnded("the sequence is not here (any more)")
        elif (why := why_not_offered(sequence)) is not None:
            error = HandoffError(why)
        else:
            self._open_live(handoff_id, sequence)
            return
        self.events.append(HandoffRefused(handoff_id, error))

    def offer_prefix(self, handoff_id: str, token_ids: SequenceOf[int], cache_salt: bytes) -> None:
        """Hand off what the prefix cache holds of these tokens: the longest run of full blocks."""
        block_size = self._cache.block_size
        known = token_ids[: self._manager.num_blocks * block_size]
        try:
            check_cache_salt(cache_salt)
            if handoff_id in self._outgoing:
                raise HandoffError(ID_IN_USE)
            blocks = self._cache.find(block_hashes(known, block_size, cache_salt))
            if not blocks:
                raise HandoffError("the prefix is not, or no longer, in this worker's cache")
        except DiptychError as error:
            self.events.append(HandoffRefused(handoff_id, error))
            return
        outgoing = self._outgoing[handoff_id] = _OutgoingHandoff(handoff_id, None, is_sealed=True)
        num_tokens = len(blocks) * block_size
        self.events.append(HandoffOpened(handoff_id, None, num_tokens, is_live=False))
        self._announce(outgoing, blocks)
        num_draft = self._announce_drafted(outgoing, num_tokens)
        self.events.append(HandoffSealed(handoff_id, None, num_tokens, (), num_draft_computed=num_draft))

    def _open_live(self, handoff_id: str, sequence: Sequence) -> None:
        num_remaining = sequence.max_num_tokens - sequence.num_tokens
        num_tokens = offered_tokens(sequence.num_tokens, num_remaining, self._cache.block_size)
        sequence.handoff_id = handoff_id
        self._outgoing[handoff_id] = _OutgoingHandoff(handoff_id, sequence, num_tokens)
        self.events.append(HandoffOpened(handoff_id, sequence.key, num_tokens, is_live=True))
        self.announce(sequence)

    def announce(self, sequence: Sequence) -> None:
        """Lease and announce the full blocks that are computed and were not announced yet."""
        outgoing = self._outgoing_of(sequence)
        self._announce(outgoing, sequence.block_table[len(outgoing.leased) : self._num_full(sequence)])
        self._announce_draft(outgoing, sequence.num_draft_computed // self._cache.block_size)

    def begin_step(self, batch: Batch, tell: Callable[[], object]) -> StepWatch | None:
        """Announce what the batch's sequences have computed, and lease what it will fill. `tell` sends the events, now
        and while the step runs. None: nothing is to be announced while it runs."""
        offered = [e for e in batch.entries if e.sequence.handoff_id is not None] if self._outgoing else []
        if not offered:
            return None
        for entry in offered:
            self.announce(entry.sequence)
        tell()
        leased = [(entry, ready) for entry in offered if (ready := self._lease_next(entry)) is not None]
        return self._watch(batch, leased, tell) if leased else None

    def end_step(self, watch: LayerWatch | None, seconds: float) -> None:
        """Note that a step succeeded, and what it took. watch: that `begin_step` has returned."""
        if isinstance(watch, StepWatch) and watch.num_prefilled:
            self._cost.add_step(watch.num_prefilled, seconds)

    def undo_step(self, watch: LayerWatch | None) -> None:
        """End the leases of a step that was launched and dropped before its watch was told anything."""
        for ready in watch.leased if isinstance(watch, StepWatch) else ():
            outgoing, segment = self._outgoing.get(ready.handoff_id), ready.segment
            if outgoing is not None and not outgoing.is_sealed:
                assert outgoing.leased[segment.first_block :] == list(segment.block_ids)
                del outgoing.leased[segment.first_block :]
                self._manager.end_lease(segment.block_ids)

    def _lease_next(self, entry: ScheduledSequence) -> SegmentReady | None:
        """Lease what this step makes readable: full blocks, and the last one of a sequence that stops here with its
        next token. The segment is announced later, a few layers at a time."""
        outgoing = self._outgoing_of(entry.sequence)
        num_computed = entry.start + entry.num_new
        is_whole = outgoing.max_computed is None and entry.samples
        block_size = self._cache.block_size
        num_readable = self._num_readable(num_computed) if is_whole else num_computed // block_size
        return self._lease(outgoing, entry.sequence.block_table[len(outgoing.leased) : num_readable])

    def _watch(
        self, batch: Batch, leased: list[tuple[ScheduledSequence, SegmentReady]], tell: Callable[[], object]
    ) -> StepWatch:
        prompts = [(entry, ready) for entry, ready in leased if not entry.sequence.is_decoding]
        decoding = [ready for entry, ready in leased if entry.sequence.is_decoding]
        num_prefilled = batch.num_tokens if prompts else 0
        ends = group_ends(self._num_layers, self._num_groups(prompts, num_prefilled))
        of_prompts = [ready for _, ready in prompts]
        return StepWatch.of(ends, num_prefilled, of_prompts, decoding, partial(self._announce_layers, tell))

    def _announce_layers(self, tell: Callable[[], object], ready: list[SegmentReady]) -> None:
        """Announce what a step has computed. Hand-offs that have ended since it was launched want it no more."""
        began = self._clock()
        ready = [r for r in ready if (of := self._outgoing.get(r.handoff_id)) is not None and of.computing is not None]
        self.events += ready
        tell()
        if ready:
            self._cost.add_announcements(len(ready), self._clock() - began)

    def _num_groups(self, prompts: list[tuple[ScheduledSequence, SegmentReady]], num_prefilled: int) -> int:
        if not prompts:
            return 1
        if self._forced:
            return self._forced
        num_bytes = self._block_bytes * sum(len(ready.segment.block_ids) for _, ready in prompts)
        is_last = any(entry.start + entry.num_new == entry.sequence.num_tokens for entry, _ in prompts)
        return self._cost.num_groups(num_bytes, len(prompts), num_prefilled, is_last=is_last)

    def keep_replaced(self, sequence: Sequence, first_block: int) -> None:
        """Keep announced blocks that the prefix cache may have replaced in the table, from `first_block` on, or that a
        preemption has. They stay, and those in their place are leased too, one for each, for who holds a block of the
        cache's tree holds that block's ancestors."""
        outgoing = self._outgoing_of(sequence)
        for position in range(first_block, len(outgoing.leased)):
            block, before = sequence.block_table[position], outgoing.replaced.pop(position, None)
            if block != outgoing.leased[position]:
                self._manager.lease((block,))
                outgoing.replaced[position] = block
            if before is not None:
                self._manager.end_lease((before,))

    def must_seal(self, sequence: Sequence) -> bool:
        """Return whether an offered sequence stops here with the token that it has just got. One that ran before it was
        offered does not; it waits for its sink once it has made all that was offered."""
        outgoing = self._outgoing_of(sequence)
        if outgoing.max_computed is None:
            return True
        if sequence.num_computed >= outgoing.max_computed:
            sequence.is_held = True
            self.events.append(HandoffHeld(outgoing.handoff_id))
        return False

    def sealing(self, sequence: Sequence) -> None:
        """Prepare a `seal`, while whoever drafts knows the sequence."""
        if self._draft_kv is not None:
            self._draft_kv.on_seal(sequence)

    def seal(self, sequence: Sequence) -> None:
        """Seal: all tokens but the last, or those of a prefix, have their KV, and from here on only the leases hold the
        blocks."""
        assert sequence.num_uncomputed == (0 if sequence.request.is_prefix else 1)
        outgoing = self._outgoing_of(sequence)
        num_blocks = self._num_readable(sequence.num_computed)
        self._announce(outgoing, sequence.block_table[len(outgoing.leased) : num_blocks])
        assert len(outgoing.leased) == num_blocks
        num_draft = self._announce_drafted(outgoing, sequence.num_draft_computed)
        is_live = outgoing.max_computed is not None
        outgoing.is_sealed = True
        self._sealed[sequence.key] = outgoing.handoff_id
        sequence.status = SequenceStatus.HANDED_OFF
        sequence.is_held = False
        self._manager.release(sequence.block_table)
        sequence.block_table = []
        self.num_sent += 1
        self.num_migrated_out += is_live
        num_computed, outputs = sequence.num_computed, tuple(sequence.output_token_ids)
        if self._cache.whole_blocks:
            num_computed -= num_computed % self._cache.block_size
        counts = num_draft, max(num_computed - sequence.num_exact, 0), sequence.num_cached, sequence.num_stored
        self.events.append(HandoffSealed(outgoing.handoff_id, sequence.key, num_computed, outputs, is_live, *counts))

    def end_preempted(self) -> None:
        """End the hand-offs of running sequences that were preempted: they are computed again, into other blocks."""
        error = OutOfBlocks("the sequence lost its KV blocks where it ran, before its sink had them all")
        for outgoing in self._outgoing.values():
            if (sequence := outgoing.running) is not None and self._num_full(sequence) < len(outgoing.leased):
                self.end(sequence, error)
                sequence.handoff_id = None

    def end(self, sequence: Sequence, error: DiptychError) -> None:
        """Give up the hand-off of a sequence that is not sealed, if it has one."""
        if sequence.handoff_id is not None:
            self._end(self._outgoing_of(sequence), error)

    def end_sealed(self, key: str, error: DiptychError) -> None:
        """End the hand-off of a sealed sequence that its router aborts: the sink is told, the blocks come back."""
        handoff_id = self._sealed.get(key)
        if handoff_id is not None:
            self._end(self._outgoing[handoff_id], error)

    def running(self, handoff_id: str) -> Sequence | None:
        """The sequence that decodes here while it is handed off."""
        outgoing = self._outgoing.get(handoff_id)
        return None if outgoing is None else outgoing.running

    def end_lease(self, handoff_id: str, reads: SequenceOf[tuple[int, float]] = ()) -> Sequence | None:
        """Free the leased blocks: RELEASED, EXPIRED or ABORTED. Idempotent. `reads`: (bytes, seconds) that
        the sink reports, by which the size of later segments is chosen.

        Returns the sequence that was computed for this hand-off alone, if it is not sealed: nobody wants it any more.
        One that ran before it was offered runs on.
        """
        self._cost.add_reads(reads)
        outgoing = self._outgoing.pop(handoff_id, None)
        if outgoing is None:
            return None
        by_position = [(block, outgoing.replaced.get(i)) for i, block in enumerate(outgoing.leased)]
        self._manager.end_lease([block for pair in by_position for block in pair if block is not None])
        sequence = outgoing.computing
        if sequence is not None:
            sequence.handoff_id, sequence.is_held = None, False
        elif outgoing.is_sealed and outgoing.sequence is not None:
            self._sealed.pop(outgoing.sequence.key, None)
        return sequence if outgoing.max_computed is None else None

    def _end(self, outgoing: _OutgoingHandoff, error: DiptychError) -> None:
        outgoing.has_ended = True
        self.events.append(HandoffEnded(outgoing.handoff_id, error))

    def _outgoing_of(self, sequence: Sequence) -> _OutgoingHandoff:
        assert sequence.handoff_id is not None
        return self._outgoing[sequence.handoff_id]

    def _announce(self, outgoing: _OutgoingHandoff, blocks: list[int]) -> None:
        ready = self._lease(outgoing, blocks)
        if ready is not None:
            self.events.append(ready)

    def _lease(self, outgoing: _OutgoingHandoff, blocks: list[int]) -> SegmentReady | None:
        """Lease blocks that follow those leased already."""
        if not blocks:
            return None
        first = len(outgoing.leased)
        self._manager.lease(blocks)
        outgoing.leased += blocks
        return self._ready(outgoing, range(first, len(outgoing.leased)), range(self._num_layers))

    def _announce_draft(self, outgoing: _OutgoingHandoff, end: int) -> None:
        """Announce the draft layers of the leased blocks up to position `end`, which change no more."""
        positions = range(outgoing.num_drafts, min(end, len(outgoing.leased)))
        if self._draft_kv is not None and positions:
            self.events.append(self._ready(outgoing, positions, range(self._num_layers, self._layout.num_layers)))
            outgoing.num_drafts = positions.stop

    def _announce_drafted(self, outgoing: _OutgoingHandoff, num_tokens: int) -> int:
        """Announce the draft layers of the blocks that have the KV of `num_tokens` tokens, for the seal. Returns of
        how many they have it: a leased block that the prefix cache replaced may lack what that in its place has."""
        if self._draft_kv is None:
            return 0
        block_size = self._cache.block_size
        full = outgoing.leased[: num_tokens // block_size]
        num = self._draft_kv.num_leading(full)
        if num == len(full) * block_size and len(full) not in outgoing.replaced:
            num = num_tokens
        self._announce_draft(outgoing, blocks_for(num, block_size))
        return num

    def _ready(self, outgoing: _OutgoingHandoff, positions: range, layers: range) -> SegmentReady:
        blocks = tuple(outgoing.leased[positions.start : positions.stop])
        generations = tuple(self._manager.generations[b] for b in blocks)
        segment = Segment(positions.start, blocks, generations, layers.start, len(layers))
        return SegmentReady(outgoing.handoff_id, segment)

    def _num_readable(self, num_computed: int) -> int:
        """Number of blocks that a sealed sequence with so many tokens announces: full ones alone, where only those
        can be taken over."""
        size = self._cache.block_size
        return num_computed // size if self._cache.whole_blocks else blocks_for(num_computed, size)

    def _num_full(self, sequence: Sequence) -> int:
        return sequence.num_computed // self._cache.block_size

    def check_integrity(self) -> None:
        """Assert that every sequence on offer knows of it."""
        for handoff_id, outgoing in self._outgoing.items():
            assert outgoing.computing is None or outgoing.computing.handoff_id == handoff_id
