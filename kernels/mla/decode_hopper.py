# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""Decode attention over latents of 512 numbers and rotated keys of 64 on sm_90, in Gluon: what decode.py's kernel does.

It has not run on a GPU. A program has 64 rows, their 64 x 512 sums in the registers of two warpgroups, and walks a
part of a context in pairs of tiles of 64 latents. A third warpgroup copies them. The first one computes the scores of
even tiles and the left half of the sums, the second one those of odd tiles and the right half; weights pass from one to
the other where the rotated part of their tile's keys was. Every tile has four buffers: left (first tile), right (first,
with its rotated part), left (second, with its rotated part), right (second); each has a barrier that says it is full
and one that says it is empty.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

NUM_WARPS = 4  # that copy; there are two times as many beside them
REGISTERS = 216  # of a thread that multiplies; those that copy have what is left

# Triton 3.7 has other names.
begin_copy: Any = getattr(async_copy, "async_load", None) or getattr(async_copy, "async_copy_global_to_shared", None)
barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)


@gluon.jit
def _copy_columns(shared, rows, used, FIRST: gl.constexpr, WIDTH: gl.constexpr, LOAD: gl.constexpr):
    """Begin to copy these columns. rows: addresses, [64, 1]; those that are not used become zeros."""
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOAD))
    begin_copy(shared, rows + column[None, :], mask=used[:, None])


@gluon.jit
def _blocks(table, slot, stop, BLOCK_SIZE: gl.constexpr):
    """Blocks of the slots; of those from `stop` on: 0."""
    return gl.load(table + slot // BLOCK_SIZE, mask=slot < stop, other=0).to(gl.int64)


@gluon.jit
def _rows(cache, block, slot, block_stride, SLOT_STRIDE: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    return cache + (block * block_stride + (slot % BLOCK_SIZE) * SLOT_STRIDE)[:, None]


@gluon.jit
def _copy_latents(
    cache, table, start, stop, pairs, block_stride,
    lefts, rights, ropes, full, empty,
    SLOT_STRIDE: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Warpgroup that copies. The table of the next pair is read before it waits for room."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = RANK // 2
    slot = start + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    block0 = _blocks(table, slot, stop, BLOCK_SIZE)
    block1 = _blocks(table, slot + 64, stop, BLOCK_SIZE)
    for i in range(pairs):
        rows0 = _rows(cache, block0, slot, block_stride, SLOT_STRIDE, BLOCK_SIZE)
        rows1 = _rows(cache, block1, slot + 64, block_stride, SLOT_STRIDE, BLOCK_SIZE)
        used0 = slot < stop
        used1 = slot + 64 < stop
        slot += 128
        block0 = _blocks(table, slot, stop, BLOCK_SIZE)
        block1 = _blocks(table, slot + 64, stop, BLOCK_SIZE)
        free = (i & 1) ^ 1
        mbarrier.wait(empty.index(0), free)
        _copy_columns(lefts.index(0), rows0, used0, 0, HALF, LOAD)
        async_copy.mbarrier_arrive(full.index(0), increment_count=False)
        mbarrier.wait(empty.index(1), free)
        _copy_columns(rights.index(0), rows0, used0, HALF, HALF, LOAD)
        _copy_columns(ropes.index(0), rows0, used0, RANK, ROPE, LOAD)
        async_copy.mbarrier_arrive(full.index(1), increment_count=False)
        mbarrier.wait(empty.index(2), free)
        _copy_columns(lefts.index(1), rows1, used1, 0, HALF, LOAD)
        _copy_columns(ropes.index(1), rows1, used1, RANK, ROPE, LOAD)
        async_copy.mbarrier_arrive(full.index(2), increment_count=False)
        mbarrier.wait(empty.index(3), free)
        _copy_columns(rights.index(1), rows1, used1, HALF, HALF, LOAD)
        async_copy.mbarrier_arrive(full.index(3), increment_count=False)


@gluon.jit
def _scores(
    q_left, q_right, q_rope, left, right, rope, full_left, full_right,
    phase, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a tile, [64, 64]: its left half as soon as it is there."""
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    mbarrier.wait(full_left, phase)
    fence_async_shared()
    score = warpgroup_mma(q_left, left.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(full_right, phase)
    fence_async_shared()
    score = warpgroup_mma(q_right, right.permute((1, 0)), score, is_async=True)
    score = warpgroup_mma(q_rope, rope.permute((1, 0)), score, is_async=True)
    return warpgroup_mma_wait(0, deps=[score])


@gluon.jit
def _masked(score, first, whole, stop, position, LAYOUT: gl.constexpr):
    if first + 64 > whole:
        seen = first + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        is_seen = (seen < stop)[None, :] & (seen[None, :] <= position[:, None])
        score = gl.where(is_seen, score, float("-inf"))
    return score


@gluon.jit
def _finite(highest):
    return gl.where(highest == float("-inf"), 0.0, highest)


@gluon.jit
def _position(history, num_queries, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Last slot that each row sees, [64]."""
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=ROWS)
    return history + gl.minimum(row // NUM_HEADS, num_queries - 1)


@gluon.jit
def _signal(told):
    """Arrive once for the whole warpgroup, behind what all its threads have done."""
    barrier()
    mbarrier.arrive(told, count=1)


@gluon.jit
def _put(
    acc, total, highest, mine, other, told_mine, told_other, phase,
    out, partial, sums, item, is_only, query_start, num_queries,
    FIRST: gl.constexpr, NUM_HEADS: gl.constexpr, MAX_QUERIES: gl.constexpr, RANK: gl.constexpr,
    LAYOUT: gl.constexpr, S_ROWS: gl.constexpr,
):  # fmt: skip
    """Exchange the totals, for each warpgroup has those of its tiles, and store columns FIRST to FIRST + RANK / 2."""
    O_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if FIRST == 0:
        mine.store(total)
        _signal(told_mine)
    mbarrier.wait(told_other, phase)
    others = other.load(S_ROWS)
    if FIRST != 0:  # not before: the first group may not have read the last maxima here, and would miss a phase
        mine.store(total)
        _signal(told_mine)
    total += others
    sum_or_one = gl.where(total == 0.0, 1.0, total)
    value = acc / gl.convert_layout(sum_or_one, O_ROWS)[:, None]
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=O_ROWS)
    column = FIRST + gl.arange(0, RANK // 2, layout=gl.SliceLayout(0, LAYOUT))
    is_row = row // NUM_HEADS < num_queries
    if is_only:
        token = (query_start + row // NUM_HEADS).to(gl.int64)
        target = out + ((token * NUM_HEADS + row % NUM_HEADS) * RANK)[:, None] + column[None, :]
        gl.store(target, value.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        place = item.to(gl.int64) * (MAX_QUERIES * NUM_HEADS) + row
        gl.store(partial + (place * RANK)[:, None] + column[None, :], value, mask=is_row[:, None])
        if FIRST == 0:
            log_sum = gl.where(total == 0.0, float("-inf"), highest + gl.log2(sum_or_one))
            gl.store(sums + place, gl.convert_layout(log_sum, O_ROWS), mask=is_row)


@gluon.jit
def _attend_first(
    q_left, q_right, q_rope, lefts, rights, ropes, maxima,
    full, empty, told, start, stop, whole, history, pairs, zero,
    scale, out, partial, sums, item, is_only, query_start, num_queries,
    NUM_HEADS: gl.constexpr, MAX_QUERIES: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Warpgroup of the even tiles and of the left half of the columns."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RANK // 2, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    position = _position(history, num_queries, NUM_HEADS, S_ROWS)
    acc = gl.zeros([64, RANK // 2], gl.float32, O_LAYOUT)
    total = gl.zeros([64], gl.float32, S_ROWS)
    highest = gl.full([64], float("-inf"), gl.float32, S_ROWS)
    for i in range(pairs):
        phase = i & 1
        one = i * zero  # 0, which the compiler does not know: addresses are then not kept in registers
        score = _scores(
            q_left.index(one), q_right.index(one), q_rope.index(one), lefts.index(one), rights.index(one),
            ropes.index(one), full.index(0), full.index(1), phase, S_LAYOUT,
        )  # fmt: skip
        score = _masked(score, start + i * 128, whole, stop, position, S_LAYOUT)
        new = gl.maximum(highest, gl.max(score, 1) * scale)
        base = _finite(new)
        weight = gl.exp2(score * scale - base[:, None])
        given = weight.to(lefts.dtype)
        barrier()  # all warps' products are done: their keys' rotated part is overwritten
        ropes.index(one).store(given)
        maxima.index(0).store(new)
        fence_async_shared()
        _signal(told.index(0))
        decay = gl.exp2(highest - base)
        total = total * decay + gl.sum(weight, 1)
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        own = gl.convert_layout(given, gl.DotOperandLayout(0, O_LAYOUT, 2))
        acc = warpgroup_mma(own, lefts.index(one), acc, is_async=True)
        mbarrier.wait(told.index(1), phase)
        highest = maxima.index(1).load(S_ROWS)
        decay = gl.exp2(new - _finite(highest))
        total = total * decay
        acc = warpgroup_mma_wait(0, deps=[acc])
        _signal(empty.index(0))
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        fence_async_shared()
        acc = warpgroup_mma(ropes.index(1 + one), lefts.index(1 + one), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _signal(empty.index(2))
    _put(
        acc, total, highest, maxima.index(0), maxima.index(1), told.index(0), told.index(1), pairs & 1,
        out, partial, sums, item, is_only, query_start, num_queries,
        0, NUM_HEADS, MAX_QUERIES, RANK, O_LAYOUT, S_ROWS,
    )  # fmt: skip


@gluon.jit
def _attend_second(
    q_left, q_right, q_rope, lefts, rights, ropes, maxima,
    full, empty, told, start, stop, whole, history, pairs, zero,
    scale, out, partial, sums, item, is_only, query_start, num_queries,
    NUM_HEADS: gl.constexpr, MAX_QUERIES: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Warpgroup of the odd tiles and of the right half of the columns."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RANK // 2, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    position = _position(history, num_queries, NUM_HEADS, S_ROWS)
    acc = gl.zeros([64, RANK // 2], gl.float32, O_LAYOUT)
    total = gl.zeros([64], gl.float32, S_ROWS)
    highest = gl.full([64], float("-inf"), gl.float32, S_ROWS)
    for i in range(pairs):
        phase = i & 1
        one = i * zero
        score = _scores(
            q_left.index(one), q_right.index(one), q_rope.index(one), lefts.index(1 + one), rights.index(1 + one),
            ropes.index(1 + one), full.index(2), full.index(3), phase, S_LAYOUT,
        )  # fmt: skip
        score = _masked(score, start + i * 128 + 64, whole, stop, position, S_LAYOUT)
        new = gl.max(score, 1) * scale
        mbarrier.wait(told.index(0), phase)
        first = maxima.index(0).load(S_ROWS)
        decay = gl.exp2(highest - _finite(first))
        total = total * decay
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        fence_async_shared()
        acc = warpgroup_mma(ropes.index(one), rights.index(one), acc, is_async=True)
        highest = gl.maximum(new, first)
        base = _finite(highest)
        weight = gl.exp2(score * scale - base[:, None])
        given = weight.to(lefts.dtype)
        barrier()  # all warps' products are done: their keys' rotated part is overwritten
        ropes.index(1 + one).store(given)
        maxima.index(1).store(highest)
        fence_async_shared()
        _signal(told.index(1))
        decay = gl.exp2(first - base)
        total = total * decay + gl.sum(weight, 1)
        own = gl.convert_layout(given, gl.DotOperandLayout(0, O_LAYOUT, 2))
        acc = warpgroup_mma_wait(0, deps=[acc])
        _signal(empty.index(1))
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        acc = warpgroup_mma(own, rights.index(1 + one), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _signal(empty.index(3))
    _put(
        acc, total, highest, maxima.index(1), maxima.index(0), told.index(1), told.index(0), pairs & 1,
        out, partial, sums, item, is_only, query_start, num_queries,
        RANK // 2, NUM_HEADS, MAX_QUERIES, RANK, O_LAYOUT, S_ROWS,
    )  # fmt: skip


@gluon.jit
def _copy_queries(
    q, left, right, query_start, num_queries, token_stride, head_stride,
    NUM_HEADS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Begin to copy 64 rows; those of no token become zeros."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    token = (query_start + row // NUM_HEADS).to(gl.int64)
    rows = q + (token * token_stride + (row % NUM_HEADS) * head_stride)[:, None]
    is_row = row // NUM_HEADS < num_queries
    _copy_columns(left, rows, is_row, 0, WIDTH, LOAD)
    if right is not None:
        _copy_columns(right, rows, is_row, WIDTH, WIDTH, LOAD)


@gluon.jit
def _mla_decode_hopper_kernel(
    q_latent,  # [T, NUM_HEADS, RANK]
    q_rope,  # [T, NUM_HEADS, ROPE]
    cache,  # [num_blocks, BLOCK_SIZE, RANK + ROPE]
    out,  # [T, NUM_HEADS, RANK] contiguous
    partial,  # [P, MAX_QUERIES * NUM_HEADS, RANK] float32
    sums,  # [P, MAX_QUERIES * NUM_HEADS] float32
    work,  # [P] int32
    starts,  # [S + 1] int32
    split,  # [1] int32
    block_tables,  # [S, max_blocks] int32
    context_lens,  # [S] int32
    query_starts,  # [S + 1] int32
    q_latent_token_stride,
    q_latent_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    cache_block_stride,
    table_stride,
    scale,  # times log2(e)
    NUM_HEADS: gl.constexpr,
    MAX_QUERIES: gl.constexpr,
    SLOT_STRIDE: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: (ceil(MAX_QUERIES * NUM_HEADS / 64), P), as _mla_decode_kernel's. Row r is query head r % NUM_HEADS of new
    token r // NUM_HEADS. An item of no sequence is one of no tiles and no rows."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = cache.dtype.element_ty
    WIDTH: gl.constexpr = RANK // 2
    item = gl.program_id(1)
    found = gl.load(work + item)
    seq = gl.maximum(found, 0).to(gl.int64)
    first_item = gl.load(starts + seq)
    is_only = gl.load(starts + seq + 1) - first_item == 1
    context_len = gl.load(context_lens + seq)
    query_start = gl.load(query_starts + seq)
    num_queries = gl.load(query_starts + seq + 1) - query_start
    history = context_len - num_queries
    start = (item - first_item) * gl.load(split)
    stop = gl.minimum(start + gl.load(split), context_len)
    if found < 0:
        stop = start
        num_queries = 0
    zero = found >> 31  # or -1, where there are no pairs
    pairs = gl.cdiv(gl.maximum(stop - start, 0), 128)
    whole = gl.minimum(stop, history + 1)  # slots below it are seen by every row
    table = block_tables + seq * table_stride
    q_left = gl.allocate_shared_memory(HALF, [1, 64, WIDTH], SHARED)
    q_right = gl.allocate_shared_memory(HALF, [1, 64, WIDTH], SHARED)
    q_turned = gl.allocate_shared_memory(HALF, [1, 64, ROPE], SHARED)
    lefts = gl.allocate_shared_memory(HALF, [2, 64, WIDTH], SHARED)
    rights = gl.allocate_shared_memory(HALF, [2, 64, WIDTH], SHARED)
    ropes = gl.allocate_shared_memory(HALF, [2, 64, ROPE], SHARED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(4):
        mbarrier.init(full.index(k), count=128)
        mbarrier.init(empty.index(k), count=1)
    for k in gl.static_range(2):
        mbarrier.init(told.index(k), count=1)
    _copy_queries(
        q_latent, q_left.index(0), q_right.index(0), query_start, num_queries, q_latent_token_stride,
        q_latent_head_stride, NUM_HEADS, WIDTH,
    )  # fmt: skip
    _copy_queries(
        q_rope, q_turned.index(0), None, query_start, num_queries, q_rope_token_stride, q_rope_head_stride,
        NUM_HEADS, ROPE,
    )  # fmt: skip
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_copy_latents, (
                cache, table, start, stop, pairs, cache_block_stride, lefts, rights, ropes, full, empty,
                SLOT_STRIDE, RANK, ROPE, BLOCK_SIZE,
            )),
            (_attend_first, (
                q_left, q_right, q_turned, lefts, rights, ropes, maxima, full, empty, told, start, stop, whole, history,
                pairs, zero, scale, out, partial, sums, item, is_only, query_start, num_queries,
                NUM_HEADS, MAX_QUERIES, RANK,
            )),
            (_attend_second, (
                q_left, q_right, q_turned, lefts, rights, ropes, maxima, full, empty, told, start, stop, whole, history,
                pairs, zero, scale, out, partial, sums, item, is_only, query_start, num_queries,
                NUM_HEADS, MAX_QUERIES, RANK,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
