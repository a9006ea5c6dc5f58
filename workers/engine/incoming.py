"""The engine's half of hand-offs from other workers: which blocks are reserved for arriving KV.

    expect -> reserve -> [begin (it runs, provisionally) ->] commit (the sequence runs here)
         └─────────┴───────────┴──> fail [-> quarantined -> settle]
    give_up: the request is gone, the pull is not yet
    a prefix: commit leaves the rest to compute here, and so does fail, with all of it

Block bookkeeping only: the protocol is in sink_machine.py. `reserve` may wait for blocks: meanwhile the pull is not
begun, which is the back-pressure that a source sees.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..common.errors import DiptychError, HandoffError, RequestAborted
from ..common.timings import SequenceClock
from ..core.block_manager import BlockManager
from ..core.draft_kv import DraftKV
from ..core.live_handoff import headroom_blocks
from ..core.prefix_cache import PrefixCache
from ..core.scheduler import Scheduler
from ..core.sequence import NEVER, Provisional, Sequence, SequenceStatus
from ..handoff.types import Reservation, Seal
from ..kv.layout import blocks_for


@dataclass(slots=True)
class _Incoming:
    sequence: Sequence
    is_prefix: bool = False
    num_reserved: int = 0  # tokens
    num_held: int = 0  # leading blocks of its table that came from the prefix cache
    names: list[bytes] = field(default_factory=list[bytes])  # of the full blocks that it brings
    awaits: bytes | None = None  # name of its next block, which another brings, while its reservation waits for that
    gone: DiptychError | None = None  # the request ended while its KV was being transferred


Grant = Callable[[Reservation | DiptychError], object]
_Waiting = dict[str, tuple[int, int, Grant]]  # reservations by key: number of arrival, tokens


class IncomingHandoffs:
    def __init__(
        self, manager: BlockManager, cache: PrefixCache, scheduler: Scheduler, draft_kv: DraftKV | None
    ) -> None:
        self._manager = manager
        self._cache = cache
        self._scheduler = scheduler
        self._draft_kv = draft_kv
        self._incoming: dict[str, _Incoming] = {}
        self._waiting = _Waiting()  # in order of arrival
        self._awaiting: dict[bytes, _Waiting] = {}  # those that wait for a block that another brings, by its name
        self._num_reservations = 0  # that ever arrived
        self._quarantined: dict[str, list[int]] = {}
        self._arriving: dict[bytes, str] = {}  # block name -> key of the sequence that brings it
        self.num_received = 0  # sequences
        self.num_prefixes_pulled = 0

    @property
    def num_open(self) -> int:
        return len(self._incoming)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens to compute here after the prefixes that are on their way."""
        coming = [
            i for i in self._incoming.values() if i.is_prefix and i.num_reserved and i.sequence.provisional is None
        ]
        return sum(i.sequence.num_tokens - i.num_reserved for i in coming)

    def waiting_tables(self) -> list[list[int]]:
        """Block tables of the sequences that do not run yet."""
        return [i.sequence.block_table for i in self._incoming.values() if i.sequence.provisional is None]

    def expect(self, sequence: Sequence, *, is_prefix: bool = False) -> None:
        """Wait for a sequence's KV. `is_prefix`: of its leading tokens alone; the rest is computed here."""
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
            self._end_wait(key, incoming)
            self._num_reservations += 1
            self._waiting[key] = self._num_reservations, num_tokens, grant
            self.grant_reservations()

    def grant_reservations(self) -> None:
        """Serve waiting reservations, oldest first, while every running sequence can still grow by a block. One whose
        next block is on its way with another waits for that: the KV of a prompt comes once. Until then it is not looked
        at again, for there may be thousands. Where KV has a tail, those that come to run here wait until one more may
        run."""
        num_rows = self._num_rows_left() if self._waiting else 0
        for key, (number, num_tokens, grant) in list(self._waiting.items()):
            incoming = self._incoming[key]
            sequence = incoming.sequence
            if not (incoming.is_prefix or num_rows > 0):
                continue
            held = self._cache.match(sequence)
            names = sequence.block_hashes[len(held) : num_tokens // self._cache.block_size]
            if names and names[0] in self._arriving:
                incoming.awaits = names[0]
                self._awaiting.setdefault(names[0], {})[key] = number, num_tokens, grant
                del self._waiting[key]
                continue
            self._manager.share(held)
            num_needed = blocks_for(max(num_tokens, sequence.num_tokens), self._cache.block_size) - len(held)
            headroom = headroom_blocks(self._scheduler.num_running, self._manager.num_blocks)
            if num_needed + headroom > self._manager.num_free:
                self._manager.release(held)
                return
            del self._waiting[key]
            num_rows -= not incoming.is_prefix
            incoming.num_reserved = num_tokens
            incoming.num_held = len(held)
            incoming.names = names
            self._arriving |= dict.fromkeys(names, key)
            sequence.block_table = held + self._manager.allocate(num_needed)
            grant(Reservation(tuple(sequence.block_table), len(held) * self._cache.block_size))

    def _num_rows_left(self) -> float:
        """Number of sequences that may still come to run here; infinite without a KV tail. More of them than a step has
        would take turns; the tail has room for those of a step. O(hand-offs on their way)."""
        if not self._cache.whole_blocks:
            return math.inf
        each = self._incoming.values()
        num_coming = sum([i.num_reserved > 0 and not i.is_prefix and i.sequence.provisional is None for i in each])
        return self._scheduler.config.max_running - self._scheduler.num_running - num_coming

    def _arrived(self, key: str, incoming: _Incoming) -> None:
        """Let no reservation wait for its blocks: they have arrived, or never will."""
        freed = _Waiting()
        for name in incoming.names:
            if self._arriving.get(name) == key:
                del self._arriving[name]
                freed |= self._awaiting.pop(name, {})
        incoming.names = []
        for other in freed:
            self._incoming[other].awaits = None
        if freed:
            self._waiting = dict(sorted((self._waiting | freed).items(), key=_arrival))

    def _end_wait(self, key: str, incoming: _Incoming) -> Grant | None:
        """Remove its reservation if that waits; return who is to be told."""
        waiting = self._waiting
        if (name := incoming.awaits) is not None:
            waiting, incoming.awaits = self._awaiting[name], None
        found = waiting.pop(key, None)
        if name is not None and not waiting:
            del self._awaiting[name]
        return None if found is None else found[2]

    def begin(self, key: str, seal: Seal, now: float) -> None:
        """Compute one token, if that is possible, and no more until `commit`: all is read, and the release asked
        for."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None or incoming.is_prefix:
            return
        sequence = incoming.sequence
        num_tokens = sequence.num_prompt + len(seal.output_token_ids)
        num_missing = max(blocks_for(num_tokens, self._cache.block_size) - len(sequence.block_table), 0)
        may_begin = sequence.handoff_id is None and num_missing <= self._manager.num_free  # and is not handed on
        if may_begin and self._take_all(incoming, seal):
            sequence.block_table += self._manager.allocate(num_missing)
            sequence.provisional = Provisional()
            sequence.clock = SequenceClock(now)
            self._scheduler.add_running(sequence)

    def commit(self, key: str, seal: Seal) -> Sequence:
        """Run a sequence whose KV is here; one that has begun is still `provisional`. Raises where it is gone or
        differs."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.gone is not None:
            raise RequestAborted("the request ended while its KV was being transferred")
        sequence = incoming.sequence
        if incoming.is_prefix:
            self._take_prefix(incoming, seal)
        elif sequence.provisional is None and not self._take_all(incoming, seal):
            raise HandoffError(
                f"the source sealed {seal.num_computed} tokens and {len(seal.output_token_ids)} outputs, and offered "
                f"{incoming.num_reserved}, of a prompt of {sequence.num_prompt} with {sequence.num_output} outputs"
            )
        del self._incoming[key]
        self._arrived(key, incoming)
        if sequence.provisional is None:
            self._scheduler.add_running(sequence)
        else:  # a step has used its table: a new list marks changed blocks (see batch_tables.py)
            sequence.block_table = [*sequence.block_table]
        self._cache.insert(sequence, 0)
        self.num_received += not incoming.is_prefix
        return sequence

    def _take_all(self, incoming: _Incoming, seal: Seal) -> bool:
        """Take the sealed tokens; False: they do not fit. The source may have generated more than were known here."""
        sequence, num_computed, outputs = incoming.sequence, seal.num_computed, list(seal.output_token_ids)
        known, num_due = sequence.output_token_ids, sequence.num_prompt + len(outputs) - 1
        is_due = seal.is_of(num_due) and num_due <= incoming.num_reserved
        if not (is_due and 0 < len(outputs) < sequence.request.sampling.max_tokens and outputs[: len(known)] == known):
            return False
        sequence.token_ids[sequence.num_prompt :] = outputs
        sequence.num_resumed = len(outputs)
        sequence.num_computed = self._readable(num_computed)
        sequence.num_exact = num_computed - seal.num_inexact if seal.num_inexact else NEVER
        self._take_draft_kv(incoming, seal)
        return True

    def _readable(self, num_computed: int) -> int:
        """Number of these tokens after which a sequence can go on here: the rest is computed again."""
        return num_computed - num_computed % self._cache.block_size if self._cache.whole_blocks else num_computed

    def _take_draft_kv(self, incoming: _Incoming, seal: Seal) -> None:
        """Note for how many tokens the KV of the model that drafts is here, too."""
        if self._draft_kv is not None:
            num_held = incoming.num_held * self._cache.block_size
            self._draft_kv.received(incoming.sequence, num_held, seal.num_draft_computed)

    def _stop(self, sequence: Sequence) -> None:
        """Stop a sequence that has begun, and forget what it computed."""
        if sequence.provisional is not None:
            self._scheduler.detach(sequence)
            sequence.provisional, sequence.status = None, SequenceStatus.IMPORTING

    def _take_prefix(self, incoming: _Incoming, seal: Seal) -> None:
        """Take a prefix. At least one token is computed here, because its logits are needed."""
        num_computed, num_outputs = seal.num_computed, len(seal.output_token_ids)
        if num_outputs or not 0 < num_computed <= incoming.num_reserved:
            raise HandoffError(f"the source sealed a prefix of {num_computed} tokens and {num_outputs} outputs")
        sequence = incoming.sequence
        num_held = incoming.num_held * self._cache.block_size
        sequence.num_cached = self._readable(min(max(num_computed, num_held), sequence.max_cached))
        sequence.num_computed = sequence.num_cached
        sequence.num_pulled = max(sequence.num_computed - num_held, 0)
        self._take_draft_kv(incoming, seal)
        self._scheduler.prompts.add(sequence.num_tokens, num_held)
        self.num_prefixes_pulled += num_computed > num_held

    def give_up(self, key: str, error: DiptychError) -> None:
        """Give up a request that ended: its blocks wait for `fail`, which the pull calls when it has stopped
        reading."""
        incoming = self._incoming[key]
        incoming.gone = error
        self._stop(incoming.sequence)
        self._scheduler.give_up(incoming.sequence)
        self._arrived(key, incoming)
        grant = self._end_wait(key, incoming)
        if grant is not None:
            grant(error)

    def fail(self, key: str, *, quarantine: bool) -> Sequence | None:
        """End a pull without its KV: free the blocks, or keep them aside until `settle`. Idempotent.

        Returns the sequence if its request ends with it; without its prefix it is computed here from the start.
        """
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return None
        self._end_wait(key, incoming)
        is_over = incoming.gone is None and not incoming.is_prefix
        self._arrived(key, incoming)
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
        """Free the quarantined blocks: no byte of a failed read can arrive any more."""
        self._manager.end_quarantine(self._quarantined.pop(key, []))


def _arrival(waiting: tuple[str, tuple[int, int, Grant]]) -> int:
    return waiting[1][0]
