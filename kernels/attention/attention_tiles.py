"""Shared code of the attention kernels over the paged cache: the walk of one tile of query rows over tiles of slots.

Softmax is taken online (FlashAttention-2, algorithm 1) and to base 2. Rows and slots: row r of a tile is one query head
of one token; slot j of a sequence is its j-th token. A tile of slots that every row sees whole is walked unmasked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, tl
from ..kv.kv_scales import largest_of, numbers_in
from .stored_bytes import widened

LOG2_E = 1.4426950408889634
HALVES = (torch.bfloat16, torch.float16)


def check_paged(q: Tensor, cache: Tensor, scales: Tensor | None, block_tables: Tensor, context_lens: Tensor) -> None:
    """Shapes, strides, dtypes and devices that the kernels rely on.

    q: [T, N, D]; cache: [num_blocks, 2, block_size, K, D], of q's dtype, or with its scales of 8 bits, or of 4 ([...,
    D / 2], D a multiple of 4); block_tables: [S, blocks] or [S, K, blocks] int32; context_lens: [S] int32.
    """
    assert q.dim() == 3 and cache.dim() == 5 and cache.shape[1] == 2
    assert q.shape[2] == cache.shape[4] * numbers_in(cache.dtype) and q.shape[1] % cache.shape[3] == 0
    assert q.stride(2) == 1 and cache.stride(4) == 1
    assert q.dtype in (*HALVES, torch.float32)
    assert largest_of(cache, scales) or cache.dtype == q.dtype
    assert block_tables.dtype == context_lens.dtype == torch.int32
    assert block_tables.stride(-1) == 1 and context_lens.stride(0) == 1
    assert block_tables.shape[0] == context_lens.shape[0]
    assert block_tables.dim() == 2 or block_tables.shape[1] == cache.shape[3]
    assert all(t.device == q.device for t in (cache, block_tables, context_lens))


def output_for(q: Tensor, out: Tensor | None) -> Tensor:
    """`out`, checked, or a new one: of q's shape and dtype, its last axis contiguous."""
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape and out.stride(2) == 1 and out.dtype == q.dtype
    return out


def scale_strides(scales: Tensor | None) -> tuple[int, int, int, int]:
    return scales.stride() if scales is not None else (0, 0, 0, 0)  # type: ignore[return-value]


@jit
def find_split(
    item: tl.tensor,
    seq: tl.tensor,  # int64
    starts: tl.tensor,
    split: tl.tensor,
    context_lens: tl.tensor,
    query_starts: tl.tensor,
    window: int,
    HAS_WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,  # a window begins at a multiple of it
):
    """(its sequence's first item, whether that is the only one, the first row and the number of the sequence's queries,
    tokens before them, and the slots [start, stop)) of an item of a DecodePlan."""
    first_item = tl.load(starts + seq)
    is_only = tl.load(starts + seq + 1) - first_item == 1
    context_len = tl.load(context_lens + seq)
    query_start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    history = context_len - num_queries
    length = tl.load(split)
    start = (item - first_item) * length
    if HAS_WINDOW:
        start += tl.maximum(history - window + 1, 0) // SLOTS * SLOTS
    stop = tl.minimum(start + length, context_len)
    return first_item, is_only, query_start, num_queries, history, start, stop


@jit
def begin_softmax(
    sinks: tl.tensor,  # [N] float32, where HAS_SINKS
    head: tl.tensor,  # [M]
    is_row: tl.tensor,
    is_first: tl.tensor,  # split of the sequence: a sink is counted once
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(highest score, to base 2, and sum of weights) of rows before a walk, [M] float32 both."""
    highest, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS and is_first:
        highest = tl.load(sinks + head, mask=is_row, other=0.0) * 1.4426950408889634
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    return highest, total


@jit
def find_slots(
    table: tl.tensor,
    first: tl.tensor,
    used: tl.tensor,
    IS_MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(blocks, int64, and slots in them) of the BLOCK_N slots from `first` on, a multiple of BLOCK_N."""
    if BLOCK_SIZE % BLOCK_N == 0:  # they lie in one
        block = tl.load(table + first // BLOCK_SIZE)
        place = first % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        slot = first + tl.arange(0, BLOCK_N)
        block = tl.load(table + slot // BLOCK_SIZE, mask=used if IS_MASKED else None)
        place = slot % BLOCK_SIZE
    return block.to(tl.int64), place


@jit
def vectors(
    address: tl.tensor,
    used: tl.tensor,
    d: tl.tensor,
    IS_MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[slots, BLOCK_D] at [slots, BLOCK_D] addresses; zeros for slots that are not used, and beyond DIM."""
    if IS_MASKED:
        stored = tl.load(address, mask=used[:, None] & (d < DIM)[None, :], other=0.0)
    elif DIM != BLOCK_D:
        stored = tl.load(address, mask=(d < DIM)[None, :], other=0.0)
    else:
        stored = tl.load(address)
    return stored


@jit
def factors(address: tl.tensor, used: tl.tensor, IS_MASKED: tl.constexpr):
    """[slots] float32 at [slots] addresses: the scales of keys or values; zeros for slots that are not used.

    So few numbers Triton would load in the layout of the scores, each thread all those of its columns: many times the
    loads. It cannot where they are scanned; of one number each, a scan computes nothing.
    """
    scale = tl.load(address, mask=used, other=0.0) if IS_MASKED else tl.load(address)
    alone = tl.reshape(scale.to(tl.float32), (scale.shape[0], 1))
    return tl.reshape(tl.cumsum(alone, 1), (scale.shape[0],))


@jit
def soft_capped(score: tl.tensor, softcap: float):
    """softcap * tanh(score / softcap)."""
    return softcap * (2.0 / (1.0 + tl.exp2(-2.0 * 1.4426950408889634 * score / softcap)) - 1.0)


@jit
def walk(
    acc: tl.tuple,  # of PARTS tiles, [M, BLOCK_D / PARTS] float32: values so far, weighed
    total: tl.tensor,  # [M] float32: weights so far
    highest: tl.tensor,  # [M] float32: the highest score so far, times log2(e)
    query: tl.tuple,  # of such tiles
    position: tl.tensor,  # [M] int32: each row's place in its sequence
    start: int,  # slots [start, stop) are walked, start at a multiple of BLOCK_N
    stop: int,
    table: tl.tensor,  # the sequence's blocks
    cache: tl.tensor,  # at the KV head; where HAS_SCALES, words (stored_bytes.py), which strides count
    scales: tl.tensor,  # at the KV head
    cache_block_stride: int,
    cache_kv_stride: int,
    cache_slot_stride: int,
    scale_block_stride: int,
    scale_kv_stride: int,
    scale_slot_stride: int,
    scale: float,  # of scores as the tiles multiply, times log2(e) unless they are capped
    softcap: float,
    window: int,
    IS_MASKED: tl.constexpr,  # may a row not see a slot of [start, stop), or stop cut a tile?
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    WIDTH: tl.constexpr = DIM // PARTS
    BLOCK_W: tl.constexpr = BLOCK_D // PARTS
    d = tl.arange(0, BLOCK_W)
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        used = slot < stop
        block, place = find_slots(table, first, used, IS_MASKED, BLOCK_SIZE, BLOCK_N)
        address = cache + (block * cache_block_stride + place * cache_slot_stride)[:, None] + d[None, :]
        stored_key = vectors(address, used, d, IS_MASKED, WIDTH, BLOCK_W)
        scale_offset = block * scale_block_stride + place * scale_slot_stride
        if HAS_SCALES:
            keys = widened(stored_key, query[0], PTX)  # pyright: ignore[reportArgumentType]
            score = tl.dot(query[0], tl.trans(keys[0]), input_precision="ieee")  # pyright: ignore[reportArgumentType]
            for i in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
                score = tl.dot(query[i], tl.trans(keys[i]), score, input_precision="ieee")
            score *= factors(scales + scale_offset, used, IS_MASKED)[None, :]
        else:
            score = tl.dot(query[0], tl.trans(stored_key), input_precision="ieee")  # pyright: ignore[reportArgumentType]
        if HAS_SOFTCAP:
            score = soft_capped(score * scale, softcap)
        if IS_MASKED:
            seen = used[None, :] & (slot[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen &= slot[None, :] > position[:, None] - window
            score = tl.where(seen, score, float("-inf"))
        # Scaled within the exponent, where the product costs nothing.
        factor = 1.4426950408889634 if HAS_SOFTCAP else scale
        new_highest = tl.maximum(highest, tl.max(score, 1) * factor)  # pyright: ignore[reportOperatorIssue]
        # A row that has seen nothing yet has no highest score to measure from.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if IS_MASKED else new_highest
        weight = tl.exp2(score * factor - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weight, 1)
        sums = acc[0] * decay[:, None]  # pyright: ignore[reportArgumentType]
        stored_value = vectors(address + cache_kv_stride, used, d, IS_MASKED, WIDTH, BLOCK_W)
        if HAS_SCALES:
            weight *= factors(scales + scale_offset + scale_kv_stride, used, IS_MASKED)[None, :]
            values = widened(stored_value, query[0], PTX)  # pyright: ignore[reportArgumentType]
            sums = tl.dot(weight.to(query[0].dtype), values[0], sums, input_precision="ieee")  # pyright: ignore[reportArgumentType]
            others = _others(acc, decay, weight.to(query[0].dtype), values, PARTS)  # pyright: ignore[reportArgumentType]
            acc = (sums,) + others  # noqa: RUF005  Triton knows no unpacking
        else:
            acc = (tl.dot(weight.to(query[0].dtype), stored_value, sums, input_precision="ieee"),)  # pyright: ignore[reportAssignmentType, reportArgumentType]
        highest = new_highest
    return acc, total, highest


@jit
def _others(acc: tl.tuple, decay: tl.tensor, weight: tl.tensor, values: tl.tuple, PARTS: tl.constexpr):
    """acc: PARTS tiles, [M, W] float32; decay: [M] float32; weight: [M, slots]; values: PARTS tiles, [slots, W]. The
    tiles after the first, with what the values add."""
    second = tl.dot(weight, values[1], acc[1] * decay[:, None], input_precision="ieee")  # pyright: ignore[reportArgumentType]
    if PARTS == 2:
        added = (second,)
    else:
        third = tl.dot(weight, values[2], acc[2] * decay[:, None], input_precision="ieee")  # pyright: ignore[reportArgumentType]
        fourth = tl.dot(weight, values[3], acc[3] * decay[:, None], input_precision="ieee")  # pyright: ignore[reportArgumentType]
        added = (second, third, fourth)
    return added
