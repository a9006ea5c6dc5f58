"""The block tables of running sequences, as rows of one array that live as long as the sequences run.

    a sequence's first step  ->  a row, all its blocks written
    each later one           ->  what changed since: the blocks of the tokens that the last step computed, and new ones

A block that was full before a sequence's last step never changes in its table (see Sequence.block_table): so a step
costs a sequence the same however long its context is. numpy, no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import repeat
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from .sequence import KNOWN, ScheduledSequence, Sequence

FIRST_ROWS = 64


@dataclass(slots=True)
class Row:
    of: ref[Sequence]  # which may be gone: rows outlive sequences, whose tokens take more memory
    index: int
    table: list[int]  # the sequence's own list: another one means other blocks
    num_written: int  # blocks
    num_stable: int  # of them, those that cannot change
    last_block: int  # that was written
    step: int  # that used it last


class TableRows(ABC):
    """Assigns rows to sequences and finds what must be written: `_store` writes it, `_grow` adds rows."""

    def __init__(self, block_size: int, num_rows: int) -> None:
        self.block_size = block_size
        self._rows: dict[int, Row] = {}  # by id of the sequence, which another may have after it
        self._free = list(range(num_rows))
        self._step = 0

    def update(self, entries: SequenceOf[ScheduledSequence], previous_entries: SequenceOf[int] = ()) -> list[int]:
        """Write what is new; returns the rows of these sequences.

        previous_entries: as in Batch. Blocks that the previous step fills can still change in the table then, because
        it is not recorded yet.
        """
        self._step += 1
        block_size, rows, step = self.block_size, self._rows, self._step
        indices: list[int] = []
        for entry, previous in zip(entries, previous_entries or repeat(KNOWN), strict=False):
            sequence = entry.sequence
            table, num_stable = sequence.block_table, sequence.num_computed // block_size
            start = entry.start if previous == KNOWN else len(sequence.token_ids)
            num_blocks = (start + entry.num_new - 1) // block_size + 1
            row = rows.get(id(sequence))
            if row is None or row.of() is not sequence:
                row = self._take(sequence)
            if (
                row.table is not table
                or row.num_written < num_blocks
                or row.num_stable < num_stable
                or row.last_block != table[row.num_written - 1]
            ):
                self._write(row, table, num_blocks, num_stable)
            row.step = step
            indices.append(row.index)
        if len(rows) > 2 * len(entries) + FIRST_ROWS:
            self._forget()
        return indices

    def _write(self, row: Row, table: list[int], num_blocks: int, num_stable: int) -> None:
        first = row.num_stable if row.table is table else 0
        self._store(row.index, first, table[first:num_blocks])
        row.table, row.num_written, row.num_stable = table, num_blocks, num_stable
        row.last_block = table[num_blocks - 1]

    def _take(self, sequence: Sequence) -> Row:
        gone = self._rows.get(id(sequence))
        if gone is not None:
            self._free.append(gone.index)
        if not self._free:
            self._free = self._grow()
        row = self._rows[id(sequence)] = Row(ref(sequence), self._free.pop(), [], 0, 0, -1, 0)
        return row

    def forget_all(self) -> None:
        """Forget all rows, whose content is in doubt: each is written again when it is used."""
        self._free += [row.index for row in self._rows.values()]
        self._rows.clear()

    @abstractmethod
    def _store(self, row: int, first: int, blocks: list[int]) -> None:
        """Write these block ids into row `row` from column `first` on."""

    @abstractmethod
    def _grow(self) -> list[int]:
        """Add rows, because all are taken; returns the new ones."""

    def _forget(self) -> None:
        """Free the rows that the last step did not use."""
        for name, row in list(self._rows.items()):
            if row.step != self._step:
                del self._rows[name]
                self._free.append(row.index)


class BatchTables(TableRows):
    """Rows of `array`, which may be another one after an update."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        super().__init__(block_size, FIRST_ROWS)
        self.array: NDArray[np.int32] = np.zeros((FIRST_ROWS, max_blocks), dtype=np.int32)

    def _store(self, row: int, first: int, blocks: list[int]) -> None:
        self.array[row, first : first + len(blocks)] = blocks

    def _grow(self) -> list[int]:
        num = len(self.array)
        self.array = np.concatenate((self.array, np.zeros_like(self.array)))
        return list(range(num, 2 * num))
