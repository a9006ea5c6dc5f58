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

A group with a number that is not finite, or whose range float32 does not hold, becomes NaN. The Triton kernel stores
bit for bit what the twin does, if nothing of it is fused: it is launched with `enable_fp_fusion=False`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.dependent_launch import dependent_launch, follow_previous
from ..common.lang import jit, kernel_for, next_power_of_2, tl

GROUP = 32  # tokens of a block, and numbers of a group
LARGEST_CODE = 15
SMALLEST = 1e-33  # range of a group below which its numbers are all its least one
_HALF = GROUP // 2
_NUM_WARPS = 4


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

    tail: [num_tail_blocks, 2, 32, K, D] of floats; pool: [num_blocks, 2, K, 20 D] uint8; last axes contiguous. pairs:
    [n, 2] int64: a block of the tail, and the pool's block that it becomes; below 0: none.
    """
    kernel_for(tail, round_blocks_triton, round_blocks_twin)(tail, pool, pairs)


def round_blocks_twin(tail: Tensor, pool: Tensor, pairs: Tensor) -> None:
    pairs = pairs[pairs[:, 0] >= 0]
    if not len(pairs):
        return
    keys, values = tail[pairs[:, 0]].float().unbind(1)  # [n, 32, K, D]
    pool[pairs[:, 1]] = torch.stack((_stored_keys(keys), _stored_values(values)), dim=1)


def round_blocks_triton(tail: Tensor, pool: Tensor, pairs: Tensor) -> None:
    _, _, num_slots, num_kv_heads, dim = tail.shape
    assert num_slots == GROUP and pool.shape[1:] == (2, num_kv_heads, block_bytes(dim)) and pool.dtype == torch.uint8
    assert tail.stride(4) == pool.stride(3) == 1
    assert pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.dtype == torch.int64 and pairs.is_contiguous()
    if len(pairs):
        _round_blocks_kernel[(len(pairs), num_kv_heads, 2)](
            tail,
            pool,
            pool.view(torch.int16),
            pairs,
            *tail.stride()[:4],
            *pool.stride()[:3],
            DIM=dim,
            BLOCK_D=next_power_of_2(dim),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
            **dependent_launch(tail.device),
        )


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


@jit
def _round_blocks_kernel(
    tail: tl.tensor,  # [num_tail_blocks, 2, 32, K, DIM]
    pool: tl.tensor,  # [num_blocks, 2, K, 20 DIM] uint8
    halves: tl.tensor,  # the same bytes, int16
    pairs: tl.tensor,  # [n, 2] int64
    tail_block_stride: int,
    tail_kv_stride: int,
    tail_slot_stride: int,
    tail_head_stride: int,
    pool_block_stride: int,
    pool_kv_stride: int,
    pool_head_stride: int,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (n, K, 2): a program rounds the keys of a block in one head, or the values."""
    follow_previous(PDL)
    pair = pairs + tl.program_id(0).to(tl.int64) * 2
    head, which = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.load(pair)
    if block >= 0:
        slot, d = tl.arange(0, 32)[:, None], tl.arange(0, BLOCK_D)[None, :]
        source = tail + block * tail_block_stride + which * tail_kv_stride + head * tail_head_stride
        numbers = tl.load(source + slot * tail_slot_stride + d, mask=d < DIM, other=0.0).to(tl.float32)
        start = tl.load(pair + 1) * pool_block_stride + which * pool_kv_stride + head * pool_head_stride
        if which == 0:
            _store_keys(pool + start, halves + start // 2, numbers, DIM, BLOCK_D)
        else:
            _store_values(pool + start, halves + start // 2, numbers, DIM, BLOCK_D)


@jit
def _rounded(x: tl.tensor, AXIS: tl.constexpr):
    """Compute what `round_groups` does, of groups along AXIS. Returns codes, int32, and the scales' and least numbers'
    bits, int16 of one along AXIS."""
    is_finite = tl.abs(x) < float("inf")
    x = tl.where(is_finite, x, 0.0)
    lowest = tl.min(x, AXIS, keep_dims=True)
    least = lowest + 0.0  # of zeros, the positive one  # pyright: ignore[reportOperatorIssue]
    bits = least.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits + 0xFFFF, bits) & -65536  # down to a bfloat16
    least = bits.to(tl.float32, bitcast=True)
    extent = tl.max(x, AXIS, keep_dims=True) - least
    is_number = (extent < float("inf")) & (tl.min(is_finite.to(tl.int32), AXIS, keep_dims=True) == 1)
    scale_bits = (tl.div_rn(extent, 15.0).to(tl.int32, bitcast=True) + 0xFFFF) & -65536  # up to a bfloat16
    scale_bits = tl.where(extent < 1e-33, 0, scale_bits)  # SMALLEST
    scale = scale_bits.to(tl.float32, bitcast=True)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    # Beside 1.5 * 2^23 a float32 has no place for fractions.
    codes = ((x - least) * inverse + 12582912.0) - 12582912.0
    codes = tl.where(is_number, codes, 0.0).to(tl.int32)
    scale_bits = tl.where(is_number, scale_bits >> 16, 0x7FC0).to(tl.int16)
    return codes, scale_bits, tl.where(is_number, bits >> 16, 0).to(tl.int16)


@jit
def _store_keys(target: tl.tensor, halves: tl.tensor, keys: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """target: pointer to a head's bytes, halves: the same of two bytes each; keys: [32, BLOCK_D] float32."""
    codes, scales, leasts = _rounded(keys, 0)
    low, high = tl.split(tl.reshape(codes, (32, BLOCK_D // 2, 2)))
    slot, pair, d = tl.arange(0, 32)[:, None], tl.arange(0, BLOCK_D // 2)[None, :], tl.arange(0, BLOCK_D)[None, :]
    place = slot // 16 * (8 * DIM) + pair * 16 + slot % 16
    tl.store(target + place, (low | (high << 4)).to(tl.uint8), mask=pair < DIM // 2)
    tl.store(halves + 8 * DIM + d, scales, mask=d < DIM)
    tl.store(halves + 9 * DIM + d, leasts, mask=d < DIM)


@jit
def _store_values(target: tl.tensor, halves: tl.tensor, values: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Do what `_store_keys` does, of values, [32, BLOCK_D] float32."""
    codes, scales, leasts = _rounded(tl.reshape(values, (32, BLOCK_D // 32, 32)), 2)
    low, high = tl.split(tl.permute(tl.reshape(codes, (32, BLOCK_D // 32, 2, 16)), (0, 1, 3, 2)))
    slot, group = tl.arange(0, 32)[:, None, None], tl.arange(0, BLOCK_D // 32)[None, :, None]
    place = slot * (DIM // 2) + group * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(target + place, (low | (high << 4)).to(tl.uint8), mask=group < DIM // 32)
    tl.store(halves + 8 * DIM + group * 32 + slot, scales, mask=group < DIM // 32)
    tl.store(halves + 9 * DIM + group * 32 + slot, leasts, mask=group < DIM // 32)
