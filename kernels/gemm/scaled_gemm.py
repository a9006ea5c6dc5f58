"""x W^T of fp8 (e4m3) or int8 values with scales: of tensors, of rows and channels, or of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl
from ..common.tuning import ANY, Tuned, chip_of
from .products import Tile, dense_product, place_of
from .quantise_rows import SCALE_BLOCK
from .split_k import num_splits, sum_of_splits, workspace_for

VALUES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8)

# By rows of x, and whether scales are of blocks (1 or 0): these need a second accumulator.
_TILES = Tuned[Tile](
    generic=[
        ((16, ANY), Tile(16, 64, 128, num_warps=4, num_stages=5)),
        ((64, ANY), Tile(64, 64, 128, num_warps=4, num_stages=4)),
        ((ANY, ANY), Tile(128, 128, 128, num_warps=8, num_stages=3)),
    ],
    sm_80=[
        ((16, ANY), Tile(16, 64, 128, num_warps=4, num_stages=5)),
        ((ANY, ANY), Tile(64, 128, 128, num_warps=8, num_stages=3)),
    ],
    sm_90=[
        ((16, ANY), Tile(16, 64, 128, num_warps=4, num_stages=5)),
        ((64, ANY), Tile(64, 64, 128, num_warps=4, num_stages=4)),
        ((1023, 0), Tile(128, 128, 128, num_warps=8, num_stages=4)),
        ((ANY, 0), Tile(128, 256, 128, num_warps=8, num_stages=3)),  # with fewer rows too few programs
        ((ANY, ANY), Tile(128, 128, 128, num_warps=8, num_stages=3)),
    ],
    sm_100=[
        ((16, ANY), Tile(16, 64, 128, num_warps=4, num_stages=5)),
        ((64, ANY), Tile(64, 64, 128, num_warps=4, num_stages=4)),
        ((ANY, 0), Tile(128, 128, 128, num_warps=8, num_stages=3)),
        ((ANY, ANY), Tile(128, 64, 128, num_warps=8, num_stages=4)),
    ],
    hip=[
        ((16, ANY), Tile(16, 64, 128, num_warps=4, num_stages=2)),
        ((ANY, ANY), Tile(128, 128, 128, num_warps=8, num_stages=1)),
    ],
)
_SPLIT_ROWS = 16  # products of more rows have programs enough
_SWAPPED_ROWS = 64  # products of more fill the wide side of a matrix instruction


class ScaledLibrary(Protocol):
    """A library that multiplies in place of the kernel here; scaled_library.py has them."""

    @property
    def name(self) -> str: ...

    def takes(
        self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, out_dtype: torch.dtype, bias: Tensor | None
    ) -> bool:
        """Return whether it knows such inputs, which are scaled_gemm's."""
        ...

    def multiply(self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        """Compute what scaled_gemm does, of what it takes."""
        ...

    def compiled_rows(self, most: int) -> Sequence[int]:
        """Return numbers of rows, up to the first from `most` on: after products of these it compiles no more."""
        ...


@dataclass(frozen=True)
class ScaledWeight:
    """Weight [..., N, K]: values * scales. Leading axes: experts, or none."""

    values: Tensor  # [..., N, K] contiguous, of VALUES
    scales: Tensor  # float32 contiguous: [..., N], or of blocks of 128 x 128 [..., ceil(N / 128), ceil(K / 128)]
    # Who multiplies by it, with the number of rows up to which each does, ascending; None, and beyond: the kernel here.
    libraries: tuple[tuple[int, ScaledLibrary | None], ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def has_blocks(self) -> bool:
        return self.scales.dim() == self.values.dim()

    def __getitem__(self, expert: int) -> ScaledWeight:
        """Return the weight of one expert."""
        return ScaledWeight(self.values[expert], self.scales[expert])

    def library_for(self, num_rows: int) -> ScaledLibrary | None:
        return next((library for most, library in self.libraries if num_rows <= most), None)

    def check(self) -> None:
        """Raises AssertionError where a tensor is not what the kernels take it for."""
        *lead, n, k = self.values.shape
        expected = (*lead, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)) if self.has_blocks else (*lead, n)
        assert self.values.dtype in VALUES and self.values.is_contiguous() and k > 0
        assert self.scales.shape == expected and self.scales.dtype == torch.float32 and self.scales.is_contiguous()

    def unpacked(self) -> Tensor:
        """float32 [..., N, K]."""
        scales = self.scales
        if not self.has_blocks:
            return self.values.float() * scales[..., None]
        n, k = self.values.shape[-2:]
        wide = scales.repeat_interleave(SCALE_BLOCK, dim=-2).repeat_interleave(SCALE_BLOCK, dim=-1)
        return self.values.float() * wide[..., :n, :k]


def scaled_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: ScaledWeight,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """(x * x_scales) W^T + bias. Returns [M, N] contiguous, of out_dtype.

    x: [M, K] of the weight's dtype, last axis contiguous; x_scales: float32 contiguous, [M] or [1], and
    [M, ceil(K / 128)] where the weight's are of blocks (quantise_rows makes both); weight: [N, K]; bias: [N].
    """
    library = weight.library_for(len(x))
    if library is not None and library.takes(x, x_scales, weight, out_dtype, bias):
        return library.multiply(x, x_scales, weight, bias)
    return kernel_for(x, scaled_gemm_triton, scaled_gemm_twin)(x, x_scales, weight, out_dtype, bias)


def scaled_gemm_twin(
    x: Tensor, x_scales: Tensor, weight: ScaledWeight, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    out = rows_unpacked(x, x_scales) @ weight.unpacked().mT
    return (out if bias is None else out + bias.float()).to(out_dtype)


def rows_unpacked(x: Tensor, x_scales: Tensor) -> Tensor:
    """Dequantise the rows of quantise_rows, float32 [M, K]."""
    if x_scales.dim() == 1:
        return x.float() * x_scales[:, None]
    return x.float() * x_scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, : x.shape[1]]


def row_limits(device: torch.device) -> list[int]:
    """Return numbers of rows beyond each of which another kernel may be compiled, ascending."""
    return sorted({_SPLIT_ROWS, _SWAPPED_ROWS, *map(int, _TILES.limits(chip_of(device)))})


def scaled_gemm_triton(
    x: Tensor,
    x_scales: Tensor,
    weight: ScaledWeight,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    weight.check()
    (num_rows, k), n = x.shape, weight.values.shape[0]
    assert weight.values.shape == (n, k) and x.dtype == weight.values.dtype and x.stride(1) == 1
    assert x_scales.dtype == torch.float32 and x_scales.is_contiguous()
    assert x_scales.shape == (num_rows, -(-k // SCALE_BLOCK)) if weight.has_blocks else x_scales.dim() == 1
    assert weight.has_blocks or x_scales.shape[0] in (1, num_rows)
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous())
    out = torch.empty(num_rows, n, dtype=out_dtype, device=x.device)
    if not num_rows:
        return out
    tile = _TILES.of(chip_of(x.device), num_rows, weight.has_blocks)
    tiles = -(-num_rows // tile.block_m) * -(-n // tile.block_n)
    splits = num_splits(tiles, -(-k // tile.block_k), x.device) if num_rows <= _SPLIT_ROWS else 1
    partial, counters = workspace_for(splits, tiles, tile.block_m * tile.block_n, x_scales)
    _scaled_gemm_kernel[(tiles, splits)](
        x,
        x_scales,
        weight.values,
        weight.scales,
        x_scales if bias is None else bias,
        out,
        partial,
        counters,
        num_rows,
        n,
        k,
        x.stride(0),
        0 if x_scales.shape == (1,) else x_scales.stride(0),
        weight.scales.stride(0),
        BLOCK_SCALED=weight.has_blocks,
        ONE_SCALE=SCALE_BLOCK % tile.block_n == 0,
        IS_INT=x.dtype == torch.int8,
        HAS_BIAS=bias is not None,
        SWAP=num_rows <= _SWAPPED_ROWS,
        EVEN_K=k % tile.block_k == 0,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@jit
def _scaled_gemm_kernel(
    x: tl.tensor,  # [num_rows, k]
    x_scales: tl.tensor,  # [num_rows], or [num_rows, ceil(k / 128)] where BLOCK_SCALED
    weight: tl.tensor,  # [num_columns, k] contiguous
    weight_scales: tl.tensor,  # [num_columns], or [ceil(num_columns / 128), ceil(k / 128)] where BLOCK_SCALED
    bias: tl.tensor,  # [num_columns], where HAS_BIAS
    out: tl.tensor,  # [num_rows, num_columns] contiguous
    partial: tl.tensor,  # [tiles, SPLITS, BLOCK_M * BLOCK_N] float32, where SPLITS > 1
    counters: tl.tensor,  # [tiles] int32, 0 before and after, where SPLITS > 1
    num_rows: int,
    num_columns: int,
    k: int,
    x_stride: int,
    x_scale_stride: int,
    weight_scale_stride: int,
    BLOCK_SCALED: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    IS_INT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
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
    real_m = tl.minimum(m, num_rows - 1)
    real_n = tl.minimum(n, num_columns - 1)
    k_from, k_to = 0, k
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
        k_from = tl.program_id(1) * share
        k_to = tl.minimum(k_from + share, k)
    acc = dense_product(
        x,
        real_m * x_stride,
        weight,
        real_n,
        k,
        x_scales,
        real_m * x_scale_stride,
        weight_scales,
        weight_scale_stride,
        k_from,
        k_to,
        BLOCK_SCALED,
        ONE_SCALE,
        SWAP,
        EVEN_K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        tl.int32 if IS_INT else tl.float32,
    ).to(tl.float32)
    if not BLOCK_SCALED:
        acc *= tl.load(x_scales + real_m * x_scale_stride)[:, None] * tl.load(weight_scales + real_n)[None, :]
    writes = True
    if SPLITS > 1:
        acc, writes = sum_of_splits(acc, partial, counters, tile, tl.program_id(1), SPLITS, BLOCK_M, BLOCK_N)
    if writes:
        if HAS_BIAS:
            acc += tl.load(bias + real_n).to(tl.float32)[None, :]
        target = out + m[:, None] * num_columns + n[None, :]
        tl.store(target, acc, mask=(m < num_rows)[:, None] & (n < num_columns)[None, :])
