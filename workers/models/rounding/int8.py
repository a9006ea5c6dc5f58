"""int8 weights: whole numbers from -127 to 127, one scale for each output. The twin of kernels/cpu's kInt8."""

import torch
from torch import Tensor


def scales_of(weight: Tensor) -> Tensor:
    """weight: [n, k]. Returns float32 [n, 1]: 0 where a whole row is."""
    return weight.float().abs().amax(dim=1, keepdim=True) / 127


def quantise(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight: [n, k]. Returns int8 [n, k] and its scales, or those given where it is a part of longer rows."""
    scales = scales_of(weight) if scales is None else scales
    q = torch.round(weight.float() / torch.where(scales == 0, 1.0, scales))
    return q.clamp_(-127, 127).to(torch.int8), scales


def dequantise(q: Tensor, scales: Tensor) -> Tensor:
    """The inverse, float32 [n, k]."""
    return q.float() * scales
