"""HiddenStates: what a draft head is given of a step of its target (head_spec.py).

begin (the entries of a step, in the order of its rows)  ->  put, after each layer that is wanted  ->  of the entries
                                                         ->  space, for who writes all of it
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.sequence import ScheduledSequence


class HiddenStates:
    def __init__(self, layers: Sequence[int], *, is_final: bool = False, is_normed: bool = False) -> None:
        """layers: after how many layers the residual is taken, in the order in which a head has them; 0: the
        embeddings. is_final: taken instead is the residual after the last layer, normed where `is_normed`."""
        self.layers, self.is_final, self.is_normed = tuple(layers), is_final, is_normed
        self.entries: Sequence[ScheduledSequence] = ()
        self._taken: dict[int, Tensor] = {}
        self._written: Tensor | None = None

    def begin(self, entries: Sequence[ScheduledSequence]) -> None:
        self.entries, self._taken, self._written = entries, {}, None

    def put(self, num_layers: int, residual: Tensor) -> None:
        """Take the residual after so many layers, [T, H], if it is wanted. It may be overwritten afterwards."""
        if num_layers in self.layers:
            self._taken[num_layers] = residual.clone()

    def put_final(self, hidden: Tensor) -> None:
        """Take the hidden states after the last layer, [T, H]."""
        self._taken[-1] = hidden.clone()

    def space(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Return memory for what is taken of a step's rows, side by side: [num_rows, A], to be written at once."""
        self._written = torch.empty(num_rows, max(len(self.layers), 1) * hidden_size, dtype=dtype)
        return self._written

    @property
    def rows(self) -> Tensor:
        """[T, A]: what was taken of each row, side by side."""
        if self._written is not None:
            return self._written
        if self.is_final:
            return self._taken[-1]
        return torch.cat([self._taken[layer] for layer in self.layers], dim=1)
