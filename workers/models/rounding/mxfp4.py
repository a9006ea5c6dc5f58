"""MXFP4 weights (OCP Microscaling Formats v1.0, section 5): 4-bit floats, a power of two for each 32 inputs.

The power is the one of two that leaves the smaller squared error: that of the specification (section 6.3), under which
what is largest may be cut off at 6, or the next one, under which nothing is.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import e2m1

GROUP = 32
BIAS, MOST = 127, 254  # of exponents as they are stored (E8M0)
_LARGEST_EXPONENT = 2  # of a number: 6 is 1.5 x 2^2


def scales_of(weight: Tensor) -> Tensor:
    """weight: [n, k]. Returns float32 powers of two [n, groups]: 2^-127 where a whole group is 0."""
    groups = _in_groups(weight)
    largest = groups.abs().amax(dim=2)
    exponents = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT  # frexp's mantissa is below 1
    exponents = torch.where(largest == 0, -BIAS, exponents).clamp(-BIAS, MOST - BIAS - 1)
    lower, upper = _power(exponents), _power(exponents + 1)
    error = [(_rounded(groups, scales) - groups).square().sum(dim=2) for scales in (lower, upper)]
    return torch.where((error[1] < error[0]) & (largest > 0), upper, lower)


def quantise(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight: [n, k]. Returns uint8 [n, k], a number each as e2m1.py has them, and its scales, or those given where it
    is a part of longer rows."""
    scales = scales_of(weight) if scales is None else scales
    n, k = weight.shape
    codes = e2m1.nearest(_divided(_in_groups(weight), scales))
    return codes.view(n, -1)[:, :k].contiguous(), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, float32 [n, k]."""
    return e2m1.values(codes) * scales.repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]


def exponents_of(scales: Tensor) -> Tensor:
    """scales: float32 powers of two. Returns uint8, E8M0."""
    return (torch.frexp(scales).exponent - 1 + BIAS).to(torch.uint8)


def _power(exponents: Tensor) -> Tensor:
    """exponents: int32. Returns float32 2^exponents, exact."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    """groups: float32 [n, groups, 32]; scales: [n, groups]. Returns what rounding leaves of them."""
    return e2m1.values(e2m1.nearest(_divided(groups, scales))) * scales[:, :, None]


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    return groups / scales[:, :, None]


def _in_groups(weight: Tensor) -> Tensor:
    """[n, k] -> float32 [n, groups, 32], zeros after the last."""
    n, k = weight.shape
    return pad(weight.float(), (0, -k % GROUP)).view(n, -1, GROUP)
