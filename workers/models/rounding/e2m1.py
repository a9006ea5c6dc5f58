"""4-bit floats (E2M1; OCP Microscaling Formats v1.0, section 5.3.3): a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""

import torch
from torch import Tensor

from ....kernels.gemm.packed_weight import E2M1_MAGNITUDES

VALUES = torch.tensor(E2M1_MAGNITUDES)
LARGEST = 6.0
# Between neighbours; a number in the middle goes to the one whose mantissa is even: up where the lower one's is odd.
_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_UP = torch.tensor([False, True, False, True, False, True, False])
_LIMITS = torch.where(_UP, torch.nextafter(_MIDDLES, torch.tensor(0.0)), _MIDDLES)


def nearest(numbers: Tensor) -> Tensor:
    """numbers: float32. Returns uint8 of the same shape, from 0 to 15: bit 3 the sign, the others of VALUES. What is
    larger than 6 becomes 6."""
    codes = torch.bucketize(numbers.abs(), _LIMITS.to(numbers.device), out_int32=True)
    return (codes + 8 * numbers.signbit()).to(torch.uint8)


def values(codes: Tensor) -> Tensor:
    """codes: uint8, as `nearest` returns them. Returns float32."""
    magnitudes = VALUES.to(codes.device)[(codes & 7).int()]
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def pack(codes: Tensor) -> Tensor:
    """codes: uint8 [n, k], k even. Returns uint8 [n, k / 2]: neighbours in a byte, the first in its low bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4
