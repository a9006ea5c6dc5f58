"""Numbers of a weight as the compiled kernels pack them, and what they mean: the twin of kernels/cpu's formats."""

import torch
from torch import Tensor

from ....kernels.cpu.formats import Format, NumberLayout
from ....kernels.cpu.linear import WeightNumbers


def meant(of: WeightNumbers, layout: NumberLayout) -> Tensor:
    """Return the weights, float32 [n, k]."""
    groups = torch.arange(of.numbers.shape[1]) // layout.group
    match layout.format:
        case Format.TABLE4:
            assert of.table is not None
            wide = of.table[(of.numbers & 15).int()]
        case Format.FP8:
            wide = of.numbers.view(torch.float8_e4m3fn).float()
        case _:
            wide = of.numbers.float()
    wide = wide * of.scales[:, groups]
    return wide if of.offsets is None else wide + of.offsets[:, groups]


def regrouped(of: Tensor, group: int, inputs: range, new_group: int) -> Tensor:
    """Return numbers for each `new_group` of `inputs` alone, contiguous. of: [n, groups], those for each `group` inputs
    of whole rows."""
    firsts = torch.arange(inputs.start, inputs.stop, new_group)
    return of[:, firsts // group].contiguous()
