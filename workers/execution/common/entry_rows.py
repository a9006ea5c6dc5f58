"""Entries of a step on a device, column by column, and what a plan of it (gpu/step_plan.py) has of them. No torch."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.drafting import rows_of
from ...core.sequence import KNOWN, DraftEntry, SampledRow, ScheduledSequence
from .bounded import FULL

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Entries of a step, column by column."""

    entries: SequenceOf[ScheduledSequence]
    table_rows: list[int]
    context_lens: list[int]  # with the new tokens
    previous_rows: list[int]  # where in the tokens of the step before each one's token is, or KNOWN
    sampled: list[int]  # entries that are sampled
    has_drafts: bool
    bounded: list[int]  # see Bounded.tokens; empty: none is sparse
    tails: list[list[int]]  # blocks of the KV tail that each one's tokens lie in; empty: there is no tail

    def sparse(self, of: SequenceOf[int]) -> list[int]:
        """1 for each of these entries that is sparse."""
        return [int(self.bounded[i] != FULL) for i in of] if self.bounded else [0] * len(of)

    def num_rows(self, num: int) -> int:
        """Rows of the first `num` entries, all of which decode or have drafts."""
        return sum(entry.num_new for entry in self.entries[:num]) if self.has_drafts else num

    def filled(self, of: SequenceOf[int], block_size: int) -> Ints:
        """See Numbers.filled, of these entries."""
        filled: list[int] = []
        for i in of if self.tails else ():
            start, end = self.context_lens[i] - self.entries[i].num_new, self.context_lens[i]
            filled += self.entries[i].sequence.block_table[start // block_size : end // block_size]
        return np.array(filled, dtype=np.int32)

    @property
    def next_tokens(self) -> tuple[list[SampledRow], list[int]]:
        """Rows that are sampled, and the position of each one's next token."""
        if self.has_drafts:  # then all tokens are known
            rows = rows_of(self.entries)
            return rows, [row.num_tokens for row in rows]
        return [self.entries[i].sequence for i in self.sampled], [self.context_lens[i] for i in self.sampled]

    def in_order(self, first: int) -> list[int]:
        """Indices of the entries from `first` on; those with one new token come first."""
        alone = [self.entries[i].num_new == 1 for i in range(first, len(self.entries))]
        return [i for i, is_alone in enumerate(alone, first) if is_alone] + [
            i for i, is_alone in enumerate(alone, first) if not is_alone
        ]

    @property
    def all_decode(self) -> bool:
        return is_of_decodes(self.entries, self.sampled)


def is_of_decodes(entries: SequenceOf[ScheduledSequence], sampled: SequenceOf[int]) -> bool:
    """Return whether a decode graph may compute them all. sampled: see Batch."""
    return len(sampled) == len(entries) and all(e.num_new == 1 or isinstance(e, DraftEntry) for e in entries)


def decode_columns(rows: EntryRows, num: int) -> Ints:
    """Decode columns of the first `num` entries, see StepPlan."""
    if rows.has_drafts:
        return _columns_with_drafts(rows, num)
    tokens = [
        0 if feed >= 0 else e.sequence.token_ids[e.start]
        for e, feed in zip(rows.entries[:num], rows.previous_rows, strict=False)
    ]
    columns = tokens, rows.previous_rows[:num], rows.context_lens[:num], rows.table_rows[:num], rows.sparse(range(num))
    return np.array(columns, dtype=np.int32)


def _columns_with_drafts(rows: EntryRows, num: int) -> Ints:
    """Compute what `decode_columns` does; a row for each token of a draft, and all of them known."""
    columns: list[list[int]] = [[], [], [], [], []]
    of = zip(rows.entries[:num], rows.context_lens, rows.table_rows, rows.sparse(range(num)), strict=False)
    for entry, context_len, table_row, is_sparse in of:
        sequence, num_new = entry.sequence, entry.num_new
        columns[0] += entry.token_ids if isinstance(entry, DraftEntry) else [sequence.token_ids[sequence.num_computed]]
        columns[1] += [KNOWN] * num_new
        columns[2] += range(context_len - num_new + 1, context_len + 1)
        columns[3] += [table_row] * num_new
        columns[4] += [is_sparse] * num_new
    return np.array(columns, dtype=np.int32)


def decode_tails(rows: EntryRows, num: int, block_size: int) -> Ints:
    """See StepPlan.tails, of the first `num` entries."""
    tails: list[int] = []
    for entry, end, own in zip(rows.entries[:num], rows.context_lens, rows.tails, strict=False):
        start = end - entry.num_new
        tails += [own[position // block_size - start // block_size] for position in range(start, end)]
    return np.array(tails, dtype=np.int32)


def inputs_of(rows: EntryRows, of: SequenceOf[int], block_size: int) -> tuple[Ints, Ints, Ints]:
    """Return tokens, positions and slots of these entries; those with one new token come first."""
    context_lens, previous_rows = rows.context_lens, rows.previous_rows
    num_alone = sum([rows.entries[i].num_new == 1 for i in of])
    tokens: list[int] = []
    places: list[int] = []
    for i in of[:num_alone]:
        sequence, position = rows.entries[i].sequence, context_lens[i] - 1
        tokens.append(0 if previous_rows[i] >= 0 else sequence.token_ids[position])
        block = rows.tails[i][0] if rows.tails else sequence.block_table[position // block_size]
        places.append(block * block_size + position % block_size)
    positions = [np.array([context_lens[i] - 1 for i in of[:num_alone]], dtype=np.int32)]
    slots = [np.array(places, dtype=np.int32)]
    for i in of[num_alone:]:
        entry, end = rows.entries[i], context_lens[i]
        start = end - entry.num_new
        tokens += entry.token_ids if isinstance(entry, DraftEntry) else entry.sequence.token_ids[start:end]
        position = np.arange(start, end, dtype=np.int32)
        table = entry.sequence.block_table
        own = rows.tails[i] if rows.tails else table[start // block_size : (end - 1) // block_size + 1]
        blocks = np.array(own, dtype=np.int32)
        positions.append(position)
        slots.append(blocks[position // block_size - start // block_size] * block_size + position % block_size)
    return np.array(tokens, dtype=np.int32), np.concatenate(positions), np.concatenate(slots)
