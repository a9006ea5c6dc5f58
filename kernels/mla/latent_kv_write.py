"""Write of latent attention's KV (DeepSeek-V2, 2.1): a token's latent, normed, and a rotated key, to the paged cache.

The rotated part of its queries is rotated with it, in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..elementwise.rms_norm import rms_norm_twin
from ..kv.rope_kv_write import load_rotated, rotate_twin

_TILE = 2048  # rotated numbers of queries of a program
_NUM_WARPS = 4


def latent_kv_write(
    q: Tensor, latent: Tensor, key: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Rotate the last P numbers of each query head, in place; store rms_norm(latent) and the rotated key.

    q: [T, N, D + P]; latent: [T, R]; key: [T, P]; norm: [R]; cos_sin: [T, P] float32, as rope_kv_write takes it; cache:
    [num_blocks, block_size, R + P], one layer's, written in place; all but cos_sin of one dtype, last axes contiguous.
    slots: [T] int64, block * block_size + offset; below 0: not stored.
    """
    run = kernel_for(q, latent_kv_write_triton, latent_kv_write_twin)
    run(q, latent, key, norm, eps, cos_sin, cache, slots)


def latent_kv_write_twin(
    q: Tensor, latent: Tensor, key: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    rope = q[..., q.shape[2] - key.shape[1] :]
    rope.copy_(rotate_twin(rope, cos_sin))
    stored = torch.cat((rms_norm_twin(latent, norm, eps), rotate_twin(key[:, None], cos_sin)[:, 0]), dim=1)
    is_stored = slots >= 0
    if not bool(is_stored.all()):
        stored, slots = stored[is_stored], slots[is_stored]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = stored


def latent_kv_write_triton(
    q: Tensor, latent: Tensor, key: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, cache: Tensor, slots: Tensor
) -> None:
    (num_tokens, num_heads, head_dim), rank, rope = q.shape, latent.shape[1], key.shape[1]
    assert latent.shape == (num_tokens, rank) and key.shape == (num_tokens, rope) and norm.shape == (rank,)
    assert rope % 2 == 0 and head_dim >= rope and cache.dim() == 3 and cache.shape[2] == rank + rope
    assert all(t.stride(-1) == 1 and t.dtype == q.dtype for t in (q, latent, key, norm, cache))
    assert cos_sin.shape == (num_tokens, rope) and cos_sin.dtype == torch.float32 and cos_sin.stride(1) == 1
    assert slots.shape == (num_tokens,) and slots.dtype == torch.int64 and slots.is_contiguous()
    rows = max(_TILE // next_power_of_2(rope), 1)
    if num_tokens:
        _latent_kv_write_kernel[(-(-num_tokens * num_heads // rows) + num_tokens,)](
            q,
            latent,
            key,
            norm,
            cos_sin,
            cache,
            slots,
            *q.stride()[:2],
            latent.stride(0),
            key.stride(0),
            cos_sin.stride(0),
            *cache.stride()[:2],
            num_tokens,
            num_heads,
            head_dim - rope,
            rank,
            rope // 2,
            cache.shape[1],
            eps,
            ROWS=rows,
            BLOCK_R=next_power_of_2(rank),
            BLOCK_P=next_power_of_2(rope // 2),
            num_warps=_NUM_WARPS,
        )


@jit
def _latent_kv_write_kernel(
    q: tl.tensor,  # [T, N, nope + 2 half], the last 2 half rotated in place
    latent: tl.tensor,  # [T, rank]
    key: tl.tensor,  # [T, 2 half]
    norm: tl.tensor,  # [rank]
    cos_sin: tl.tensor,  # [T, 2 half] float32
    cache: tl.tensor,  # [num_blocks, block_size, rank + 2 half]
    slots: tl.tensor,  # [T] int64
    q_token_stride: int,
    q_head_stride: int,
    latent_stride: int,
    key_stride: int,
    angle_stride: int,
    cache_block_stride: int,
    cache_slot_stride: int,
    num_tokens: int,
    num_heads: int,
    nope: int,
    rank: int,
    half: int,
    block_size: int,
    eps: float,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid: (ceil(T N / ROWS) + T,): the first programs rotate ROWS query heads each, each other stores a token."""
    num_query_programs = tl.cdiv(num_tokens * num_heads, ROWS)
    d = tl.arange(0, BLOCK_P)[None, :]
    if tl.program_id(0) < num_query_programs:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
        inside = (token < num_tokens) & (d < half)
        place = q + token * q_token_stride + head * q_head_stride + nope + d
        first, second = load_rotated(place, cos_sin + token * angle_stride + d, half, inside)
        tl.store(place, first, mask=inside)
        tl.store(place + half, second, mask=inside)
    else:
        token_to_store = (tl.program_id(0) - num_query_programs).to(tl.int64)
        slot = tl.load(slots + token_to_store)
        if slot >= 0:
            block = slot // block_size
            target = cache + block * cache_block_stride + (slot - block * block_size) * cache_slot_stride
            _store_latent(latent + token_to_store * latent_stride, norm, target, rank, eps, BLOCK_R)
            source, angles = key + token_to_store * key_stride, cos_sin + token_to_store * angle_stride
            one, two = load_rotated(source + d, angles + d, half, d < half)
            tl.store(target + rank + d, one, mask=d < half)
            tl.store(target + rank + half + d, two, mask=d < half)


@jit
def _store_latent(source: tl.tensor, norm: tl.tensor, target: tl.tensor, rank: int, eps: float, BLOCK_R: tl.constexpr):
    """Norm and store one row of `rank` numbers."""
    r = tl.arange(0, BLOCK_R)
    value = tl.load(source + r, mask=r < rank, other=0.0)
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / rank  # pyright: ignore[reportOperatorIssue]
    normed = (wide * (1.0 / tl.sqrt(mean_square + eps))).to(value.dtype).to(tl.float32)
    scale_of = tl.load(norm + r, mask=r < rank, other=0.0).to(tl.float32)
    tl.store(target + r, (normed * scale_of).to(value.dtype), mask=r < rank)
