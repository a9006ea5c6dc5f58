"""KV caches of 8-bit and 4-bit numbers: what is stored, and the scale beside each vector.

    cache    [num_blocks, 2, block_size, K, D]  int8 or float8; of 4 bits uint8, [..., D / 2]
    scales   [num_blocks, 2, block_size, K]     float32 or bfloat16, one for each vector of D numbers, of any strides:
             on a GPU the owner lays the slots of a head side by side ([num_blocks, 2, K, block_size], transposed)

Where both are in one pool, a layer of a block has, of the numbers' dtype, [2, block_size, K, 2 + D]: the bytes of a
vector's scale, a bfloat16, then its numbers (`parts_of`). Or, on a GPU, all numbers, [2, block_size, K, D], then the
bytes of all scales, [2, K, block_size] (`parts_of_pieces`): so 16 bytes of a vector's numbers can be loaded at once.

A number is `stored * scale`; scale = the largest magnitude of the vector / LARGEST, rounded up to a bfloat16: tokens
that are written later change none that were written before. Vectors whose numbers are all below TINY are stored as
zeros with a scale of zero. 4-bit numbers are odd ones, -15 to 15, of a vector's Hadamard transform, for which
workers/kv/dtypes.py says why; byte i has the numbers i, in its low bits, and i + D / 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.lang import jit, tl

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.uint8: 15.0}
FLOAT8_CAPABILITY = 8, 9
SCALE_BYTES = 2
TINY = 1e-33  # LARGEST / TINY is a float32


class KVParts(NamedTuple):
    """KV as kernels take it: views of a pool, or of a part of one."""

    numbers: Tensor  # [..., V, block_size, K, D]; D / 2 of 4-bit ones
    scales: Tensor | None  # [..., V, block_size, K] bfloat16 of 8-bit and 4-bit numbers


def parts_of(cache: Tensor) -> KVParts:
    """cache: [..., D], or of 8-bit numbers [..., 2 + D], as a layer of a pool. Returns views. D must be even."""
    if cache.dtype not in LARGEST:
        return KVParts(cache, None)
    return KVParts(cache[..., SCALE_BYTES:], cache[..., :SCALE_BYTES].view(torch.bfloat16)[..., 0])


def parts_of_pieces(pieces: Tensor, shape: tuple[int, int, int, int]) -> KVParts:
    """pieces: [..., bytes] of 8-bit numbers, layers of blocks of which the scales are last; shape: V, block_size, K and
    D of one. Returns views. The bytes of its numbers must be even, and so must be the strides of the pieces."""
    vectors, block_size, heads, dim = shape
    numbers, scales = pieces.split([vectors * block_size * heads * dim, vectors * block_size * heads * SCALE_BYTES], -1)
    by_head = scales.view(torch.bfloat16).unflatten(-1, (vectors, heads, block_size))
    return KVParts(numbers.unflatten(-1, shape), by_head.transpose(-2, -1))


def can_store(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels on the device can round numbers to this dtype: Triton has none for float8_e4m3fn on older
    GPUs of NVIDIA's."""
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def largest_of(cache: Tensor, scales: Tensor | None) -> float:
    """LARGEST of a cache with scales, 0 of one without them. They must fit each other."""
    if scales is None:
        assert cache.dtype not in LARGEST
        return 0.0
    assert scales.shape == cache.shape[:-1] and scales.device == cache.device
    assert scales.dtype in (torch.float32, torch.bfloat16)
    return LARGEST[cache.dtype]


def numbers_in(dtype: torch.dtype) -> int:
    """Number of a vector's numbers that an element of a cache of this dtype holds."""
    return 2 if dtype == torch.uint8 else 1


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [..., D] of floats. Returns (stored [..., D] of `dtype`, or [..., D / 2] uint8, scales [...] float32)."""
    wide = hadamard(x.float()) if dtype == torch.uint8 else x.float()
    magnitude = wide.abs().amax(dim=-1, keepdim=True)
    is_zero, largest = magnitude < TINY, torch.full_like(magnitude, LARGEST[dtype])  # divided, and rounded, once
    scale = ((magnitude / largest).view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)  # up to a bfloat16
    inverse = torch.where(is_zero, 0.0, torch.ones_like(scale) / scale)
    scaled = wide * inverse
    if dtype == torch.uint8:
        codes = (scaled * 0.5).floor().int() + 8 & 15
        first, second = codes.chunk(2, dim=-1)
        stored = (first | second << 4).to(torch.uint8)
    else:
        stored = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return stored, torch.where(is_zero, 0.0, torch.where(magnitude.isnan(), torch.nan, scale)).squeeze(-1)


def dequantise(stored: Tensor, scales: Tensor) -> Tensor:
    """stored: [..., D], or [..., D / 2] uint8; scales: [...] float32 or bfloat16. Returns [..., D] float32."""
    if stored.dtype != torch.uint8:
        return stored.float() * scales[..., None]
    codes = torch.cat((stored & 15, stored >> 4), dim=-1)
    values = (codes.float() * 2 - 15) * scales[..., None].float()
    return hadamard(values) / transform_size(values.shape[-1])


def transform_size(dim: int) -> int:
    """Number of neighbours that a Hadamard transform is taken of at a time."""
    return dim // 2 & -(dim // 2)


def hadamard(x: Tensor) -> Tensor:
    """Hadamard transform of each `transform_size` neighbours, in Sylvester's order, not divided by anything. x:
    [..., D] float32. A sum's terms are added in one order, the nearest first."""
    size, at = transform_size(x.shape[-1]), 1
    while at < size:
        first, second = x.unflatten(-1, (-1, 2, at)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).view(x.shape)
        at *= 2
    return x


@jit
def scale_and_inverse(magnitude: tl.tensor, LARGEST_STORED: tl.constexpr):
    """magnitude: float32, the largest of each vector. What its stored numbers are multiplied by, and its numbers.

    Bit for bit what `quantise` has, if nothing of it is fused: launch with `enable_fp_fusion=False`.
    """
    is_zero = magnitude < 1e-33  # TINY
    scale = tl.div_rn(tl.where(is_zero, 1.0, magnitude), LARGEST_STORED)
    scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)  # up to a bfloat16
    scale = tl.where(scale > 0.0, scale, magnitude)  # NaN stays NaN, whatever its bits
    return tl.where(is_zero, 0.0, scale), tl.where(is_zero, 0.0, tl.div_rn(1.0, scale))


@jit
def to_stored(x: tl.tensor, inverse: tl.tensor, LARGEST_STORED: tl.constexpr):
    """Numbers as they are stored, float32: whole where int8 is (to nearest, ties to even). A store rounds to float8."""
    scaled = x.to(tl.float32) * inverse
    if LARGEST_STORED == 127.0:
        # Beside 1.5 * 2^23 a float32 has no place for fractions.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled
