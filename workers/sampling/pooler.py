"""Hidden states of a step's pooled rows to their sums, a piece of the rows at a time."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.sequence import Sequence
from .pooled_rows import PooledRows


class Pooler:
    """Sums the hidden states of one step, of each sequence alone. They stay on their device until `results`."""

    def __init__(self, rows: PooledRows) -> None:
        self._spans = rows.spans
        self._left = [num for _, num in rows.spans]  # rows that did not come yet
        self._span = 0  # whose rows come next
        self._sums: list[Tensor] = []  # of the spans so far, [H] float64

    def add(self, hidden: Tensor) -> None:
        """hidden: [r, H], after the last norm, of the next r rows."""
        first = 0
        while first < len(hidden):
            num = min(self._left[self._span], len(hidden) - first)
            total = hidden[first : first + num].sum(dim=0, dtype=torch.float64)
            if len(self._sums) > self._span:
                self._sums[self._span] += total
            else:
                self._sums.append(total)
            self._left[self._span] -= num
            self._span += self._left[self._span] == 0
            first += num

    def results(self) -> list[tuple[Sequence, NDArray[np.float64]]]:
        """Return the sum of each sequence, once all rows were added."""
        assert self._span == len(self._spans)
        if not self._sums:
            return []
        sums = torch.stack(self._sums).cpu().numpy()
        return [(sequence, total) for (sequence, _), total in zip(self._spans, sums, strict=True)]
