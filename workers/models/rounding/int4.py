"""int4 weights: whole numbers from -8 to 7, a scale for each group of inputs. The twin of kernels/cpu's kInt4.

The weight of the largest magnitude in a group becomes -8, whatever its sign, so that all sixteen values serve; the one
at the far end may be cut off by half a step (as llama.cpp's Q4_0).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....kernels.cpu.formats import Format, group_of


def scales_of(weight: Tensor) -> Tensor:
    """weight: [n, k]. Returns float32 [n, groups]: 0 where a whole group is."""
    groups = _in_groups(weight)
    high, low = groups.amax(dim=2), groups.amin(dim=2)
    return torch.where(high > -low, high, low) / -8


def quantise(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight: [n, k]. Returns int8 [n, k] and its scales, or those given where it is a part of longer rows."""
    n, k = weight.shape
    scales = scales_of(weight) if scales is None else scales
    q = torch.round(_in_groups(weight) / torch.where(scales == 0, 1.0, scales)[:, :, None]).clamp_(-8, 7)
    return q.to(torch.int8).view(n, -1)[:, :k].contiguous(), scales


def dequantise(q: Tensor, scales: Tensor) -> Tensor:
    """The inverse, float32 [n, k]."""
    k = q.shape[1]
    return q.float() * scales.repeat_interleave(group_of(Format.INT4, k), dim=1)[:, :k]


def _in_groups(weight: Tensor) -> Tensor:
    """[n, k] -> float32 [n, groups, group], zeros after the last."""
    n, k = weight.shape
    group = group_of(Format.INT4, k)
    return pad(weight.float(), (0, -k % group)).view(n, -1, group)
