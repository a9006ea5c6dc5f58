"""Rotary embedding of queries and keys (Su et al. 2021, half-split form); keys and values go to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.dependent_launch import dependent_launch, follow_previous, prefetch_lines
from ..common.lang import jit, kernel_for, next_power_of_2, tl
from .int4_tiles import packed, transformed
from .kv_scales import largest_of, numbers_in, quantise, scale_and_inverse, to_stored, transform_size

_TILE = 2048  # numbers of a program: several heads, of several tokens where these have few
_NUM_WARPS = 4


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> Tensor:
    """Rotate q and k; store k and v in one layer of the cache.

    q: [T, N, D]; k, v: [T, K, D]; cos_sin: [T, D] float32, cos of the D/2 angles of each token's position, then sin;
    last axes contiguous. cache: [num_blocks, 2, block_size, K, D], last axis contiguous, written in place, of the dtype
    of k and v, or of 8 or 4 bits (then D / 2 bytes, D a multiple of 4) and with `scales` (see kv_scales.py). slots: [T]
    int64, block * block_size + offset; below 0: not stored. Returns the rotated q, [T, N, D] contiguous.
    """
    run = kernel_for(q, rope_kv_write_triton, rope_kv_write_twin)
    return run(q, k, v, cos_sin, cache, slots, scales)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos_sin: [T, D] float32; as rope_kv_write has q, and last axes contiguous. The product is taken
    in float32 and rounded once. Returns a new contiguous tensor."""
    return kernel_for(x, rotate_triton, rotate_twin)(x, cos_sin)


def rope_kv_write_twin(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> Tensor:
    rotated = rotate_twin(k, cos_sin)
    stored = slots >= 0
    if not bool(stored.all()):
        rotated, v, slots = rotated[stored], v[stored], slots[stored]
    blocks, offsets = slots // cache.shape[2], slots % cache.shape[2]
    for which, vectors in ((0, rotated), (1, v)):
        if scales is None:
            cache[blocks, which, offsets] = vectors
        else:
            cache[blocks, which, offsets], own = quantise(vectors, cache.dtype)
            scales[blocks, which, offsets] = own.to(scales.dtype)
    return rotate_twin(q, cos_sin)


def rotate_twin(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_kv_write_triton(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> Tensor:
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, dim) and dim % 2 == 0
    numbers = numbers_in(cache.dtype)  # of a byte of 4-bit ones: neither half of a vector ends within one
    assert cache.dim() == 5 and cache.shape[1] == 2 and cache.shape[3:] == (num_kv_heads, dim // numbers)
    assert dim // 2 % numbers == 0
    assert all(t.stride(-1) == 1 for t in (q, k, v, cache))
    assert cos_sin.shape == (num_tokens, dim) and cos_sin.dtype == torch.float32 and cos_sin.stride(1) == 1
    assert slots.shape == (num_tokens,) and slots.dtype == torch.int64 and slots.is_contiguous()
    assert q.dtype == k.dtype == v.dtype and (scales is not None or cache.dtype == q.dtype)
    largest = largest_of(cache, scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = next_power_of_2(dim // 2)
    rows = max(_TILE // (2 * block), 1)
    if num_tokens:
        _rope_kv_write_kernel[(-(-num_tokens * num_heads // rows) + -(-num_tokens * num_kv_heads // rows),)](
            q,
            k,
            v,
            cos_sin,
            cache,
            cache if scales is None else scales,
            slots,
            out,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos_sin.stride(0),
            *cache.stride()[:4],
            *((0, 0, 0, 0) if scales is None else scales.stride()),
            num_tokens,
            num_heads,
            num_kv_heads,
            dim // 2,
            cache.shape[2],
            LARGEST=largest,
            TRANSFORM=transform_size(dim) if numbers == 2 else 0,
            ROWS=rows,
            BLOCK=block,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=scales is None,  # numbers of few bits are the same ones, whoever rounds them
            **dependent_launch(q.device),
        )
    return out


def rotate_triton(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Queries beside no keys."""
    no_keys, no_cache = x[:, :0], x.new_empty(1, 2, 1, 0, x.shape[2])
    slots = torch.empty(len(x), dtype=torch.int64, device=x.device)  # which nobody reads
    return rope_kv_write_triton(x, no_keys, no_keys, cos_sin, no_cache, slots)


@jit
def load_rotated(source: tl.tensor, angles: tl.tensor, half: int, inside: tl.tensor):
    """Both halves of rows at `source` by the cos and sin at `angles`, rounded to their dtype."""
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + half, mask=inside, other=0.0)
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    one, two = first.to(tl.float32), second.to(tl.float32)
    return (one * cos - two * sin).to(first.dtype), (two * cos + one * sin).to(first.dtype)


@jit
def _store(
    target: tl.tensor,  # [ROWS, 1], pointers to vectors
    scale_target: tl.tensor,  # [ROWS, 1], pointers
    first: tl.tensor,  # [ROWS, BLOCK], halves of vectors, zeros beyond `half`
    second: tl.tensor,
    half: int,
    stored: tl.tensor,  # [ROWS, 1]
    LARGEST: tl.constexpr,
    TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    d = tl.arange(0, BLOCK)[None, :]
    inside = stored & (d < half)
    if LARGEST > 0.0:
        one, two = first.to(tl.float32), second.to(tl.float32)
        if TRANSFORM > 0:
            one, two = transformed(one, TRANSFORM), transformed(two, TRANSFORM)
        magnitude = tl.maximum(tl.max(tl.abs(one), axis=1), tl.max(tl.abs(two), axis=1))[:, None]
        scale, inverse = scale_and_inverse(magnitude, LARGEST)
        tl.store(scale_target, scale, mask=stored)
        if TRANSFORM > 0:
            tl.store(target + d, packed(one, two, inverse), mask=inside)
        else:
            tl.store(target + d, to_stored(one, inverse, LARGEST), mask=inside)
            tl.store(target + half + d, to_stored(two, inverse, LARGEST), mask=inside)
    else:
        tl.store(target + d, first, mask=inside)
        tl.store(target + half + d, second, mask=inside)


@jit
def _rope_kv_write_kernel(
    q: tl.tensor,  # [T, N, 2 half]
    k: tl.tensor,  # [T, K, 2 half]
    v: tl.tensor,  # [T, K, 2 half]
    cos_sin: tl.tensor,  # [T, 2 half] float32
    cache: tl.tensor,  # [num_blocks, 2, block_size, K, 2 half], or of 4 bits half
    scales: tl.tensor,  # [num_blocks, 2, block_size, K] float32 where LARGEST is not 0
    slots: tl.tensor,  # [T] int64
    out: tl.tensor,  # [T, N, 2 half] contiguous
    q_token_stride: int,
    q_head_stride: int,
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    angle_stride: int,
    cache_block_stride: int,
    cache_kv_stride: int,
    cache_slot_stride: int,
    cache_head_stride: int,
    scale_block_stride: int,
    scale_kv_stride: int,
    scale_slot_stride: int,
    scale_head_stride: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    half: int,
    block_size: int,
    LARGEST: tl.constexpr,  # magnitude that the cache stores, 0 where it has no scales
    TRANSFORM: tl.constexpr,  # neighbours of a Hadamard transform where the cache is of 4 bits, else 0
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(T N / ROWS) + ceil(T K / ROWS),): the first programs rotate ROWS query heads each; the others rotate
    and store ROWS key heads each, with their values."""
    num_query_programs = tl.cdiv(num_tokens * num_heads, ROWS)
    d = tl.arange(0, BLOCK)[None, :]
    if PDL and TRANSFORM == 0:  # what weights have pushed out of the second cache; else registers spill
        near = tl.minimum(tl.program_id(0) * ROWS // num_heads, num_tokens - 1).to(tl.int64)
        prefetch_lines(slots + near)
        prefetch_lines(cos_sin + near * angle_stride + tl.minimum(d, half - 1))
        prefetch_lines(cos_sin + near * angle_stride + half + tl.minimum(d, half - 1))
    follow_previous(PDL)
    if tl.program_id(0) < num_query_programs:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
        inside = (token < num_tokens) & (d < half)
        source = q + token * q_token_stride + head * q_head_stride + d
        first, second = load_rotated(source, cos_sin + token * angle_stride + d, half, inside)
        rotated = out + row.to(tl.int64) * 2 * half + d
        tl.store(rotated, first, mask=inside)
        tl.store(rotated + half, second, mask=inside)
    else:
        row = ((tl.program_id(0) - num_query_programs) * ROWS + tl.arange(0, ROWS))[:, None]
        token, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
        inside = (token < num_tokens) & (d < half)
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        stored = slot >= 0
        block = slot // block_size
        offset = slot - block * block_size
        target = cache + block * cache_block_stride + offset * cache_slot_stride + head * cache_head_stride
        scale_target = scales + block * scale_block_stride + offset * scale_slot_stride + head * scale_head_stride
        source = k + token * k_token_stride + head * k_head_stride + d
        first, second = load_rotated(source, cos_sin + token * angle_stride + d, half, inside)
        _store(target, scale_target, first, second, half, stored, LARGEST, TRANSFORM, BLOCK)
        source = v + token * v_token_stride + head * v_head_stride + d
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + half, mask=inside, other=0.0)
        target += cache_kv_stride
        _store(target, scale_target + scale_kv_stride, first, second, half, stored, LARGEST, TRANSFORM, BLOCK)
