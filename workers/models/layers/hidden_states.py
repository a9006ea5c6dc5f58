"""HiddenStates: what a draft head is given of a step of its target (head_spec.py).

begin (the entries of a step, in the order of its rows)  ->  put, after each layer that is wanted  ->  of the entries
                                                         ->  space, for who writes all of it
                                                         ->  put_rows, where parts of a step have buffers of their own
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.sequence import ScheduledSequence

SPACE_BYTES = 96 << 10  # for steps whose rows are written at once: so much an allocator takes from what it has


class HiddenStates:
    def __init__(self, layers: Sequence[int], *, is_final: bool = False, is_normed: bool = False) -> None:
        """layers: after how many layers the residual is taken, in the order in which a head has them; 0: the
        embeddings. is_final: taken instead is the residual after the last layer, normed where `is_normed`."""
        self.layers, self.is_final, self.is_normed = tuple(layers), is_final, is_normed
        self.entries: Sequence[ScheduledSequence] = ()
        self._taken: dict[int, Tensor] = {}
        self._width, self._dtype, self._row_bytes = 0, torch.float32, 0
        self._space, self._num_rows, self._first, self._end, self._address = torch.empty(0, 0), 0, 0, 0, 0
        self._is_written = False
        self._rows: Tensor | None = None

    def begin(self, entries: Sequence[ScheduledSequence]) -> None:
        self.entries, self._is_written, self._rows = entries, False, None
        if self._taken:
            self._taken = {}

    def put(self, num_layers: int, residual: Tensor) -> None:
        """Take the residual after so many layers, [T, H], if it is wanted. It may be overwritten afterwards."""
        if num_layers in self.layers:
            self._taken[num_layers] = residual.clone()

    def put_final(self, hidden: Tensor) -> None:
        """Take the hidden states after the last layer, [T, H]."""
        self._taken[-1] = hidden.clone()

    def put_rows(self, rows: Tensor) -> None:
        """Take what other objects have taken of all rows of a step, [T, A]."""
        self._rows = rows

    @property
    def alike(self) -> "HiddenStates":
        """Another one, which takes the same."""
        return HiddenStates(self.layers, is_final=self.is_final, is_normed=self.is_normed)

    @property
    def num_parts(self) -> int:
        """Number of residuals that are taken of a row."""
        return 1 if self.is_final else len(self.layers)

    def copy(self, num_layers: int, residual: Tensor, normed: Tensor | None, taken: Tensor) -> None:
        """Copy the residual after so many layers, [T, H], to its place in `taken`, [T, A], if it is wanted. normed:
        [T, H], after the final norm; None: these are not all layers."""
        if self.is_final:
            if normed is not None:
                taken.copy_(normed if self.is_normed else residual)
        elif num_layers in self.layers:
            first = self.layers.index(num_layers) * residual.shape[1]
            taken[:, first : first + residual.shape[1]].copy_(residual)

    def reserve(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Say what `space` is for: hidden states of `hidden_size` numbers of `dtype`."""
        self._width, self._dtype = max(len(self.layers), 1) * hidden_size, dtype
        self._row_bytes = self._width * dtype.itemsize

    def space(self, num_rows: int) -> int:
        """Return the address of memory for what is taken of a step's rows, side by side: [num_rows, A], contiguous, to
        be written at once. It is called once a token."""
        first = self._first = self._end
        self._end = first + num_rows
        self._is_written = True
        if self._end > self._num_rows:  # what was written before is whoever's has it
            self._num_rows = max(SPACE_BYTES // self._row_bytes, num_rows)
            self._space = torch.empty(self._num_rows, self._width, dtype=self._dtype)
            self._address = self._space.data_ptr()
            first, self._first, self._end = 0, 0, num_rows
        return self._address + first * self._row_bytes

    @property
    def place(self) -> tuple[Tensor, int]:
        """Tensor [any, A] that has `rows`, and the first of them."""
        return (self._space, self._first) if self._is_written else (self.rows, 0)

    @property
    def rows(self) -> Tensor:
        """[T, A]: what was taken of each row, side by side."""
        if self._is_written:
            return self._space[self._first : self._end]
        if self._rows is not None:
            return self._rows
        if self.is_final:
            return self._taken[-1]
        return torch.cat([self._taken[layer] for layer in self.layers], dim=1)
