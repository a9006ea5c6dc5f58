"""A mixture's experts, from the router's choice to the tokens' sums (Shazeer et al. 2017; SwiGLU experts)."""

from __future__ import annotations

from torch import Tensor

from ..elementwise.gate_mul import SILU
from ..gemm.linear import Weight
from ..gemm.quantise_rows import quantise_rows
from ..gemm.scaled_gemm import ScaledWeight
from .expert_library import ExpertLibrary
from .grouped_gemm import block_m_of, grouped_product
from .moe_combine import moe_combine
from .moe_sort import moe_sort


def moe_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Weight,
    down: Weight,
    first_expert: int = 0,
    shared: Tensor | None = None,
    *,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    activation: int = SILU,
    in_gluon: tuple[bool, bool] = (False, False),
    library: ExpertLibrary | None = None,
) -> Tensor:
    """sum over j of weights[t, j] * down_e(act(gate_e x) * up_e x), e = experts[t, j]; plus shared[t].

    x: [T, D] floating, last axis contiguous; weights: [T, top_k] float32 and experts: [T, top_k] int32 (moe_routing
    makes both); gate_up: [E, 2I, D], gate first but for SILU_UP_FIRST; down: [E, D, I]: the E experts from first_expert
    on. Others, and -1, which marks a row that is padding, add nothing. biases: of both products, [E, 2I] and [E, D];
    activation: of gate_mul.py; in_gluon: for each product, of grouped_product; library: computes what it takes of
    experts from the first on, without biases. Returns [T, D] of x's dtype.
    """
    if library is not None and first_expert == 0 and all(bias is None for bias in biases):
        inputs = x, weights, experts, gate_up, down
        if library.takes(*inputs, activation):
            out = library.compute(*inputs)
            return out if shared is None else out.add_(shared)
    num_experts = gate_up.shape[0]
    order = moe_sort(experts, num_experts, block_m_of(experts.numel(), num_experts, x.device), first_expert)
    rows, scales = _as_factor_of(gate_up, x)
    act = grouped_product(rows, gate_up, order, x.dtype, scales, biases[0], activation, in_gluon[0])
    rows, scales = _as_factor_of(down, act)
    y = grouped_product(rows, down, order, x.dtype, scales, biases[1], in_gluon=in_gluon[1])
    return moe_combine(y, weights, experts, num_experts, first_expert, shared)


def _as_factor_of(weight: Weight, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x as a product with `weight` takes it: quantised where the weight is, with its scales."""
    if isinstance(weight, ScaledWeight):
        return quantise_rows(x, weight.values.dtype, weight.has_blocks)
    return x, None
