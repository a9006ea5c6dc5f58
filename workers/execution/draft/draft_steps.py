"""Steps of a model that drafts: rows of some sequences, written as a Step."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from ...core.sequence import SampledRow, Sequence
from ...models.layers.step import Step


@dataclass(frozen=True, slots=True)
class Rows:
    """New tokens of S sequences, of which those with one new token come first; all are sampled after their last token,
    or none is."""

    sequences: list[Sequence]
    starts: list[int]  # position of each one's first new token
    token_ids: list[list[int]]  # of each, its new tokens
    sampled: list[SampledRow]

    @property
    def num_new(self) -> list[int]:
        return [len(each) for each in self.token_ids]


class DraftTables:
    """Block tables of sequences, for several steps in which no block is added."""

    def __init__(self, sequences: SequenceOf[Sequence], block_size: int) -> None:
        self._block_size = block_size
        self._rows = {sequence.key: row for row, sequence in enumerate(sequences)}
        width = max(len(sequence.block_table) for sequence in sequences)
        self._tables = np.zeros((len(sequences), width), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            self._tables[row, : len(sequence.block_table)] = sequence.block_table

    def step(self, rows: Rows, num_further: int = 0) -> Step:
        """num_further: tokens of each sequence that its table has blocks for, beyond the new ones."""
        num_new = np.array(rows.num_new, dtype=np.int32)
        context_lens = num_new + np.array(rows.starts, dtype=np.int32)
        of = [self._rows[sequence.key] for sequence in rows.sequences]
        width = -(-(int(context_lens.max()) + num_further) // self._block_size)
        sampled = np.cumsum(num_new, dtype=np.int32) - 1 if rows.sampled else np.empty(0, dtype=np.int32)
        token_ids = np.array([token_id for each in rows.token_ids for token_id in each], dtype=np.int32)
        return Step(num_new, context_lens, self._tables[of, :width], token_ids, sampled)
