"""HiddenStates: what a draft head is given of a step of its target (head_spec.py).

begin (the entries of a step, in the order of its rows)  ->  put, after each layer that is wanted  ->  of the entries

On a device a step is computed in parts, each into buffers of its own (columns), which are put together at its end.
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
        self._rows: Tensor | None = None

    def begin(self, entries: Sequence[ScheduledSequence]) -> None:
        self.entries, self._taken, self._rows = entries, {}, None

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

    @property
    def rows(self) -> Tensor:
        """[T, A]: what was taken of each row, side by side."""
        if self._rows is not None:
            return self._rows
        if self.is_final:
            return self._taken[-1]
        return torch.cat([self._taken[layer] for layer in self.layers], dim=1)
