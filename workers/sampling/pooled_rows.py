"""Rows of a step whose hidden states are pooled into embeddings. No torch."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.embedding import Pooling
from ..core.sequence import ScheduledSequence, Sequence

MAX_PIECE = 1024  # rows that are normed at once


@dataclass(frozen=True, slots=True, eq=False)
class PooledRows:
    """P rows of a step. None of them is sampled."""

    spans: SequenceOf[tuple[Sequence, int]]  # and number of its rows
    rows: NDArray[np.int32]  # [P], ascending, in the order of `spans`

    @classmethod
    def of(cls, entries: SequenceOf[ScheduledSequence]) -> "PooledRows":
        """Pooled rows of a step whose rows are these entries' new tokens, in order."""
        spans: list[tuple[Sequence, int]] = []
        rows: list[NDArray[np.int32]] = []
        first_row = 0
        for entry in entries:
            end, num = first_row + entry.num_new, 0
            match entry.sequence.pooling:
                case Pooling.LAST if entry.start + entry.num_new == entry.sequence.num_tokens:
                    num = 1
                case Pooling.MEAN:
                    num = entry.num_new
                case _:
                    pass
            if num:
                spans.append((entry.sequence, num))
                rows.append(np.arange(end - num, end, dtype=np.int32))
            first_row = end
        return cls(spans, np.concatenate(rows) if rows else np.empty(0, dtype=np.int32))


def pieces_of_pooled(rows: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """The rows, in order, as many at a time as are normed at once."""
    return [rows[first : first + MAX_PIECE] for first in range(0, len(rows), MAX_PIECE)]
