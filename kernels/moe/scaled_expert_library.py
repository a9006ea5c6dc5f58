"""Experts in fp8 with scales of blocks by DeepGEMM (deepseek-ai/DeepGEMM), where it is installed. It has not run here
on a GPU.

It computes the two products, each over the rows of all experts at once; what is around them is ours:

    quantise_rows -> moe_sort -> pad_rows -> product -> gate_rows -> product -> moe_combine

Rows of an expert begin at a multiple of its alignment, and it is told where each expert's end ("psum layout"): of the
rows between it computes nothing. Its other layouts are not used: with an expert's number for each row it reads the
blocks that are left over, and as many rows for each expert ("masked") would take a row a token and expert.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from ..common.tuning import INTERPRETER, chip_of
from ..elementwise.gate_mul import SILU
from ..gemm.linear import Weight
from ..gemm.quantise_rows import SCALE_BLOCK, quantise_rows
from ..gemm.scaled_gemm import ScaledWeight
from ..gemm.scaled_library import PACKAGE
from .expert_rows import gate_rows, pad_rows
from .moe_combine import moe_combine
from .moe_sort import moe_sort

FP8 = torch.float8_e4m3fn
# Of an expert, by which DeepGEMM chooses its configuration: with one number it compiles once for each shape of weight,
# whatever steps there are.
EXPECTED_ROWS = 256

log = logging.getLogger("diptych.worker")


class DeepGemmExperts:
    """An ExpertLibrary. Raises what its import does, and AttributeError where it was built without these products.

    Versions before 2.4 refuse `use_psum_layout`.
    """

    name = "DeepGEMM"
    is_of_scaled, has_up_first = True, False

    def __init__(self) -> None:
        package = import_module(PACKAGE)
        self._multiply: Callable[..., None] = package.m_grouped_fp8_gemm_nt_contiguous
        self._alignment: int = package.get_mk_alignment_for_contiguous_layout()

    def takes(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, activation: int
    ) -> bool:
        if not isinstance(gate_up, ScaledWeight) or not isinstance(down, ScaledWeight) or activation != SILU:
            return False
        num_experts, dim, inner = down.shape
        return (
            all(of.values.dtype == FP8 and of.has_blocks for of in (gate_up, down))
            and x.dtype == torch.bfloat16
            and weights.dtype == torch.float32
            and experts.dtype == torch.int32
            and gate_up.shape == (num_experts, 2 * inner, dim)
            and x.shape[1:] == (dim,)
            and weights.shape == experts.shape == (len(x), experts.shape[1])
            and all(size % SCALE_BLOCK == 0 for size in (dim, inner))
            and x.stride(1) == 1
            and all(of.is_contiguous() for of in (weights, experts, gate_up.values, down.values))
            and experts.numel() > 0
        )

    def compute(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        assert isinstance(gate_up, ScaledWeight) and isinstance(down, ScaledWeight)
        num_experts = gate_up.shape[0]
        order = moe_sort(experts, num_experts, self._alignment)
        padded = pad_rows(*quantise_rows(x, FP8, blocks=True), order, self._alignment)
        both = self._product(padded.values, padded.scales, gate_up, padded.ends)
        y = self._product(*gate_rows(both, padded.rows, FP8), down, padded.ends)
        return moe_combine(y, weights, experts, num_experts, rows=padded.rows)

    def _product(self, rows: Tensor, scales: Tensor, weight: ScaledWeight, ends: Tensor) -> Tensor:
        """rows: [R, K] fp8; scales: [R, K / 128], of strides 1 and R, as TMA reads them; ends: [E] int32. Returns
        [R, N] bfloat16, of which rows between experts are anything."""
        out = torch.empty(len(rows), weight.shape[1], dtype=torch.bfloat16, device=rows.device)
        named = {"use_psum_layout": True, "expected_m_for_psum_layout": EXPECTED_ROWS}
        self._multiply((rows, scales), (weight.values, weight.scales), out, ends, **named)
        return out


def find_scaled_expert_library(device: torch.device) -> DeepGemmExperts | None:
    """Return it where it is installed and knows the device: on sm_100 it takes scales for powers of two, which those
    here are not."""
    chip = chip_of(device)
    try:
        if chip is INTERPRETER or "sm_90" not in chip.kinds or find_spec(PACKAGE) is None:
            return None
        return DeepGemmExperts()
    except Exception as e:  # noqa: BLE001 (its import looks for CUDA's compiler, and asserts that it is there)
        log.warning("experts in fp8 are not computed by %s: it does not load (%s: %s)", PACKAGE, type(e).__name__, e)
        return None
