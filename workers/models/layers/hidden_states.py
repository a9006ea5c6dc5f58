"""HiddenStates: what a draft head is given of a step of its target (head_spec.py).

begin (the entries of a step, in the order of its rows)  ->  put, after each layer that is wanted  ->  of the entries
                                                         ->  space, for who writes all of it
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.sequence import ScheduledSequence

SPACE_ROWS = 512  # of steps whose rows are written at once


class TakenRows(NamedTuple):
    """Rows of what was taken."""

    of: Tensor  # [any, A]
    first: int
    num: int

    @property
    def tensor(self) -> Tensor:
        """View of them, [num, A]."""
        return self.of[self.first : self.first + self.num]


class HiddenStates:
    def __init__(self, layers: Sequence[int], *, is_final: bool = False, is_normed: bool = False) -> None:
        """layers: after how many layers the residual is taken, in the order in which a head has them; 0: the
        embeddings. is_final: taken instead is the residual after the last layer, normed where `is_normed`."""
        self.layers, self.is_final, self.is_normed = tuple(layers), is_final, is_normed
        self.entries: Sequence[ScheduledSequence] = ()
        self._taken: dict[int, Tensor] = {}
        self._space, self._first, self._end = torch.empty(0, 0), 0, 0
        self._is_written = False

    def begin(self, entries: Sequence[ScheduledSequence]) -> None:
        self.entries, self._taken, self._is_written = entries, {}, False

    def put(self, num_layers: int, residual: Tensor) -> None:
        """Take the residual after so many layers, [T, H], if it is wanted. It may be overwritten afterwards."""
        if num_layers in self.layers:
            self._taken[num_layers] = residual.clone()

    def put_final(self, hidden: Tensor) -> None:
        """Take the hidden states after the last layer, [T, H]."""
        self._taken[-1] = hidden.clone()

    def space(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Return the address of memory for what is taken of a step's rows, side by side: [num_rows, A], contiguous, to
        be written at once."""
        self._first, self._end, self._is_written = self._end, self._end + num_rows, True
        if self._end > len(self._space):  # what was written before is whoever's has it
            width = max(len(self.layers), 1) * hidden_size
            self._space = torch.empty(max(SPACE_ROWS, num_rows), width, dtype=dtype)
            self._address, self._row_bytes = self._space.data_ptr(), width * dtype.itemsize
            self._first, self._end = 0, num_rows
        return self._address + self._first * self._row_bytes

    @property
    def span(self) -> TakenRows:
        """Place of what was taken of all rows."""
        if self._is_written:
            return TakenRows(self._space, self._first, self._end - self._first)
        rows = self.rows
        return TakenRows(rows, 0, len(rows))

    @property
    def rows(self) -> Tensor:
        """[T, A]: what was taken of each row, side by side."""
        if self._is_written:
            return self.span.tensor
        if self.is_final:
            return self._taken[-1]
        return torch.cat([self._taken[layer] for layer in self.layers], dim=1)
