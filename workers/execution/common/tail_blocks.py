"""Assigns the blocks of the KV tail, where blocks of the KV cache are rounded once they are full (kv/dtypes.py).

    a step's tokens ──> a block of the tail for each block of the sequence that they lie in
    all its tokens are recorded, or the sequence runs no more ──> free

A block that is full is not free yet: what filled it may be a draft that is rejected, or a step that fails, and then its
last tokens are computed again. A sequence begins to compute at the start of a block, whatever came from a prefix cache
or another worker, so that nobody needs what another sequence has in the tail. Bookkeeping only; no torch.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import repeat
from weakref import ref

from ...common.errors import InternalError
from ...core.sequence import KNOWN, ScheduledSequence, Sequence, SequenceStatus
from ...device.kv_cache import KVCache

FIRST_ROWS = 64


@dataclass(slots=True)
class _TailRow:
    of: ref[Sequence]  # which may be gone, as in core/batch_tables.py
    first: int  # block of the sequence that the first of `blocks` has
    blocks: list[int] = field(default_factory=list[int])  # of the tail

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class TailBlocks:
    """Blocks of a tail of `num_blocks`, as many as the KV cache has: each stands for a block of one sequence alone.
    Those that were used before are used first, for the others cost no memory yet."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._rows: dict[int, _TailRow] = {}  # by id of the sequence, which another may have after it
        self._free: list[int] = []
        self._num_used = 0  # blocks that were ever assigned

    def update(self, entries: SequenceOf[ScheduledSequence], previous_entries: SequenceOf[int] = ()) -> list[int]:
        """Return the tail's blocks of a step, one after the other: see `by_entry`."""
        return [block for blocks in self.by_entry(entries, previous_entries) for block in blocks]

    def by_entry(
        self, entries: SequenceOf[ScheduledSequence], previous_entries: SequenceOf[int] = ()
    ) -> list[list[int]]:
        """Return the tail's blocks of a step: of each entry those of the blocks of its sequence that its tokens lie
        in. previous_entries: as in Batch. O(entries and blocks)."""
        size, rows = self._block_size, self._rows
        if len(rows) > 2 * len(entries) + FIRST_ROWS:
            self._sweep()
        tails: list[list[int]] = []
        for entry, previous in zip(entries, previous_entries or repeat(KNOWN), strict=False):
            sequence = entry.sequence
            start = entry.start if previous == KNOWN else len(sequence.token_ids)
            first, end = start // size, (start + entry.num_new - 1) // size + 1
            row = self._row_of(sequence)
            if end > row.end:
                row.blocks += self._take(end - row.end)
            tails.append(row.blocks[first - row.first : end - row.first])
        return tails

    @property
    def num_assigned(self) -> int:
        """Number of blocks that are in use, or were when it was looked last."""
        return self._num_used - len(self._free)

    def _row_of(self, sequence: Sequence) -> _TailRow:
        """The row of a sequence, from the block on in which its next token to be recorded lies. Raises InternalError
        where that is not here, though the block has tokens."""
        first = sequence.num_computed // self._block_size
        row = self._rows.get(id(sequence))
        if row is None or row.of() is not sequence:
            self._free += [] if row is None else row.blocks
            row = self._rows[id(sequence)] = _TailRow(ref(sequence), first)
        elif not row.first <= first < row.end:  # all is recorded, or it was preempted and begins anew
            self._free += row.blocks
            row.first, row.blocks = first, []
        elif row.first < first:
            self._free += row.blocks[: first - row.first]
            del row.blocks[: first - row.first]
            row.first = first
        if not row.blocks and sequence.num_computed % self._block_size:
            raise InternalError(
                f"the KV tail has lost the last {sequence.num_computed % self._block_size} tokens of {sequence.key}"
            )
        return row

    def _take(self, num: int) -> list[int]:
        if len(self._free) < num:
            self._sweep()
        while len(self._free) < num:
            if self._num_used == self._num_blocks:
                raise InternalError(f"more than {self._num_blocks} blocks are to be in the KV tail at once")
            self._free.insert(0, self._num_used)
            self._num_used += 1
        return [self._free.pop() for _ in range(num)]

    def _sweep(self) -> None:
        """Free what is recorded, and all of the sequences that run no more."""
        for name, row in list(self._rows.items()):
            sequence = row.of()
            if sequence is None or sequence.status is not SequenceStatus.RUNNING:
                self._free += row.blocks
                del self._rows[name]
            elif (num_recorded := sequence.num_computed // self._block_size - row.first) > 0:
                self._free += row.blocks[:num_recorded]
                del row.blocks[:num_recorded]
                row.first += num_recorded


def tail_blocks_of(cache: KVCache) -> TailBlocks | None:
    """Make what assigns the blocks of the cache's tail; None where it has none."""
    return TailBlocks(cache.num_tail_blocks, cache.layout.block_size) if cache.tail else None
