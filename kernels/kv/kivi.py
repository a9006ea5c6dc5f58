"""KV in 4 bits as KIVI keeps it (Liu et al. 2024, section 3.2): keys by channel, values by token, of whole blocks.

Tokens of a block wait in the tail, at full width, until the block is full; then it is rounded into the pool:

    tail    [num_tail_blocks, 2, 32, K, D]   float32 or bfloat16
    pool    [num_blocks, 2, K, 20 D] uint8   K and V of a block, of each head 20 D bytes

Of keys, each channel's 32 numbers are a group; of values, each 32 numbers of a token. A number is code * scale + least,
with code 0 to 15; least and scale are bfloat16, of the group. The 20 D bytes of one head are:

    keys     codes [2][D / 2][16 slots], scales [D], leasts [D]
             byte (h, j, i), of slot 16 h + i, has number 2 j in its low four bits, 2 j + 1 in the high ones
    values   codes [32 slots][D / 2], scales [D / 32][32 slots], leasts [D / 32][32 slots]
             byte 16 g + i of a slot has number 32 g + i in its low four bits, 32 g + 16 + i in the high ones

A group with a number that is not finite, or whose range float32 does not hold, becomes NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # tokens of a block, and numbers of a group
LARGEST_CODE = 15
SMALLEST = 1e-33  # range of a group below which its numbers are all its least one
_HALF = GROUP // 2


class Rounded(NamedTuple):
    codes: Tensor  # [..., 32] uint8
    scales: Tensor  # [...] bfloat16
    leasts: Tensor  # [...] bfloat16


def block_bytes(head_dim: int) -> int:
    """Number of bytes of a block's keys, or values, of one head."""
    assert head_dim % GROUP == 0
    return 20 * head_dim


def round_blocks(tail: Tensor, pool: Tensor, pairs: Tensor) -> None:
    """Round full blocks of the tail into blocks of the pool.

    tail: [num_tail_blocks, 2, 32, K, D] float32 or bfloat16. pool: [num_blocks, 2, K, 20 D] uint8, its last axis
    contiguous. pairs: [n, 2] int64: a block of the tail, and the pool's block that it becomes.
    """
    if not len(pairs):
        return
    keys, values = tail[pairs[:, 0]].float().unbind(1)  # [n, 32, K, D]
    pool[pairs[:, 1]] = torch.stack((_stored_keys(keys), _stored_values(values)), dim=1)


def widen_blocks(pool: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """pool: [num_blocks, 2, K, 20 D] uint8; blocks: [n] int64. Returns keys and values, each [n * 32, K, D] float32."""
    keys, values = pool[blocks].unbind(1)  # [n, K, 20 D]
    return _widened_keys(keys), _widened_values(values)


def round_groups(x: Tensor) -> Rounded:
    """x: [..., 32] float32, a group in its last axis."""
    least = x.amin(-1) + 0.0  # of zeros, the positive one
    bits = least.view(torch.int32)
    least = (torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32)  # down to a bfloat16
    extent = x.amax(-1) - least
    is_number = extent < torch.inf
    exact = extent / torch.full_like(extent, LARGEST_CODE)  # divided, and rounded, once
    scale = (exact.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)  # up to a bfloat16
    scale = torch.where(extent < SMALLEST, 0.0, scale)
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
    codes = ((x - least[..., None]) * inverse[..., None]).round()
    codes = torch.where(is_number[..., None], codes, 0.0).to(torch.uint8)
    scale, least = torch.where(is_number, scale, torch.nan), torch.where(is_number, least, 0.0)
    return Rounded(codes, _first_half(scale), _first_half(least))


def _first_half(x: Tensor) -> Tensor:
    """x: float32 that bfloat16 holds. Returns these, NaN with the same bits everywhere."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _stored_keys(keys: Tensor) -> Tensor:
    """keys: [n, 32, K, D] float32. Returns [n, K, 20 D] uint8."""
    codes, scales, leasts = round_groups(keys.permute(0, 2, 3, 1))
    packed = codes[:, :, 0::2] | codes[:, :, 1::2] << 4  # [n, K, D / 2, 32]
    return _joined(packed.unflatten(3, (2, _HALF)).transpose(2, 3), scales, leasts)


def _stored_values(values: Tensor) -> Tensor:
    """values: [n, 32, K, D] float32. Returns [n, K, 20 D] uint8."""
    codes, scales, leasts = round_groups(values.transpose(1, 2).unflatten(3, (-1, GROUP)))  # [n, K, 32, D / 32]
    packed = codes[..., :_HALF] | codes[..., _HALF:] << 4
    return _joined(packed, scales.transpose(2, 3), leasts.transpose(2, 3))


def _joined(codes: Tensor, scales: Tensor, leasts: Tensor) -> Tensor:
    """Each [n, K, ...]. Returns their bytes, [n, K, 20 D] uint8."""
    parts = codes, scales.contiguous().view(torch.uint8), leasts.contiguous().view(torch.uint8)
    return torch.cat([part.flatten(2) for part in parts], dim=2)


def _parted(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """stored: [n, K, 20 D] uint8. Returns codes [n, K, 16 D] uint8, and scales and leasts, [n, K, D] float32."""
    dim = stored.shape[2] // 20
    codes, *halves = stored.split([16 * dim, 2 * dim, 2 * dim], dim=2)
    scales, leasts = (half.contiguous().view(torch.bfloat16).float() for half in halves)
    return codes, scales, leasts


def _widened_keys(stored: Tensor) -> Tensor:
    codes, scales, leasts = _parted(stored)
    packed = codes.unflatten(2, (2, -1, _HALF)).transpose(2, 3).flatten(3)  # [n, K, D / 2, 32]
    numbers = torch.stack((packed & 15, packed >> 4), dim=3).flatten(2, 3).float()  # [n, K, D, 32]
    return (numbers * scales[..., None] + leasts[..., None]).permute(0, 3, 1, 2).flatten(0, 1)


def _widened_values(stored: Tensor) -> Tensor:
    codes, scales, leasts = _parted(stored)
    packed = codes.unflatten(2, (GROUP, -1, _HALF))  # [n, K, 32, D / 32, 16]
    numbers = torch.cat((packed & 15, packed >> 4), dim=4).float()
    scales, leasts = (each.unflatten(2, (-1, GROUP)).transpose(2, 3)[..., None] for each in (scales, leasts))
    return (numbers * scales + leasts).flatten(3).transpose(1, 2).flatten(0, 1)
