"""Picks the sequences of the next step. Knows tokens and blocks, never a tensor, a clock or a socket.

One token budget a step: running decodes first (one token each), then prefill chunks of admitted sequences, then
admission of waiting ones, oldest first. A sequence gets the blocks of all its tokens when it is admitted and one more
whenever a decode crosses a block's end; where none is left, the youngest sequence is preempted: its blocks are freed,
its tokens kept, and it is computed again later (recompute, PagedAttention §4.5).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .block_manager import BlockManager
from .prefix_cache import PrefixCache
from .sequence import Batch, ScheduledSequence, Sequence, SequenceStatus


class Role(Enum):
    """What a worker is used for: a weight of its scheduler, changed at run time."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batch_tokens: int = 2048  # a step's budget
    chunk_tokens: int = 0  # a sequence's share of it while prefilling; 0: no limit but the budget
    max_running: int = 256
    decode_role_prefill_tokens: int = 256  # prefill tokens a step beside running decodes, in the decode role


class Scheduler:
    def __init__(self, config: SchedulerConfig, manager: BlockManager, cache: PrefixCache) -> None:
        self.config = config
        self.role = Role.MIXED
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._manager = manager
        self._cache = cache
        # Dicts as ordered sets: O(1) removal. Preempted sequences are older than every waiting one.
        self._preempted: dict[Sequence, None] = {}
        self._waiting: dict[Sequence, None] = {}
        self._running: dict[Sequence, None] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._preempted)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._preempted
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        assert not sequence.block_table and sequence.num_computed == 0
        sequence.status = SequenceStatus.WAITING
        self._waiting[sequence] = None

    def add_running(self, sequence: Sequence) -> None:
        """Take a sequence whose KV arrived with its blocks (the sink side of a hand-off)."""
        assert sequence.num_uncomputed >= 1
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and release its blocks."""
        self.detach(sequence)
        self._release(sequence)

    def detach(self, sequence: Sequence) -> None:
        """Forget a sequence and leave its blocks with the caller."""
        for queue in (self._running, self._preempted, self._waiting):
            queue.pop(sequence, None)

    def schedule(self) -> Batch:
        """The next step's batch; empty when nothing can run."""
        entries: list[ScheduledSequence] = []
        budget = self._schedule_decodes(entries)
        if entries and self.role is Role.DECODE:
            budget = min(budget, self.config.decode_role_prefill_tokens)
        budget = self._schedule_prefills(entries, budget)
        self._admit(entries, budget)
        return Batch(entries)

    def _schedule_decodes(self, entries: list[ScheduledSequence]) -> int:
        budget = self.config.max_batch_tokens
        for sequence in list(self._running):
            if budget == 0:
                break
            # One scheduled before us may have preempted us.
            if not sequence.is_decoding or sequence.is_held or sequence.status is not SequenceStatus.RUNNING:
                continue
            if self._grow(sequence, entries):
                entries.append(ScheduledSequence(sequence, 1))
                budget -= 1
        return budget

    def _schedule_prefills(self, entries: list[ScheduledSequence], budget: int) -> int:
        for sequence in self._running:
            if budget == 0:
                break
            if not sequence.is_decoding:
                budget -= self._add_chunk(sequence, entries, budget)
        return budget

    def _admit(self, entries: list[ScheduledSequence], budget: int) -> None:
        while budget > 0 and (self._preempted or self._waiting) and len(self._running) < self.config.max_running:
            queue = self._preempted or self._waiting
            sequence = next(iter(queue))
            cached = self._cache.match(sequence)
            # Sharing first keeps the allocation from evicting what was just found.
            self._manager.share(cached)
            num_needed = -(-sequence.num_tokens // self._cache.block_size) - len(cached)
            if num_needed > self._manager.num_free:
                self._manager.release(cached)
                return
            sequence.block_table = cached + self._manager.allocate(num_needed)
            sequence.num_computed = len(cached) * self._cache.block_size
            if queue is self._waiting:
                sequence.num_cached = sequence.num_computed
                self.num_cached_tokens += sequence.num_computed
            del queue[sequence]
            sequence.status = SequenceStatus.RUNNING
            self._running[sequence] = None
            budget -= self._add_chunk(sequence, entries, budget)

    def _add_chunk(self, sequence: Sequence, entries: list[ScheduledSequence], budget: int) -> int:
        num_new = min(sequence.num_uncomputed, budget, self.config.chunk_tokens or budget)
        entries.append(ScheduledSequence(sequence, num_new))
        return num_new

    def _grow(self, sequence: Sequence, entries: list[ScheduledSequence]) -> bool:
        """Make room for one more token, preempting if need be. False: `sequence` itself was preempted."""
        if sequence.num_tokens <= len(sequence.block_table) * self._cache.block_size:
            return True
        while self._manager.num_free == 0:
            victim = self._victim()
            if victim is None:
                victim = sequence
            self._preempt(victim, entries)
            if victim is sequence:
                return False
        sequence.block_table += self._manager.allocate(1)
        return True

    def _victim(self) -> Sequence | None:
        """The youngest running sequence. A source's blocks are leased: preempting it would free nothing."""
        return next((s for s in reversed(self._running) if s.handoff_id is None), None)

    def _preempt(self, sequence: Sequence, entries: list[ScheduledSequence]) -> None:
        del self._running[sequence]
        entries[:] = [e for e in entries if e.sequence is not sequence]
        self._release(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self._preempted = {sequence: None, **self._preempted}
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._manager.release(sequence.block_table)
        sequence.block_table = []
