"""KV of a run of tokens from one layout into another: blocks cut anew, heads sliced or merged, axes in another order,
numbers in another dtype.

A layout is a tensor's strides: a pool of either order of axes, some heads of it (`narrow`: what one rank gives another)
and a buffer that has come over the wire are all [blocks, layers, V, block_size, heads, D]; V: 2, key and value, or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import chip_of
from .int4_tiles import half_columns, halves, joined, packed, transformed, unpacked
from .kv_scales import (
    dequantise,
    largest_of,
    numbers_in,
    quantise,
    scale_and_inverse,
    to_stored,
    transform_size,
)

_TILE = 2048  # numbers of a program at once, in whole vectors
_NUM_WARPS = 4


@dataclass(frozen=True)
class KVSlots:
    """Slots of tokens: token t is in slot (t - start) % block_size of block table[(t - start) // block_size]."""

    numbers: Tensor  # [blocks, layers, V, block_size, heads, D], D / 2 of 4-bit ones; last axis contiguous
    table: Tensor  # [n] int64 contiguous, on the device: blocks that exist
    start: int = 0
    scales: Tensor | None = None  # [blocks, layers, V, block_size, heads] of 8-bit and 4-bit numbers: see kv_scales.py


def move_kv(source: KVSlots, target: KVSlots, first_token: int, num_tokens: int) -> None:
    """Write tokens first_token to first_token + num_tokens where the target has them, of all layers and heads.

    Numbers of one dtype are copied, with their scales; others go by float32 and are rounded once.
    """
    run = kernel_for(source.numbers, move_kv_triton, move_kv_twin)
    run(source, target, first_token, num_tokens)


def move_kv_twin(source: KVSlots, target: KVSlots, first_token: int, num_tokens: int) -> None:
    _check(source, target, first_token, num_tokens)
    token = torch.arange(first_token, first_token + num_tokens, device=source.table.device)
    read, written = _index(source, token), _index(target, token)
    vectors, dtype = source.numbers[read], target.numbers.dtype
    if source.numbers.dtype == dtype:
        target.numbers[written] = vectors
        if source.scales is not None and target.scales is not None:
            target.scales[written] = source.scales[read]
        return
    if source.scales is not None:
        vectors = dequantise(vectors, source.scales[read])
    if target.scales is not None:
        target.numbers[written], scales = quantise(vectors, dtype)
        target.scales[written] = scales.to(target.scales.dtype)
    else:
        target.numbers[written] = vectors.to(dtype)


def _dim_of(slots: KVSlots) -> int:
    """D: numbers of a vector."""
    return slots.numbers.shape[5] * numbers_in(slots.numbers.dtype)


def _index(slots: KVSlots, token: Tensor) -> tuple[Tensor, slice, slice, Tensor]:
    place, block_size = token - slots.start, slots.numbers.shape[3]
    return slots.table[place // block_size], slice(None), slice(None), place % block_size


def _check(source: KVSlots, target: KVSlots, first_token: int, num_tokens: int) -> None:
    one, other = source.numbers.shape, target.numbers.shape
    assert len(one) == len(other) == 6
    assert (*one[1:3], one[4], _dim_of(source)) == (*other[1:3], other[4], _dim_of(target))
    for slots in (source, target):
        assert slots.numbers.stride(-1) == 1
        assert slots.table.dtype == torch.int64 and slots.table.dim() == 1 and slots.table.is_contiguous()
        assert slots.start <= first_token
        assert first_token + num_tokens - slots.start <= len(slots.table) * slots.numbers.shape[3]
        largest_of(slots.numbers, slots.scales)


def move_kv_triton(source: KVSlots, target: KVSlots, first_token: int, num_tokens: int) -> None:
    _check(source, target, first_token, num_tokens)
    _, num_layers, kinds, block_size, num_heads, width = source.numbers.shape
    num_vectors = num_layers * kinds * num_tokens * num_heads
    assert num_vectors < 1 << 31
    is_same = source.numbers.dtype == target.numbers.dtype
    # Bytes that are only copied are no numbers to a chip that knows none of float8.
    is_bytes = is_same and source.scales is not None
    read, written = (of.numbers.view(torch.int8) if is_bytes else of.numbers for of in (source, target))
    dim = width if is_same else _dim_of(source)
    block = next_power_of_2(dim)
    rows = max(_TILE // block, 1)
    if num_vectors:
        _move_kv_kernel[(min(-(-num_vectors // rows), chip_of(source.table.device).resident_programs(_NUM_WARPS)),)](
            read,
            written,
            source.table,
            target.table,
            source.scales,
            target.scales,
            *source.numbers.stride()[:5],
            *target.numbers.stride()[:5],
            *_scale_strides(source),
            *_scale_strides(target),
            first_token - source.start,
            first_token - target.start,
            num_tokens,
            num_vectors,
            dim,
            LARGEST=0.0 if is_same else largest_of(target.numbers, target.scales),
            IS_SAME=is_same,
            FROM_INT4=not is_same and numbers_in(source.numbers.dtype) == 2,
            TO_INT4=not is_same and numbers_in(target.numbers.dtype) == 2,
            TRANSFORM=transform_size(dim),
            SOURCE_BLOCK_SIZE=block_size,
            TARGET_BLOCK_SIZE=target.numbers.shape[3],
            NUM_HEADS=num_heads,
            KINDS=kinds,
            ROWS=rows,
            BLOCK=block,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # numbers of few bits are the same ones, whoever rounds them
        )


def _scale_strides(slots: KVSlots) -> tuple[int, ...]:
    return (0,) * 5 if slots.scales is None else slots.scales.stride()


@jit
def _offset(
    place: tl.tensor,  # [ROWS, 1] int32: token - start
    layer: tl.tensor,  # [ROWS, 1] int64
    which: tl.tensor,  # 0: K, 1: V
    head: tl.tensor,
    block: tl.tensor,  # [ROWS, 1] int64
    block_size: tl.constexpr,
    block_stride: int,
    layer_stride: int,
    kv_stride: int,
    slot_stride: int,
    head_stride: int,
):
    """Return the offset of each vector in its tensor, [ROWS, 1] int64."""
    slot = (place % block_size).to(tl.int64)
    return block * block_stride + layer * layer_stride + which * kv_stride + slot * slot_stride + head * head_stride


@jit
def _columns(dim: int, BLOCK: tl.constexpr, IN_HALVES: tl.constexpr):
    """Numbers of a vector that BLOCK columns have, and which columns have one: [1, BLOCK] int32 and bool."""
    if IN_HALVES:
        column, is_number = half_columns(dim, BLOCK)
    else:
        column = tl.arange(0, BLOCK)
        is_number = column < dim
    return column[None, :], is_number[None, :]


@jit
def _rounded(numbers: tl.tensor, LARGEST: tl.constexpr, TO_INT4: tl.constexpr, TRANSFORM: tl.constexpr):
    """numbers: [ROWS, BLOCK] float32. As they are stored, of 4 bits [ROWS, BLOCK / 2] uint8, and their scales."""
    if TO_INT4:
        numbers = transformed(numbers, TRANSFORM)
    scale, inverse = scale_and_inverse(tl.max(tl.abs(numbers), axis=1, keep_dims=True), LARGEST)
    if TO_INT4:
        first, second = halves(numbers)
        stored = packed(first, second, inverse)
    else:
        stored = to_stored(numbers, inverse, LARGEST)
    return stored, scale


@jit
def _move_kv_kernel(
    source: tl.tensor,  # [blocks, layers, KINDS, SOURCE_BLOCK_SIZE, NUM_HEADS, dim], dim / 2 where FROM_INT4
    target: tl.tensor,  # [blocks, layers, KINDS, TARGET_BLOCK_SIZE, NUM_HEADS, dim], dim / 2 where TO_INT4
    source_table: tl.tensor,  # [n] int64
    target_table: tl.tensor,  # [n] int64
    source_scales: tl.tensor | None,  # [blocks, layers, KINDS, SOURCE_BLOCK_SIZE, NUM_HEADS] floats, or None
    target_scales: tl.tensor | None,
    s_block: int,  # strides
    s_layer: int,
    s_kv: int,
    s_slot: int,
    s_head: int,
    t_block: int,
    t_layer: int,
    t_kv: int,
    t_slot: int,
    t_head: int,
    ss_block: int,  # of the scales
    ss_layer: int,
    ss_kv: int,
    ss_slot: int,
    ss_head: int,
    ts_block: int,
    ts_layer: int,
    ts_kv: int,
    ts_slot: int,
    ts_head: int,
    source_place: int,  # of the first token, from the table's start
    target_place: int,
    num_tokens: int,
    num_vectors: int,  # layers * KINDS * num_tokens * NUM_HEADS
    dim: int,  # numbers of a vector; where IS_SAME, elements
    LARGEST: tl.constexpr,  # magnitude that the target stores, 0 where nothing is scaled
    IS_SAME: tl.constexpr,  # dtypes
    FROM_INT4: tl.constexpr,
    TO_INT4: tl.constexpr,
    TRANSFORM: tl.constexpr,  # neighbours of a Hadamard transform, of 4-bit numbers
    SOURCE_BLOCK_SIZE: tl.constexpr,  # these and NUM_HEADS are divided by: constants take few instructions
    TARGET_BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KINDS: tl.constexpr,  # vectors of a token in a layer and head
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (programs that are resident at once, or fewer,): a program moves every so many-th group of ROWS vectors, in
    the order layer, vector, token, head."""
    d, is_number = _columns(dim, BLOCK, FROM_INT4 or TO_INT4)
    byte = tl.arange(0, BLOCK // 2)[None, :]
    for group in range(tl.program_id(0), tl.cdiv(num_vectors, ROWS), tl.num_programs(0)):
        row = (group * ROWS + tl.arange(0, ROWS))[:, None]
        is_row = row < num_vectors
        inside = is_row & is_number
        head = (row % NUM_HEADS).to(tl.int64)
        token = row // NUM_HEADS % num_tokens
        part = row // NUM_HEADS // num_tokens
        layer, which = (part // KINDS).to(tl.int64), (part % KINDS).to(tl.int64)
        read, written = token + source_place, token + target_place
        s = tl.load(source_table + read // SOURCE_BLOCK_SIZE, mask=is_row, other=0)
        t = tl.load(target_table + written // TARGET_BLOCK_SIZE, mask=is_row, other=0)
        source_at = _offset(read, layer, which, head, s, SOURCE_BLOCK_SIZE, s_block, s_layer, s_kv, s_slot, s_head)
        target_at = _offset(written, layer, which, head, t, TARGET_BLOCK_SIZE, t_block, t_layer, t_kv, t_slot, t_head)
        if FROM_INT4:
            first, second = unpacked(tl.load(source + source_at + byte, mask=is_row & (byte < dim // 2), other=0))
            numbers = joined(first, second)
        else:
            numbers = tl.load(source + source_at + d, mask=inside, other=0.0)
        scale = tl.zeros((ROWS, 1), tl.float32)
        if source_scales is not None:
            at = _offset(read, layer, which, head, s, SOURCE_BLOCK_SIZE, ss_block, ss_layer, ss_kv, ss_slot, ss_head)
            scale = tl.load(source_scales + at, mask=is_row, other=0.0).to(tl.float32)
        if not IS_SAME:
            numbers = numbers.to(tl.float32)
            if source_scales is not None:
                numbers = numbers * scale
            if FROM_INT4:
                numbers = tl.where(inside, transformed(numbers, TRANSFORM) / TRANSFORM, 0.0)
            if LARGEST > 0.0:
                numbers, scale = _rounded(numbers, LARGEST, TO_INT4, TRANSFORM)
        if TO_INT4:
            tl.store(target + target_at + byte, numbers, mask=is_row & (byte < dim // 2))
        else:
            tl.store(target + target_at + d, numbers, mask=inside)
        if target_scales is not None:
            at = _offset(written, layer, which, head, t, TARGET_BLOCK_SIZE, ts_block, ts_layer, ts_kv, ts_slot, ts_head)
            tl.store(target_scales + at, scale, mask=is_row)
