"""The kernels of grouped_gemm.py: persistent programs over the tiles that a step's tokens make of each expert."""

from __future__ import annotations

from ..common.lang import jit, tl
from ..elementwise.gate_mul import activated, clamped
from ..gemm.products import dense_product, packed_product, place_of


@jit
def grouped_dense_kernel(
    x: tl.tensor,  # rows of k
    x_scales: tl.tensor,  # [rows], or [rows, ceil(k / 128)] where BLOCK_SCALED; where HAS_SCALES
    weight: tl.tensor,  # [experts, rows, k] contiguous
    bias: tl.tensor,  # [experts, rows] contiguous, where HAS_BIAS
    weight_scales: tl.tensor,  # [experts, rows], or [experts, ceil(rows / 128), ceil(k / 128)]; where HAS_SCALES
    out: tl.tensor,  # [places or pairs, num_columns] contiguous
    pairs: tl.tensor,  # of ExpertOrder, as all that follows
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_starts: tl.tensor,
    num_tiles: tl.tensor,
    num_columns: int,  # of out: the weight has the same number of rows, or twice as many if GATED
    k: int,
    x_stride: int,
    x_scale_stride: int,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # where GATED, as gate_mul takes it
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    IS_INT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (programs,), any number of them: each takes every so manieth tile."""
    rows = num_columns * 2 if GATED else num_columns
    row_tiles = tl.load(num_tiles)
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    scale_columns = tl.cdiv(k, 128)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles)
        expert, x_row, out_row, is_real = _rows_of(
            row_tile, pairs, starts, tile_experts, tile_starts, TOP_K, GATED, BLOCK_M
        )
        n = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        real_n = tl.minimum(n, num_columns - 1)
        scales = weight_scales
        if BLOCK_SCALED:
            scales += expert * tl.cdiv(rows, 128) * scale_columns
        elif HAS_SCALES:
            scales += expert * rows
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for half in tl.static_range(2 if GATED else 1):  # pyright: ignore[reportGeneralTypeIssues]
            product = dense_product(
                x,
                x_row * x_stride,
                weight + expert * rows * k,
                real_n + half * num_columns,
                k,
                x_scales,
                x_row * x_scale_stride,
                scales,
                scale_columns,
                0,
                k,
                BLOCK_SCALED,
                ONE_SCALE,
                SWAP,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                tl.int32 if IS_INT else tl.float32,
            ).to(tl.float32)
            if HAS_SCALES and not BLOCK_SCALED:
                product *= tl.load(scales + real_n + half * num_columns)[None, :]
                product *= tl.load(x_scales + x_row * x_scale_stride)[:, None]
            if HAS_BIAS:
                product += tl.load(bias + expert * rows + real_n + half * num_columns).to(tl.float32)[None, :]
            acc = _gated(acc, product, ACTIVATION, ALPHA, LIMIT) if half else product
        target = out + out_row[:, None] * num_columns + n[None, :]
        tl.store(target, acc, mask=is_real[:, None] & (n < num_columns)[None, :])


@jit
def grouped_packed_kernel(
    x: tl.tensor,  # rows of k
    codes: tl.tensor,  # [experts, rows, codes_stride] contiguous
    scales: tl.tensor,  # [experts, groups, rows]
    zeros: tl.tensor,  # [experts, groups, rows] int16, where HAS_ZEROS
    offsets: tl.tensor,  # [experts, groups, rows], where HAS_OFFSETS
    table: tl.tensor,  # [16] float32, of Coding.TABLE
    order: tl.tensor,  # [experts, k] int32, where HAS_ORDER
    bias: tl.tensor,  # [experts, rows] contiguous, where HAS_BIAS
    out: tl.tensor,  # [places or pairs, num_columns] contiguous
    pairs: tl.tensor,  # of ExpertOrder, as all that follows
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_starts: tl.tensor,
    num_tiles: tl.tensor,
    num_columns: int,  # of out: the weight has the same number of rows, or twice as many if GATED
    k: int,
    x_stride: int,
    codes_stride: int,
    groups: int,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # where GATED, as gate_mul takes it
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CODING: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES_FIRST: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (programs,), any number of them: each takes every so manieth tile."""
    rows = num_columns * 2 if GATED else num_columns
    row_tiles = tl.load(num_tiles)
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles)
        expert, x_row, out_row, is_real = _rows_of(
            row_tile, pairs, starts, tile_experts, tile_starts, TOP_K, GATED, BLOCK_M
        )
        n = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        real_n = tl.minimum(n, num_columns - 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for half in tl.static_range(2 if GATED else 1):  # pyright: ignore[reportGeneralTypeIssues]
            product = packed_product(
                x,
                x_row * x_stride,
                codes + expert * rows * codes_stride,
                real_n + half * num_columns,
                codes_stride,
                scales + expert * groups * rows,
                zeros + expert * groups * rows,
                offsets + expert * groups * rows,
                table,
                rows,
                order + expert * k,
                0,
                k,
                CODING,
                BITS,
                GROUP,
                SCALES_FIRST,
                HAS_ZEROS,
                HAS_OFFSETS,
                HAS_ORDER,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            if HAS_BIAS:
                product += tl.load(bias + expert * rows + real_n + half * num_columns).to(tl.float32)[None, :]
            acc = _gated(acc, product, ACTIVATION, ALPHA, LIMIT) if half else product
        target = out + out_row[:, None] * num_columns + n[None, :]
        tl.store(target, acc, mask=is_real[:, None] & (n < num_columns)[None, :])


@jit
def _gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32 both; for SILU_UP_FIRST the first is up, the second gate."""
    if ACTIVATION == 3:
        gate, up = clamped(gate, up, LIMIT)
    if ACTIVATION == 4:
        gate, up = up, gate
    return activated(gate, ACTIVATION, ALPHA) * up


@jit
def _rows_of(
    row_tile: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_starts: tl.tensor,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(expert, rows of x, rows of out, whether they are the expert's), int64 and [BLOCK_M].

    The first product reads tokens and writes places; the second reads places and writes pairs.
    """
    expert = tl.load(tile_experts + row_tile).to(tl.int64)
    place = tl.load(tile_starts + row_tile) + tl.arange(0, BLOCK_M)
    end = tl.load(starts + expert + 1)
    is_real = place < end
    place = tl.minimum(place, end - 1).to(tl.int64)
    pair = tl.load(pairs + place).to(tl.int64)
    if IS_FIRST:
        x_row, out_row = pair // TOP_K, place
    else:
        x_row, out_row = place, pair
    return expert, x_row, out_row, is_real
