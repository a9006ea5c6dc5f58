"""x W^T + bias in 16 bits, of few rows: by a kernel that reads the weight once at the rate of memory.

A step of decodes is bound by reading weights. Up to FEW_ROWS rows are ours: on an H200 products of 8 B take up to 20 %
less time than by cuBLAS, and none more than 1 % longer (benchmarks/gpu/kernels.py --only linear), for that splits K and
adds the parts by a second kernel. The weight is the first factor of a product (products.py says why), and rows that are
not there are not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.attention_tiles import HALVES
from ..common.dependent_launch import dependent_launch, let_next_start, prefetch_rows, previous_done
from ..common.lang import jit, next_power_of_2, tl
from ..common.tuning import ANY, Tuned, chip_of
from .split_k import num_splits, sum_of_splits, workspace_for


@dataclass(frozen=True, slots=True)
class LinearTile:
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int
    max_splits: int = 8  # of K
    ahead: int = 0  # bytes of each of its rows that a program prefetches while the kernel before it ends
    late: bool = False  # the next kernel may start once all of the weight was read, not sooner


FEW_ROWS = 32
# By rows of x. Chips without a row of their own leave all products to torch.
TUNED = Tuned[LinearTile | None](
    generic=[((ANY,), None)],
    interpreter=[((FEW_ROWS,), LinearTile(16, 32, 4, 1)), ((ANY,), None)],
    sm_90=[((FEW_ROWS,), LinearTile(64, 128, 4, 4, 2)), ((ANY,), None)],
)


def row_limits(device: torch.device) -> list[int]:
    """Return numbers of rows beyond each of which another kernel may be compiled, ascending."""
    return [] if TUNED.of(chip_of(device), 1) is None else [16, FEW_ROWS]


def tile_for(x: Tensor, weight: Tensor) -> LinearTile | None:
    """Return the tile of a product of [M, K] and [N, K]; None: it is torch's, as where the weight is of a class with
    products of its own."""
    if x.dtype not in HALVES or x.dim() != 2 or not len(x) or x.stride(1) != 1 or type(weight) is not Tensor:
        return None
    if weight.dtype != x.dtype or weight.stride(1) != 1:
        return None
    return TUNED.of(chip_of(x.device), len(x))


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile) -> Tensor:
    """x: [M, K] of 16 bits, M at most FEW_ROWS; weight: [N, K]; bias: [N] contiguous. Returns x W^T + bias, [M, N], of
    x's dtype."""
    (num_rows, k), n = x.shape, len(weight)
    assert weight.shape == (n, k) and weight.dtype == x.dtype and weight.stride(1) == x.stride(1) == 1
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous())
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    block_m = max(16, next_power_of_2(num_rows))
    tiles = -(-n // tile.block_n)
    splits = min(num_splits(tiles, -(-k // tile.block_k), x.device), tile.max_splits)
    partial, counters = workspace_for(splits, tiles, block_m * tile.block_n, x)
    _few_rows_kernel[(tiles, splits)](
        x,
        weight,
        x if bias is None else bias,
        out,
        partial,
        counters,
        num_rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        EVEN_K=k % tile.block_k == 0,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        AHEAD=ahead_of(tile, weight, splits),
        LATE=tile.late,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(x.device),
    )
    return out


def ahead_of(tile: LinearTile, weight: Tensor, splits: int) -> int:
    """Return how many bytes of a row a program prefetches: within its share of the row, and in whole pieces of 16."""
    (_, k), size = weight.shape, weight.element_size()
    if not tile.ahead or k % tile.block_k or weight.data_ptr() % 16 or weight.stride(0) * size % 16:
        return 0
    last_share = (-(-k // tile.block_k) - (splits - 1) * -(-k // tile.block_k // splits)) * tile.block_k
    return min(tile.ahead, max(last_share, 0) * size) // 32 * 32


@jit
def _few_rows_kernel(
    x: tl.tensor,  # [num_rows, k]
    weight: tl.tensor,  # [num_columns, k]
    bias: tl.tensor,  # [num_columns], where HAS_BIAS
    out: tl.tensor,  # [num_rows, num_columns] contiguous
    partial: tl.tensor,  # [tiles, SPLITS, BLOCK_M * BLOCK_N] float32, where SPLITS > 1
    counters: tl.tensor,  # [tiles] int32, 0 before and after, where SPLITS > 1
    num_rows: int,
    num_columns: int,
    k: int,
    x_stride: int,
    weight_stride: int,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(num_columns / BLOCK_N), SPLITS). num_rows <= BLOCK_M."""
    tile = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    is_row = (m < num_rows)[:, None]
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    k_from = tl.program_id(1) * share
    k_to = tl.minimum(k_from + share, k)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + i[None, :]
    weight_at = weight + tl.minimum(n, num_columns - 1).to(tl.int64)[:, None] * weight_stride + i[None, :]
    if PDL and AHEAD > 0:
        first = weight + tl.minimum(n, num_columns - 1).to(tl.int64) * weight_stride + k_from
        prefetch_rows(first, AHEAD, 2, BLOCK_N)
    previous_done(PDL)
    if not LATE:
        let_next_start(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(k_from, k_to, BLOCK_K):
        if EVEN_K:
            rows = tl.load(x_at + start, mask=is_row, other=0.0)
            columns = tl.load(weight_at + start)
        else:
            used = (start + i < k_to)[None, :]
            rows = tl.load(x_at + start, mask=is_row & used, other=0.0)
            columns = tl.load(weight_at + start, mask=used, other=0.0)
        acc = tl.dot(columns, tl.trans(rows), acc, input_precision="ieee")
    if LATE:
        let_next_start(PDL)
    acc = tl.trans(acc)
    writes = True
    if SPLITS > 1:
        acc, writes = sum_of_splits(acc, partial, counters, tile, tl.program_id(1), SPLITS, BLOCK_M, BLOCK_N)
    if writes:
        if HAS_BIAS:
            acc += tl.load(bias + tl.minimum(n, num_columns - 1)).to(tl.float32)[None, :]
        target = out + m.to(tl.int64)[:, None] * num_columns + n[None, :]
        tl.store(target, acc, mask=is_row & (n < num_columns)[None, :])
