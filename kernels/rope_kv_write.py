"""Rotary embedding of queries and keys (Su et al. 2021, half-split form); keys and values go to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .lang import jit, next_power_of_2, tl


def rope_kv_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Rotate q and k; store k and v in one layer of the cache.

    q: [T, N, D]; k, v: [T, K, D], last axis contiguous, of the cache's dtype. cos_sin: [T, D] float32, cos of the D/2
    angles of each token's position, then sin. cache: [num_blocks, 2, block_size, K, D], last axis contiguous, written
    in place. slots: [T] int64, block * block_size + offset. Returns the rotated q, [T, N, D] contiguous.
    """
    run = rope_kv_write_triton if q.is_cuda else rope_kv_write_twin
    return run(q, k, v, cos_sin, cache, slots)


def rope_kv_write_twin(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    block_size = cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    cache[blocks, 0, offsets] = _rotate(k, cos, sin)
    cache[blocks, 1, offsets] = v
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos, sin: [T, 1, D/2] float32. The product is taken in float32 and rounded once."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_kv_write_triton(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    assert all(t.stride(-1) == 1 for t in (q, k, v, cache)) and cos_sin.is_contiguous() and slots.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        _rope_kv_write_kernel[(num_tokens, num_heads + num_kv_heads)](
            q,
            k,
            v,
            cos_sin,
            cache,
            slots,
            out,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *cache.stride()[:4],
            num_heads,
            dim // 2,
            cache.shape[2],
            BLOCK=next_power_of_2(dim // 2),
        )
    return out


@jit
def _rotated(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor):
    one, two = first.to(tl.float32), second.to(tl.float32)
    return (one * cos - two * sin).to(first.dtype), (two * cos + one * sin).to(first.dtype)


@jit
def _rope_kv_write_kernel(
    q: tl.tensor,  # [T, N, 2 half]
    k: tl.tensor,  # [T, K, 2 half]
    v: tl.tensor,  # [T, K, 2 half]
    cos_sin: tl.tensor,  # [T, 2 half] float32 contiguous
    cache: tl.tensor,  # [num_blocks, 2, block_size, K, 2 half]
    slots: tl.tensor,  # [T] int64
    out: tl.tensor,  # [T, N, 2 half] contiguous
    q_token_stride: int,
    q_head_stride: int,
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    cache_block_stride: int,
    cache_kv_stride: int,
    cache_slot_stride: int,
    cache_head_stride: int,
    num_heads: int,
    half: int,
    block_size: int,
    BLOCK: tl.constexpr,
):
    """Grid: (T, N + K): a program rotates one query head, or rotates and stores one key head with its value."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < half
    cos = tl.load(cos_sin + token * 2 * half + d, mask=inside, other=0.0)
    sin = tl.load(cos_sin + token * 2 * half + half + d, mask=inside, other=0.0)
    if head < num_heads:
        source = q + token * q_token_stride + head * q_head_stride + d
        target = out + (token * num_heads + head) * 2 * half + d
        first, second = _rotated(
            tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0), cos, sin
        )
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
    else:
        kv_head = head - num_heads
        slot = tl.load(slots + token)
        target = cache + slot // block_size * cache_block_stride + slot % block_size * cache_slot_stride
        target += kv_head * cache_head_stride + d
        source = k + token * k_token_stride + kv_head * k_head_stride + d
        first, second = _rotated(
            tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0), cos, sin
        )
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
        source = v + token * v_token_stride + kv_head * v_head_stride + d
        target += cache_kv_stride
        tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
        tl.store(target + half, tl.load(source + half, mask=inside, other=0.0), mask=inside)
