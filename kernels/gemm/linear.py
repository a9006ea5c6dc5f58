"""x W^T + bias, whatever the weight is stored as: the products of a decoder's layers.

16 or 32 bits      few rows of 16 bits: few_rows.py; else torch (cuBLAS)
ScaledWeight       rows are quantised as they come, by token or by 128 of their numbers: scaled_gemm.py, or a library
PackedWeight       rows stay as they are: weight_only_gemm.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..common.lang import has_kernel
from . import few_rows, scaled_gemm, weight_only_gemm
from .packed_weight import PackedWeight
from .quantise_rows import quantise_rows
from .scaled_gemm import ScaledWeight

Weight = Tensor | ScaledWeight | PackedWeight  # [N, K], or of experts [E, N, K]


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x: [M, K], last axis contiguous; weight: [N, K]; bias: [N]. Returns x W^T + bias, [M, N], of x's dtype."""
    if isinstance(weight, PackedWeight):
        return weight_only_gemm.weight_only_gemm(x, weight, bias)
    if isinstance(weight, ScaledWeight):
        rows, scales = quantise_rows(x, weight.values.dtype, weight.has_blocks)
        return scaled_gemm.scaled_gemm(rows, scales, weight, x.dtype, bias)
    if has_kernel(x) and (tile := few_rows.tile_for(x, weight)) is not None:
        return few_rows.few_rows_product(x, weight, bias, tile)
    return functional.linear(x, weight, bias)


def row_counts(weights: Iterable[Weight]) -> list[int]:
    """Return a number of rows for each way in which kernels are compiled for products by these weights, ascending."""
    kinds: dict[type, Any] = {PackedWeight: weight_only_gemm, ScaledWeight: scaled_gemm}
    limits = {limit for of in weights for limit in kinds.get(type(of), few_rows).row_limits(of.device)}
    return [1, *(limit + 1 for limit in sorted(limits))]
