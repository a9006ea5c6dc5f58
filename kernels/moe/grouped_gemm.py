"""The two products of a mixture's experts, each over its own tokens: weights of 16 bits, fp8, int8 or packed."""

from __future__ import annotations

import itertools
from functools import partial
from math import gcd

import torch
from torch import Tensor

from ..common.lang import kernel_for
from ..common.tuning import ANY, Tuned, chip_of
from ..elementwise.gate_mul import ALPHA, LIMIT, gate_mul_twin
from ..gemm.linear import Weight
from ..gemm.packed_weight import PackedWeight, constants_of, spreads_of
from ..gemm.products import Tile
from ..gemm.quantise_rows import SCALE_BLOCK
from ..gemm.scaled_gemm import ScaledWeight, rows_unpacked
from . import hopper_experts
from .grouped_kernels import grouped_dense_kernel, grouped_packed_kernel
from .moe_sort import ExpertOrder, sort_counts

_BLOCK_M = Tuned[int](generic=[((8,), 16), ((24,), 32), ((96,), 64), ((ANY,), 128)])  # by pairs an expert

# By rows of a tile.
_WIDE = Tuned[Tile](  # weights of 16 bits
    generic=[
        ((16,), Tile(16, 64, 128, num_warps=4, num_stages=4, programs_per_core=2)),
        ((32,), Tile(32, 64, 128, num_warps=4, num_stages=4, programs_per_core=2)),
        ((64,), Tile(64, 128, 64, num_warps=4, num_stages=4)),
        ((ANY,), Tile(128, 128, 64, num_warps=8, num_stages=4)),
    ],
    hip=[((32,), Tile(32, 64, 128, num_warps=4, num_stages=2)), ((ANY,), Tile(128, 128, 64, 8, num_stages=1))],
)
_FULL = Tuned[Tile](  # weights of 32 bits
    generic=[
        ((32,), Tile(32, 64, 32, num_warps=4, num_stages=2, programs_per_core=2)),
        ((ANY,), Tile(128, 64, 32, num_warps=8, num_stages=2)),
    ],
)
_NARROW = Tuned[Tile](  # weights of 8 bits
    generic=[
        ((16,), Tile(16, 64, 128, num_warps=4, num_stages=5, programs_per_core=3)),
        ((32,), Tile(32, 64, 128, num_warps=4, num_stages=5, programs_per_core=3)),
        ((64,), Tile(64, 64, 128, num_warps=4, num_stages=4, programs_per_core=2)),
        ((ANY,), Tile(128, 64, 128, num_warps=8, num_stages=4)),
    ],
    hip=[((ANY,), Tile(128, 64, 128, num_warps=8, num_stages=1))],
)
_PACKED = Tuned[Tile](  # weights of 4 or 8 bits, unpacked to 16
    generic=[
        ((16,), Tile(16, 64, 128, num_warps=4, num_stages=4, programs_per_core=3)),
        ((32,), Tile(32, 64, 128, num_warps=4, num_stages=4, programs_per_core=2)),
        ((64,), Tile(64, 64, 64, num_warps=4, num_stages=4, programs_per_core=2)),
        ((ANY,), Tile(128, 128, 64, num_warps=8, num_stages=4)),
    ],
    sm_80=[
        ((16,), Tile(16, 64, 128, num_warps=4, num_stages=4, programs_per_core=3)),
        ((32,), Tile(32, 64, 128, num_warps=4, num_stages=4, programs_per_core=2)),
        ((64,), Tile(64, 64, 64, num_warps=4, num_stages=4, programs_per_core=2)),
        ((ANY,), Tile(128, 64, 64, num_warps=8, num_stages=4)),
    ],
    hip=[((ANY,), Tile(128, 64, 64, num_warps=8, num_stages=2))],
)


def block_m_of(num_pairs: int, num_experts: int, device: torch.device) -> int:
    """Rows of the tiles for so many pairs: what moe_sort is to be called with."""
    return _BLOCK_M.of(chip_of(device), -(-num_pairs // num_experts))


def pair_counts(num_experts: int, device: torch.device) -> list[int]:
    """Return a number of pairs for each way in which kernels are compiled for them, ascending."""
    limits = _BLOCK_M.limits(chip_of(device))
    return sorted({*sort_counts(), *(int(limit) * num_experts + 1 for limit in limits)})


def grouped_product(
    x: Tensor,
    weight: Weight,
    order: ExpertOrder,
    out_dtype: torch.dtype,
    x_scales: Tensor | None = None,
    bias: Tensor | None = None,
    gate: int | None = None,
    in_gluon: bool = False,
) -> Tensor:
    """Multiply the x of every pair by its expert's weight. The result is contiguous; rows of pairs in no tile are not
    written.

    gate: a gate of gate_mul.py: the first product, act(x gate^T) * (x up^T), of x [T, D] by token with weight
    [E, 2I, D], each expert's gate before its up; returns [P, I] by place. None: the second one, act down^T, of x [P, I]
    by place with weight [E, D, I]; returns [P, D] by pair. The last axis of x is contiguous, and x is of the weight's
    dtype where that is a Tensor or a ScaledWeight, which asks for x_scales, as scaled_gemm does. bias: [E, 2I] or
    [E, D] contiguous. in_gluon: by hopper_experts.py, in what it takes.
    """
    run = kernel_for(x, partial(grouped_product_triton, in_gluon=in_gluon), grouped_product_twin)
    return run(x, weight, order, out_dtype, x_scales, bias, gate)


def grouped_product_twin(
    x: Tensor,
    weight: Weight,
    order: ExpertOrder,
    out_dtype: torch.dtype,
    x_scales: Tensor | None = None,
    bias: Tensor | None = None,
    gate: int | None = None,
) -> Tensor:
    """Compute one expert after another, in float32; 0 for pairs whose expert is not held here."""
    wide = x.float() if x_scales is None else rows_unpacked(x, x_scales)
    dense = weight.float() if isinstance(weight, Tensor) else weight.unpacked()
    added = dense.new_zeros(dense.shape[:2]) if bias is None else bias.float()
    out = torch.zeros(order.pairs.numel(), dense.shape[1], device=x.device)
    starts = order.starts.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        pairs = order.pairs[start:end].long()
        if gate is None:
            out[pairs] = wide[start:end] @ dense[expert].mT + added[expert]
        else:
            out[start:end] = wide[pairs // order.top_k] @ dense[expert].mT + added[expert]
    return (out if gate is None else gate_mul_twin(out, gate)).to(out_dtype)


def grouped_product_triton(
    x: Tensor,
    weight: Weight,
    order: ExpertOrder,
    out_dtype: torch.dtype,
    x_scales: Tensor | None = None,
    bias: Tensor | None = None,
    gate: int | None = None,
    in_gluon: bool = False,
) -> Tensor:
    num_rows = order.pairs.numel() if gate is None else order.pairs.numel() // order.top_k
    values = weight if isinstance(weight, Tensor) else _values_of(weight)
    num_experts, rows = values.shape[:2]
    columns = rows if gate is None else rows // 2
    assert x.shape[0] == num_rows and x.stride(1) == 1 and order.starts.shape == (num_experts + 1,)
    assert gate is None or rows % 2 == 0
    assert bias is None or (bias.shape == (num_experts, rows) and bias.is_contiguous())
    out = torch.empty(order.pairs.numel(), columns, dtype=out_dtype, device=x.device)
    if not order.max_tiles:
        return out
    if in_gluon and isinstance(weight, Tensor) and bias is None and hopper_experts.takes(x, weight, order, gate):
        hopper_experts.launch(x, weight, order, gate, out)
        return out
    constants = {"GATED": gate is not None, "ACTIVATION": gate or 0, "ALPHA": ALPHA, "LIMIT": LIMIT}
    if isinstance(weight, PackedWeight):
        _launch_packed(x, weight, order, out, bias, constants)
    else:
        _launch_dense(x, weight, order, out, x_scales, bias, constants)
    return out


def _values_of(weight: ScaledWeight | PackedWeight) -> Tensor:
    weight.check()
    return weight.codes if isinstance(weight, PackedWeight) else weight.values


def _programs(tile: Tile, order: ExpertOrder, columns: int) -> int:
    tiles = order.max_tiles * -(-columns // tile.block_n)
    return min(tiles, tile.programs_per_core * chip_of(order.pairs.device).num_cores)


def _launch_dense(
    x: Tensor,
    weight: Tensor | ScaledWeight,
    order: ExpertOrder,
    out: Tensor,
    x_scales: Tensor | None,
    bias: Tensor | None,
    constants: dict[str, float],
) -> None:
    values, scales = (weight, x) if isinstance(weight, Tensor) else (weight.values, weight.scales)
    has_scales = isinstance(weight, ScaledWeight)
    has_blocks = isinstance(weight, ScaledWeight) and weight.has_blocks
    k = values.shape[2]
    assert x.shape[1] == k and x.dtype == values.dtype and values.is_contiguous()
    assert has_scales == (x_scales is not None)
    if x_scales is not None:
        expected = (x.shape[0], -(-k // SCALE_BLOCK)) if has_blocks else (x.shape[0],)
        assert x_scales.shape == expected and x_scales.dtype == torch.float32 and x_scales.is_contiguous()
    table = _NARROW if has_scales else _FULL if x.dtype == torch.float32 else _WIDE
    tile = table.of(chip_of(x.device), order.block_m)
    grouped_dense_kernel[(_programs(tile, order, out.shape[1]),)](
        x,
        x if x_scales is None else x_scales,
        values,
        values if bias is None else bias,
        scales,
        out,
        order.pairs,
        order.starts,
        order.tile_experts,
        order.tile_starts,
        order.num_tiles,
        out.shape[1],
        k,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        TOP_K=order.top_k,
        **constants,
        HAS_BIAS=bias is not None,
        HAS_SCALES=has_scales,
        BLOCK_SCALED=has_blocks,
        ONE_SCALE=SCALE_BLOCK % tile.block_n == 0 and (not constants["GATED"] or out.shape[1] % SCALE_BLOCK == 0),
        IS_INT=x.dtype == torch.int8,
        SWAP=order.block_m < 64,
        EVEN_K=k % tile.block_k == 0,
        BLOCK_M=order.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_packed(
    x: Tensor,
    weight: PackedWeight,
    order: ExpertOrder,
    out: Tensor,
    bias: Tensor | None,
    constants: dict[str, float],
) -> None:
    assert x.shape[1] == weight.k
    tile = _PACKED.of(chip_of(x.device), order.block_m)
    block_k = tile.block_k if weight.is_scaled_first else gcd(tile.block_k, weight.group or tile.block_k)
    grouped_packed_kernel[(_programs(tile, order, out.shape[1]),)](
        x,
        weight.codes,
        *spreads_of(weight),
        order.pairs if weight.order is None else weight.order,
        x if bias is None else bias,
        out,
        order.pairs,
        order.starts,
        order.tile_experts,
        order.tile_starts,
        order.num_tiles,
        out.shape[1],
        weight.k,
        x.stride(0),
        weight.codes.shape[-1],
        weight.scales.shape[-2],
        TOP_K=order.top_k,
        **constants,
        **constants_of(weight),
        HAS_ORDER=weight.order is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=weight.k % block_k == 0,
        BLOCK_M=order.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
