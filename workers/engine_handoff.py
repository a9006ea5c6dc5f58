"""The engine's side of hand-offs: which blocks are leased to sinks, which are reserved for arriving KV.

Source:  open -> announce* -> seal -> (blocks leased only) -> end_lease
                    └─ end (finished, failed, aborted) ──────┘   the leases stay until end_lease
Sink:    expect -> reserve -> commit (the sequence runs here)
              └─────────┴──> fail [-> quarantined -> settle]     give_up: the request is gone, the pull is not yet

Block bookkeeping only: the protocol is in handoff.py. `reserve` may wait for blocks: the pull is not begun meanwhile,
which is the back-pressure that a source sees.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .engine_events import HandoffEnded, HandoffEvent, HandoffSealed, SegmentReady
from .errors import DiptychError, HandoffError, RequestAborted
from .handoff_types import Reservation
from .prefix_cache import PrefixCache
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class _Outgoing:
    sequence: Sequence
    leased: list[int] = field(default_factory=list[int])
    is_sealed: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class _Incoming:
    sequence: Sequence
    num_held: int = 0  # leading blocks of its table that came from the prefix cache
    gone: DiptychError | None = None  # the request ended while its KV was on the way


Grant = Callable[[Reservation | DiptychError], object]


class HandoffLedger:
    def __init__(self, manager: BlockManager, cache: PrefixCache, scheduler: Scheduler) -> None:
        self._manager = manager
        self._cache = cache
        self._scheduler = scheduler
        self._outgoing: dict[str, _Outgoing] = {}
        self._sealed: dict[str, str] = {}  # sequence key -> hand-off id
        self._incoming: dict[str, _Incoming] = {}
        self._waiting: dict[str, Grant] = {}  # reservations in order of arrival
        self._quarantined: dict[str, list[int]] = {}
        self.num_sent = 0
        self.num_received = 0
        self.num_failed = 0

    @property
    def num_open(self) -> int:
        return len(self._outgoing) + len(self._incoming)

    @property
    def num_importing(self) -> int:
        return len(self._incoming)

    def importing_tables(self) -> list[list[int]]:
        return [i.sequence.block_table for i in self._incoming.values()]

    # -- source -----------------------------------------------------------------------------------------------------

    def open(self, handoff_id: str, sequence: Sequence) -> None:
        self._outgoing[handoff_id] = _Outgoing(sequence)

    def is_open(self, handoff_id: str) -> bool:
        return handoff_id in self._outgoing

    def announce(self, sequence: Sequence) -> list[HandoffEvent]:
        """Lease and announce what became readable: full blocks, and the last one once every token is computed."""
        assert sequence.handoff_id is not None
        outgoing = self._outgoing[sequence.handoff_id]
        is_whole = sequence.num_uncomputed == 0
        end = len(sequence.block_table) if is_whole else sequence.num_computed // self._cache.block_size
        first = len(outgoing.leased)
        blocks = sequence.block_table[first:end]
        if not blocks:
            return []
        self._manager.lease(blocks)
        outgoing.leased += blocks
        generations = tuple(self._manager.generations[b] for b in blocks)
        return [SegmentReady(sequence.handoff_id, first, tuple(blocks), generations)]

    def seal(self, sequence: Sequence) -> HandoffSealed:
        """The first token is sampled: from here on only the leases hold the blocks."""
        assert sequence.handoff_id is not None
        outgoing = self._outgoing[sequence.handoff_id]
        assert len(outgoing.leased) == len(sequence.block_table)
        outgoing.is_sealed = True
        self._sealed[sequence.key] = sequence.handoff_id
        sequence.status = SequenceStatus.HANDED_OFF
        self._manager.release(sequence.block_table)
        sequence.block_table = []
        self.num_sent += 1
        return HandoffSealed(sequence.handoff_id, sequence.key, sequence.num_computed, tuple(sequence.output_token_ids))

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

    def end_lease(self, handoff_id: str) -> None:
        """RELEASED, EXPIRED or ABORTED: nobody reads these blocks any more. Idempotent."""
        outgoing = self._outgoing.pop(handoff_id, None)
        if outgoing is not None:
            self._sealed.pop(outgoing.sequence.key, None)
            self._manager.end_lease(outgoing.leased)

    # -- sink -------------------------------------------------------------------------------------------------------

    def expect(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.IMPORTING
        self._incoming[sequence.key] = _Incoming(sequence)

    def reserve(self, key: str, num_tokens: int, grant: Grant) -> None:
        """Call `grant` with blocks for the first `num_tokens` tokens, now or when there are enough; or with why not."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None:
            grant(incoming.gone if incoming and incoming.gone else RequestAborted("the request is gone"))
        elif num_tokens != incoming.sequence.num_tokens:
            grant(
                HandoffError(
                    f"the source offers {num_tokens} tokens of a request that has {incoming.sequence.num_tokens}"
                )
            )
        else:
            self._waiting[key] = grant
            self.grant_reservations()

    def grant_reservations(self) -> None:
        """Serve waiting reservations, oldest first, while every running sequence can still grow by a block."""
        while self._waiting:
            key, grant = next(iter(self._waiting.items()))
            incoming = self._incoming[key]
            sequence = incoming.sequence
            held = self._cache.match(sequence)
            self._manager.share(held)
            num_needed = -(-sequence.num_tokens // self._cache.block_size) - len(held)
            headroom = min(self._scheduler.num_running, self._manager.num_blocks // 8)
            if num_needed + headroom > self._manager.num_free:
                self._manager.release(held)
                return
            del self._waiting[key]
            incoming.num_held = len(held)
            sequence.block_table = held + self._manager.allocate(num_needed)
            grant(Reservation(tuple(sequence.block_table), len(held) * self._cache.block_size))

    def commit(self, key: str, num_computed: int, output_token_ids: list[int]) -> None:
        """The sequence's KV is here: it runs from its next token on. Raises where the request is gone or differs."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None:
            raise RequestAborted("the request ended while its KV was on the way")
        sequence = incoming.sequence
        expected = sequence.output_token_ids
        if num_computed != sequence.num_tokens or output_token_ids[:-1] != expected or not output_token_ids:
            raise HandoffError(
                f"the source sealed {num_computed} tokens and {len(output_token_ids)} outputs; "
                f"{sequence.num_tokens} and {len(expected) + 1} were due"
            )
        del self._incoming[key]
        sequence.num_computed = num_computed
        sequence.token_ids.append(output_token_ids[-1])
        self._cache.insert(sequence, 0)
        self._scheduler.add_running(sequence)
        self.num_received += 1

    def give_up(self, key: str, error: DiptychError) -> None:
        """The request ended: its blocks wait for `fail`, which the pull calls when it has stopped reading."""
        incoming = self._incoming[key]
        incoming.gone = error
        grant = self._waiting.pop(key, None)
        if grant is not None:
            grant(error)

    def fail(self, key: str, *, quarantine: bool) -> Sequence | None:
        """The pull is over without its KV: free the blocks, or keep them aside until `settle`. Idempotent.

        Returns the sequence if its request still waits.
        """
        self._waiting.pop(key, None)
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return None
        self.num_failed += incoming.gone is None
        table, incoming.sequence.block_table = incoming.sequence.block_table, []
        if quarantine:
            fresh = table[incoming.num_held :]
            self._manager.quarantine(fresh)
            self._manager.release(table[: incoming.num_held])
            self._quarantined[key] = fresh
        else:
            self._manager.release(table)
        return incoming.sequence if incoming.gone is None else None

    def settle(self, key: str) -> None:
        """No byte of a failed read can land any more."""
        self._manager.end_quarantine(self._quarantined.pop(key, []))
