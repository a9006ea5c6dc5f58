"""int4 weights: whole numbers from -8 to 7, a scale for each group of inputs. The twin of kernels/cpu's kInt4.

The weight of the largest magnitude in a group becomes -8, whatever its sign, so that all sixteen values serve; the one
at the far end may be cut off by half a step (as llama.cpp's Q4_0).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.cpu.linear import Format, group_of


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [n, k]. Returns int8 [n, k], and float32 scales [n, groups]: 0 where a whole group is."""
    n, k = weight.shape
    group = group_of(Format.INT4, k)
    groups = pad(weight.float(), (0, -k % group)).view(n, -1, group)
    high, low = groups.amax(dim=2, keepdim=True), groups.amin(dim=2, keepdim=True)
    scales = torch.where(high > -low, high, low) / -8
    q = torch.round(groups / torch.where(scales == 0, 1.0, scales)).clamp_(-8, 7)
    return q.to(torch.int8).view(n, -1)[:, :k].contiguous(), scales.squeeze(2)


def dequantise(q: Tensor, scales: Tensor) -> Tensor:
    """The inverse, float32 [n, k]."""
    k = q.shape[1]
    return q.float() * scales.repeat_interleave(group_of(Format.INT4, k), dim=1)[:, :k]
