"""Weights that are stored with inputs before outputs, a number, zero point and scale for each group of inputs, as GPTQ
and AWQ have them: a weight is (number - zero point) x scale."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ....kernels.cpu.formats import NumberLayout
from ....kernels.cpu.linear import WeightNumbers
from .stored_weight import StoredNumbers, in_bytes, order_of_groups

OfOutputs = Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True)
class InputsFirst:
    """Reader of such a weight, some outputs at a time."""

    num_inputs: int
    group: int  # inputs that share a scale
    middle: int  # of the numbers, which are stored from 0
    numbers: OfOutputs  # [k, n]
    zeros: OfOutputs  # [groups, n]
    scales: OfOutputs  # float32 [groups, n]
    groups: Callable[[], Tensor | None] = lambda: None  # int64 [k]: the group of each input; None: they are in order

    def rows(self, of: slice) -> Tensor:
        """Decode some outputs: float32 [n, k]."""
        numbers, zeros, scales = self.numbers(of).float(), self.zeros(of).float(), self.scales(of)
        if (groups := self.groups()) is not None:
            return numbers.sub_(zeros[groups]).mul_(scales[groups]).T
        grouped = numbers.unflatten(0, (-1, self.group))
        return grouped.sub_(zeros[:, None]).mul_(scales[:, None]).flatten(0, 1).T

    def order(self) -> Tensor | None:
        """Return the order that StoredNumbers has; None too for groups of unlike sizes, which have none."""
        groups = self.groups()
        return None if groups is None else order_of_groups(groups, self.group)

    def stored(self, layout: NumberLayout | None) -> StoredNumbers | None:
        """layout: of numbers in order; None: the kernels have none. Returns what the kernels are given; None:
        nothing."""
        groups = self.groups()
        if layout is None or (groups is not None and order_of_groups(groups, self.group) is None):
            return None
        own = replace(layout, has_order=groups is not None)
        return StoredNumbers(own, lambda _, of: self._numbers(of, own), self.order)

    def _numbers(self, of: slice, layout: NumberLayout) -> WeightNumbers:
        order = self.order()

        def read(rows: slice) -> Tensor:
            found = (self.numbers(rows) - self.middle).T
            return found if order is None else found[:, order]

        zeros, scales = self.zeros(of), self.scales(of)
        offsets = ((self.middle - zeros) * scales).T.contiguous() if layout.has_offsets else None
        return WeightNumbers(in_bytes(of, self.num_inputs, read), scales.T.contiguous(), offsets, order=order)
