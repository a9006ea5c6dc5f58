"""The kernel of hopper_experts.py, in Gluon. It has not run on a GPU.

Two groups of four warps have 64 rows of a tile each, and multiply them by the same 256 rows of the weight. A step of K
is, in order: wait for what was fetched for it; issue its products; wait for those of the step before; a barrier of all
warps, after which nobody reads that step's slot any more; begin to fetch into it what comes STAGES - 1 steps later. It
goes on over the tiles of a program: the last steps of one fetch the first ones of the next, while it is stored.

It imports Gluon, which Triton 3.6 has and earlier ones may not: hopper_experts.py imports it where it is to be used.
"""

# pyright: basic, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Names that differ between Triton 3.6 and later ones.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
_fetch_box: Any = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
_fetch_rows: Any = getattr(ampere.async_copy, "async_load", None) or ampere.async_copy.async_copy_global_to_shared
_commit_rows: Any = ampere.async_copy.commit_group
_wait_for_rows: Any = ampere.async_copy.wait_group


@gluon.jit
def _tile_of(
    tile,
    total,
    row_tiles,
    column_tiles,
    pairs,
    starts,
    tile_experts,
    tile_starts,
    x,
    x_stride,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,
):
    """(expert, its first place in the tile, its end, the tile's first column, where its rows of x begin); of the last
    tile where there are no more. As place_of: bands of BAND tiles of rows, column by column."""
    tile = gl.minimum(tile, total - 1)
    band = tile // (BAND * column_tiles)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    within = tile % (BAND * column_tiles)
    row_tile = band * BAND + within % height
    column = within // height * BLOCK_N
    expert = gl.load(tile_experts + row_tile)
    first = gl.load(tile_starts + row_tile)
    end = gl.load(starts + expert + 1)
    at = x + gl.zeros([BLOCK_M, BLOCK_K], gl.int32, ROWS)
    if GATED:
        place = gl.minimum(first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS)), end - 1)
        row = gl.load(pairs + place).to(gl.int64) // TOP_K
        at = x + (row * x_stride)[:, None] + gl.arange(0, BLOCK_K, gl.SliceLayout(0, ROWS))[None, :]
    return expert, first, end, column, at


@gluon.jit
def _fetch(
    at,
    x_box,
    weight_box,
    expert,
    first,
    column,
    step,
    slot,
    x_slots,
    weight_slots,
    arrived,
    is_there,
    GATED: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Begin to fetch a step into a slot; nothing where not `is_there`."""
    bar = arrived.index(slot)
    k = step * BLOCK_K
    if GATED:
        mbarrier.expect(bar, weight_box.block_type.nbytes, pred=is_there)
        _fetch_box(weight_box, [expert * 2, column, k], bar, weight_slots.index(slot), pred=is_there)
        mask = gl.full(at.shape, 1, gl.int1, at.type.layout) & is_there
        _fetch_rows(x_slots.index(slot), at + k, mask)
        _commit_rows()
    else:
        mbarrier.expect(bar, weight_box.block_type.nbytes + x_box.block_type.nbytes, pred=is_there)
        _fetch_box(weight_box, [expert, column, k], bar, weight_slots.index(slot), pred=is_there)
        _fetch_box(x_box, [first, k], bar, x_slots.index(slot), pred=is_there)


@gluon.jit
def _multiply(
    acc,
    count,
    x_slots,
    weight_slots,
    arrived,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Begin the products of step number `count`, when it is there, and end those of the step before."""
    slot = count % STAGES
    if GATED:
        _wait_for_rows(STAGES - 2)
    mbarrier.wait(arrived.index(slot), count // STAGES & 1)
    if GATED:  # each thread's rows are to be seen by the products of all
        fence_async_shared()
        _barrier()
    weight = weight_slots.index(slot).reshape([WIDTH, BLOCK_K]).permute([1, 0])
    acc = warpgroup_mma(x_slots.index(slot), weight, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    _barrier()  # the other group of warps has read the slot before, too
    return acc


@gluon.jit
def grouped_hopper_kernel(
    x,  # rows of k
    x_box,  # descriptor of x in boxes of [BLOCK_M, BLOCK_K]
    weight_box,  # of [experts * 2, num_columns, k] in boxes of [2, BLOCK_N, BLOCK_K] if GATED; else 1 for the 2
    out,  # [places or pairs, num_columns] contiguous
    pairs,  # of ExpertOrder, as all that follows
    starts,
    tile_experts,
    tile_starts,
    num_tiles,
    num_columns,
    steps,  # k // BLOCK_K, at least STAGES - 1
    x_stride,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,  # silu(gate) * up, by place; else the product, by pair
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: (programs,), any number of them: each takes every so manieth tile."""
    HALVES: gl.constexpr = 2 if GATED else 1
    WIDTH: gl.constexpr = HALVES * BLOCK_N
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, WIDTH, 16])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [num_warps, 1], [1, 0])
    dtype: gl.constexpr = weight_box.dtype
    x_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_box.layout)
    weight_slots = gl.allocate_shared_memory(dtype, [STAGES, HALVES, BLOCK_N, BLOCK_K], weight_box.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    _barrier()
    row_tiles = gl.load(num_tiles)
    column_tiles = gl.cdiv(num_columns, BLOCK_N)
    total = row_tiles * column_tiles
    tile = gl.program_id(0)
    if tile < total:
        expert, first, end, column, at = _tile_of(
            tile, total, row_tiles, column_tiles, pairs, starts, tile_experts, tile_starts, x, x_stride, TOP_K, GATED,
            BLOCK_M, BLOCK_N, BLOCK_K, BAND, ROWS,
        )  # fmt: skip
        for i in gl.static_range(STAGES - 1):
            _fetch(
                at, x_box, weight_box, expert, first, column, i, i, x_slots, weight_slots, arrived, True, GATED, BLOCK_K
            )
        count = 0
        while tile < total:
            acc = gl.zeros([BLOCK_M, WIDTH], gl.float32, SUMS)
            for step in range(STAGES - 1, steps):
                acc = _multiply(acc, count, x_slots, weight_slots, arrived, GATED, STAGES, WIDTH, BLOCK_K)
                _fetch(
                    at, x_box, weight_box, expert, first, column, step, (count + STAGES - 1) % STAGES, x_slots,
                    weight_slots, arrived, True, GATED, BLOCK_K,
                )  # fmt: skip
                count += 1
            own_first = first
            own_end = end
            own_column = column
            tile += gl.num_programs(0)
            expert, first, end, column, at = _tile_of(
                tile, total, row_tiles, column_tiles, pairs, starts, tile_experts, tile_starts, x, x_stride, TOP_K,
                GATED, BLOCK_M, BLOCK_N, BLOCK_K, BAND, ROWS,
            )  # fmt: skip
            for step in range(STAGES - 1):
                acc = _multiply(acc, count, x_slots, weight_slots, arrived, GATED, STAGES, WIDTH, BLOCK_K)
                _fetch(
                    at, x_box, weight_box, expert, first, column, step, (count + STAGES - 1) % STAGES, x_slots,
                    weight_slots, arrived, tile < total, GATED, BLOCK_K,
                )  # fmt: skip
                count += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            place = own_first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, STORED))
            is_own = place < own_end
            if GATED:  # a thread has both halves of what it multiplies
                gate, up = acc.reshape([BLOCK_M, 2, BLOCK_N]).permute([0, 2, 1]).split()
                value = gl.convert_layout((gate / (1.0 + gl.exp(-gate)) * up).to(dtype), STORED)
                row = place.to(gl.int64)
            else:
                value = gl.convert_layout(acc.to(dtype), STORED)
                row = gl.load(pairs + place, mask=is_own, other=0).to(gl.int64)
            n = own_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORED))
            target = out + (row * num_columns)[:, None] + n[None, :]
            gl.store(target, value, mask=is_own[:, None] & (n < num_columns)[None, :])
