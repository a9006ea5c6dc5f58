"""x W^T with weights of 4 or 8 bits, unpacked in registers: GPTQ's and AWQ's, for few rows and for many."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl
from ..common.tuning import ANY, Tuned, chip_of
from .packed_weight import PackedWeight, constants_of, spreads_of
from .products import Tile, packed_product, place_of
from .split_k import num_splits, sum_of_splits, workspace_for

# By rows of x.
_TILES = Tuned[Tile](
    generic=[
        ((16,), Tile(16, 64, 128, num_warps=4, num_stages=5)),
        ((32,), Tile(32, 64, 128, num_warps=4, num_stages=4)),
        ((64,), Tile(64, 64, 128, num_warps=4, num_stages=4)),
        ((ANY,), Tile(128, 128, 64, num_warps=8, num_stages=4)),
    ],
    hip=[
        ((16,), Tile(16, 64, 128, num_warps=4, num_stages=2)),
        ((64,), Tile(64, 64, 64, num_warps=4, num_stages=2)),
        ((ANY,), Tile(128, 128, 64, num_warps=8, num_stages=2)),
    ],
)
_SPLIT_ROWS = 16  # products of more rows have programs enough


def weight_only_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias. Returns [M, N] contiguous, of x's dtype.

    x: [M, K] floating, last axis contiguous; weight: [N, K], scales of any floating dtype; bias: [N].
    """
    return kernel_for(x, weight_only_gemm_triton, weight_only_gemm_twin)(x, weight, bias)


def weight_only_gemm_twin(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    out = x.float() @ weight.unpacked().mT
    return (out if bias is None else out + bias.float()).to(x.dtype)


def row_limits(device: torch.device) -> list[int]:
    """Return numbers of rows beyond each of which another kernel may be compiled, ascending."""
    return sorted({_SPLIT_ROWS, *map(int, _TILES.limits(chip_of(device)))})


def weight_only_gemm_triton(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    (num_rows, k), n = x.shape, weight.codes.shape[0]
    weight.check()
    assert weight.codes.dim() == 2 and k == weight.k and x.stride(1) == 1
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous())
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    order = weight.order
    if order is not None and num_rows > _SPLIT_ROWS:
        # Few rows are gathered as they are read: they stay in cache. Many are gathered once.
        x, order = x.index_select(1, order), None
    tile = _TILES.of(chip_of(x.device), num_rows)
    block_k = tile.block_k if weight.is_scaled_first else gcd(tile.block_k, weight.group or tile.block_k)
    tiles = -(-num_rows // tile.block_m) * -(-n // tile.block_n)
    splits = num_splits(tiles, -(-k // block_k), x.device) if num_rows <= _SPLIT_ROWS else 1
    partial, counters = workspace_for(splits, tiles, tile.block_m * tile.block_n, x)
    _weight_only_gemm_kernel[(tiles, splits)](
        x,
        weight.codes,
        *spreads_of(weight),
        weight.codes if order is None else order,
        x if bias is None else bias,
        out,
        partial,
        counters,
        num_rows,
        n,
        k,
        x.stride(0),
        weight.codes.stride(0),
        out.stride(0),
        **constants_of(weight),
        HAS_ORDER=order is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=k % block_k == 0,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@jit
def _weight_only_gemm_kernel(
    x: tl.tensor,  # [num_rows, k]
    codes: tl.tensor,  # [num_columns, bytes of a row]
    scales: tl.tensor,  # [groups, num_columns]
    zeros: tl.tensor,  # [groups, num_columns] int16, where HAS_ZEROS
    offsets: tl.tensor,  # [groups, num_columns], where HAS_OFFSETS
    table: tl.tensor,  # [16] float32, of Coding.TABLE
    order: tl.tensor,  # [k] int32, where HAS_ORDER
    bias: tl.tensor,  # [num_columns], where HAS_BIAS
    out: tl.tensor,  # [num_rows, num_columns]
    partial: tl.tensor,  # [tiles, SPLITS, BLOCK_M * BLOCK_N] float32, where SPLITS > 1
    counters: tl.tensor,  # [tiles] int32, 0 before and after, where SPLITS > 1
    num_rows: int,
    num_columns: int,
    k: int,
    x_stride: int,
    codes_stride: int,
    out_stride: int,
    CODING: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES_FIRST: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (ceil(num_rows / BLOCK_M) * ceil(num_columns / BLOCK_N), SPLITS)."""
    tile = tl.program_id(0)
    row_tile, column_tile = place_of(tile, tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N))
    m = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = tl.minimum(m, num_rows - 1) * x_stride
    real_n = tl.minimum(n, num_columns - 1)
    k_from, k_to = 0, k
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
        k_from = tl.program_id(1) * share
        k_to = tl.minimum(k_from + share, k)
    acc = packed_product(
        x,
        x_rows,
        codes,
        real_n,
        codes_stride,
        scales,
        zeros,
        offsets,
        table,
        num_columns,
        order,
        k_from,
        k_to,
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
    writes = True
    if SPLITS > 1:
        acc, writes = sum_of_splits(acc, partial, counters, tile, tl.program_id(1), SPLITS, BLOCK_M, BLOCK_N)
    if writes:
        if HAS_BIAS:
            acc += tl.load(bias + real_n).to(tl.float32)[None, :]
        target = out + m[:, None] * out_stride + n[None, :]
        tl.store(target, acc, mask=(m < num_rows)[:, None] & (n < num_columns)[None, :])
