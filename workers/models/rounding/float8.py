"""FP8 weights: 8-bit floats (e4m3, up to 448; arXiv 2209.05433, section 3), one scale for each output."""

import torch
from torch import Tensor

LARGEST = 448.0


def scales_of(weight: Tensor) -> Tensor:
    """weight: [n, k]. Returns float32 [n, 1]: 0 where a whole row is."""
    return weight.float().abs().amax(dim=1, keepdim=True) / LARGEST


def quantise(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight: [n, k]. Returns float8_e4m3fn [n, k] and its scales, or those given where it is a part of longer rows."""
    scales = scales_of(weight) if scales is None else scales
    numbers = weight.float() / torch.where(scales == 0, 1.0, scales)
    return numbers.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """The inverse, float32 [n, k]."""
    return numbers.float() * scales
