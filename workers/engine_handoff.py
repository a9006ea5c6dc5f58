"""The engine's side of hand-offs: which blocks are leased to sinks, which are reserved for arriving KV.

Source:  open -> announce* -> seal -> (blocks leased only) -> end_lease
                    └─ end (finished, failed, aborted) ──────┘   the leases stay until end_lease
         open_live: the sequence decodes on between announcements, at most as far as was offered, and is sealed once
         its sink has caught up; if the hand-off ends before, it simply runs on here
         open_prefix: blocks of the prefix cache, sealed at once; no sequence
Sink:    expect -> reserve -> [begin (it runs, provisionally) ->] commit (the sequence runs here)
              └─────────┴───────────┴──> fail [-> quarantined -> settle]
         give_up: the request is gone, the pull is not yet
         a prefix: commit leaves the rest to compute here, and so does fail, with all of it

Block bookkeeping only: the protocol is in handoff.py. `reserve` may wait for blocks: the pull is not begun meanwhile,
which is the back-pressure that a source sees.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .engine_events import HandoffEnded, HandoffEvent, HandoffOpened, HandoffSealed, SegmentReady
from .errors import DiptychError, HandoffError, OutOfBlocks, RequestAborted
from .handoff_types import Reservation
from .prefix_cache import PrefixCache
from .scheduler import Scheduler
from .sequence import Provisional, ScheduledSequence, Sequence, SequenceStatus
from .timings import SequenceClock

LIVE_SLACK_BLOCKS = 2  # that a running sequence may fill between its offer and its seal


@dataclass(slots=True)
class _Outgoing:
    handoff_id: str
    sequence: Sequence | None  # None: a prefix
    max_computed: int | None = None  # of a running sequence: with so many tokens computed it waits for its sink
    leased: list[int] = field(default_factory=list[int])  # by position in the table
    replaced: dict[int, int] = field(default_factory=dict[int, int])  # position -> the cache's equal block, leased too
    is_sealed: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class _Incoming:
    sequence: Sequence
    is_prefix: bool = False
    num_reserved: int = 0  # tokens
    num_held: int = 0  # leading blocks of its table that came from the prefix cache
    names: list[bytes] = field(default_factory=list[bytes])  # of the full blocks that it brings
    gone: DiptychError | None = None  # the request ended while its KV was on the way


Grant = Callable[[Reservation | DiptychError], object]


class HandoffLedger:
    def __init__(self, manager: BlockManager, cache: PrefixCache, scheduler: Scheduler, num_layers: int) -> None:
        self._manager = manager
        self._cache = cache
        self._scheduler = scheduler
        self._num_layers = num_layers
        self._outgoing: dict[str, _Outgoing] = {}
        self._sealed: dict[str, str] = {}  # sequence key -> hand-off id
        self._incoming: dict[str, _Incoming] = {}
        self._waiting: dict[str, tuple[int, Grant]] = {}  # reservations (tokens) in order of arrival
        self._quarantined: dict[str, list[int]] = {}
        self._arriving: dict[bytes, str] = {}  # block name -> key of the sequence that brings it
        self.num_sent = 0  # sequences, as are received and failed
        self.num_received = 0
        self.num_failed = 0
        self.num_migrated_out = 0
        self.num_prefixes_pulled = 0

    @property
    def num_open(self) -> int:
        return len(self._outgoing) + len(self._incoming)

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    @property
    def num_importing(self) -> int:
        return len(self.importing_tables())

    def importing_tables(self) -> list[list[int]]:
        """Of those that do not run yet."""
        return [i.sequence.block_table for i in self._incoming.values() if i.sequence.provisional is None]

    # -- source -----------------------------------------------------------------------------------------------------

    def open(self, handoff_id: str, sequence: Sequence) -> None:
        """The sequence is handed off once it has its first token."""
        self._outgoing[handoff_id] = _Outgoing(handoff_id, sequence)

    def open_live(self, handoff_id: str, sequence: Sequence) -> list[HandoffEvent]:
        """The sequence decodes here, and goes on doing so until it is sealed."""
        assert sequence.is_decoding and sequence.handoff_id is None
        slack = LIVE_SLACK_BLOCKS * self._cache.block_size
        num_tokens = min(sequence.num_tokens + slack, sequence.max_num_tokens)
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
        num_readable = self._num_blocks(num_computed) if is_whole else num_computed // self._cache.block_size
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
        num_blocks = self._num_blocks(sequence.num_computed)
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

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.block_size)

    def _num_full(self, sequence: Sequence) -> int:
        return sequence.num_computed // self._cache.block_size

    def check_integrity(self) -> None:
        """Assert that every sequence on offer knows of it."""
        for handoff_id in self._outgoing:
            sequence = self.still_computing(handoff_id)
            assert sequence is None or sequence.handoff_id == handoff_id

    # -- sink -------------------------------------------------------------------------------------------------------

    def expect(self, sequence: Sequence, *, is_prefix: bool = False) -> None:
        """`is_prefix`: of its leading tokens alone; the rest is computed here."""
        sequence.status = SequenceStatus.IMPORTING
        self._incoming[sequence.key] = _Incoming(sequence, is_prefix)
        if is_prefix:
            self._scheduler.expect(sequence)

    def reserve(self, key: str, num_tokens: int, grant: Grant) -> None:
        """Call `grant` with blocks for the first `num_tokens` tokens, now or when there are enough; or with why not.

        They are blocks for all tokens that the sequence has, and for those that its source may make meanwhile.
        """
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None:
            grant(incoming.gone if incoming and incoming.gone else RequestAborted("the request is gone"))
            return
        # A source's last token has no KV, and may be known here already.
        sequence = incoming.sequence
        most = sequence.num_tokens if incoming.is_prefix else sequence.max_num_tokens
        least = 1 if incoming.is_prefix else max(sequence.num_tokens - 1, 1)
        if not least <= num_tokens <= most:
            grant(HandoffError(f"the source offers {num_tokens} tokens; between {least} and {most} can be of use"))
        else:
            self._waiting[key] = num_tokens, grant
            self.grant_reservations()

    def grant_reservations(self) -> None:
        """Serve waiting reservations, oldest first, while every running sequence can still grow by a block. One whose
        next block is on its way with another waits for that: the KV of a prompt comes once."""
        for key, (num_tokens, grant) in list(self._waiting.items()):
            incoming = self._incoming[key]
            sequence = incoming.sequence
            held = self._cache.match(sequence)
            names = sequence.block_hashes[len(held) : num_tokens // self._cache.block_size]
            if names and names[0] in self._arriving:
                continue
            self._manager.share(held)
            num_needed = self._num_blocks(max(num_tokens, sequence.num_tokens)) - len(held)
            headroom = min(self._scheduler.num_running, self._manager.num_blocks // 8)
            if num_needed + headroom > self._manager.num_free:
                self._manager.release(held)
                return
            del self._waiting[key]
            incoming.num_reserved = num_tokens
            incoming.num_held = len(held)
            incoming.names = names
            self._arriving |= dict.fromkeys(names, key)
            sequence.block_table = held + self._manager.allocate(num_needed)
            grant(Reservation(tuple(sequence.block_table), len(held) * self._cache.block_size))

    def _arrived(self, key: str, incoming: _Incoming) -> None:
        """Or never will: nobody needs to wait for its blocks."""
        for name in incoming.names:
            if self._arriving.get(name) == key:
                del self._arriving[name]
        incoming.names = []

    def begin(self, key: str, num_computed: int, output_token_ids: list[int], now: float) -> None:
        """All is read, and the release asked for: compute one token, if that can be, and no more until `commit`."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None or incoming.is_prefix:
            return
        sequence = incoming.sequence
        num_missing = max(self._num_blocks(num_computed + 1) - len(sequence.block_table), 0)
        may_begin = sequence.handoff_id is None and num_missing <= self._manager.num_free  # it is announced to nobody
        if may_begin and self._take_all(incoming, num_computed, output_token_ids):
            sequence.block_table += self._manager.allocate(num_missing)
            sequence.provisional = Provisional()
            sequence.clock = SequenceClock(now)
            self._scheduler.add_running(sequence)

    def commit(self, key: str, num_computed: int, output_token_ids: list[int]) -> Sequence:
        """The KV is here: it runs on; who has begun is `provisional` still. Raises where it is gone or differs."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None:
            raise RequestAborted("the request ended while its KV was on the way")
        sequence = incoming.sequence
        if incoming.is_prefix:
            self._take_prefix(incoming, num_computed, output_token_ids)
        elif sequence.provisional is None and not self._take_all(incoming, num_computed, output_token_ids):
            raise HandoffError(
                f"the source sealed {num_computed} tokens and {len(output_token_ids)} outputs, and offered "
                f"{incoming.num_reserved}, of a prompt of {sequence.num_prompt} with {sequence.num_output} outputs"
            )
        del self._incoming[key]
        self._arrived(key, incoming)
        if sequence.provisional is None:
            self._scheduler.add_running(sequence)
        else:  # a step has used its table: another list says that its blocks may be others (see batch_tables.py)
            sequence.block_table = [*sequence.block_table]
        self._cache.insert(sequence, 0)
        self.num_received += not incoming.is_prefix
        return sequence

    @staticmethod
    def _take_all(incoming: _Incoming, num_computed: int, outputs: list[int]) -> bool:
        """Whether it can be: the source may have made more tokens than were known when the request was sent here."""
        sequence = incoming.sequence
        known, num_due = sequence.output_token_ids, sequence.num_prompt + len(outputs) - 1
        is_due = num_computed == num_due <= incoming.num_reserved
        if not (is_due and 0 < len(outputs) < sequence.request.sampling.max_tokens and outputs[: len(known)] == known):
            return False
        sequence.token_ids[sequence.num_prompt :] = outputs
        sequence.num_resumed = len(outputs)
        sequence.num_computed = num_computed
        return True

    def _stop(self, sequence: Sequence) -> None:
        """If it has begun, it runs no more, and what it made is forgotten."""
        if sequence.provisional is not None:
            self._scheduler.detach(sequence)
            sequence.provisional, sequence.status = None, SequenceStatus.IMPORTING

    def _take_prefix(self, incoming: _Incoming, num_computed: int, outputs: list[int]) -> None:
        """One token at least is computed here, for its logits are needed."""
        if outputs or not 0 < num_computed <= incoming.num_reserved:
            raise HandoffError(f"the source sealed a prefix of {num_computed} tokens and {len(outputs)} outputs")
        sequence = incoming.sequence
        num_held = incoming.num_held * self._cache.block_size
        sequence.num_computed = sequence.num_cached = min(max(num_computed, num_held), sequence.num_tokens - 1)
        self._scheduler.count_prompt(sequence.num_tokens, num_held)
        self.num_prefixes_pulled += num_computed > num_held

    def give_up(self, key: str, error: DiptychError) -> None:
        """The request ended: its blocks wait for `fail`, which the pull calls when it has stopped reading."""
        incoming = self._incoming[key]
        incoming.gone = error
        self._stop(incoming.sequence)
        self._scheduler.give_up(incoming.sequence)
        self._arrived(key, incoming)
        grant = self._waiting.pop(key, None)
        if grant is not None:
            grant[1](error)

    def fail(self, key: str, *, quarantine: bool) -> Sequence | None:
        """The pull is over without its KV: free the blocks, or keep them aside until `settle`. Idempotent.

        Returns the sequence if its request ends with it; without its prefix it is computed here from the start.
        """
        self._waiting.pop(key, None)
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return None
        is_over = incoming.gone is None and not incoming.is_prefix
        self._arrived(key, incoming)
        self.num_failed += is_over
        self._stop(incoming.sequence)
        table, incoming.sequence.block_table = incoming.sequence.block_table, []
        if quarantine:
            fresh = table[incoming.num_held :]
            self._manager.quarantine(fresh)
            self._manager.release(table[: incoming.num_held])
            self._quarantined[key] = fresh
        else:
            self._manager.release(table)
        if incoming.gone is None and incoming.is_prefix:
            self._scheduler.add(incoming.sequence)
        return incoming.sequence if is_over else None

    def settle(self, key: str) -> None:
        """No byte of a failed read can land any more."""
        self._manager.end_quarantine(self._quarantined.pop(key, []))
