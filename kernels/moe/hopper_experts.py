"""Products of experts with many tokens on Hopper, by hopper_kernels.py. It has not run on a GPU.

Where DIPTYCH_UNTRIED_KERNELS names it, a worker times each of a model's products at load, and those of which it gives
what the plain kernel gives in less time (workers/execution/common/expert_choice.py) are then computed by it in every
step whose tiles have BLOCK_M rows, as the plain kernel's tiles change with the same number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.tuning import chip_of
from ..elementwise.gate_mul import SILU
from .moe_sort import ExpertOrder

BLOCK_M, BLOCK_K = 128, 64
WIDTH = 256  # rows of the weight in a tile: half of them gate and half up, in the first product
STAGES = 4
NUM_WARPS = 8
_BAND = 8  # tiles of rows that share columns of the weight, as in place_of
_ALIGNED_BYTES = 16  # addresses and rows of what TMA reads


def takes(x: Tensor, weight: Tensor, order: ExpertOrder, gate: int | None, stages: int = STAGES) -> bool:
    """Return whether the kernel computes this product, without a bias. x, weight, order, gate: as in
    grouped_product."""
    _, rows, k = weight.shape
    columns = rows if gate is None else rows // 2
    return (
        order.block_m == BLOCK_M
        and x.dtype == weight.dtype == torch.bfloat16
        and gate in (None, SILU)
        and k % BLOCK_K == 0
        and k // BLOCK_K >= stages - 1
        and columns % 8 == 0
        and weight.is_contiguous()
        and all(of.data_ptr() % _ALIGNED_BYTES == 0 for of in (x, weight))
        and x.stride(0) * x.element_size() % _ALIGNED_BYTES == 0
        and "sm_90" in chip_of(x.device).kinds
    )


def launch(x: Tensor, weight: Tensor, order: ExpertOrder, gate: int | None, out: Tensor, stages: int = STAGES) -> None:
    """Compute the product as grouped_product_triton does, which makes `out`. Raises ImportError where there is no
    Gluon."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import hopper_kernels

    num_experts, _, k = weight.shape
    halves, columns = 1 if gate is None else 2, out.shape[1]
    block_n = WIDTH // halves
    x_box = TensorDescriptor(
        x, list(x.shape), list(x.stride()), [BLOCK_M, BLOCK_K], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    # What a box has beyond the columns is 0: an expert's gate does not reach into its up, nor that into the next gate.
    shape, strides = [num_experts * halves, columns, k], [columns * k, k, 1]
    weight_box = TensorDescriptor(
        weight, shape, strides, [halves, block_n, BLOCK_K], gl.NVMMASharedLayout(128, 16, rank=3)
    )
    tiles = order.max_tiles * -(-columns // block_n)
    kernel: Any = hopper_kernels.grouped_hopper_kernel
    kernel[(min(tiles, chip_of(x.device).num_cores),)](
        x,
        x_box,
        weight_box,
        out,
        order.pairs,
        order.starts,
        order.tile_experts,
        order.tile_starts,
        order.num_tiles,
        columns,
        k // BLOCK_K,
        x.stride(0),
        TOP_K=order.top_k,
        GATED=gate is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        STAGES=stages,
        BAND=_BAND,
        num_warps=NUM_WARPS,
    )
