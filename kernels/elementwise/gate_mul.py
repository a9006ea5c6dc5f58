"""The gate of a gated MLP (Shazeer 2020): act(gate) * up, of SiLU or GELU; and that of gpt-oss, which is clamped."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..common.dependent_launch import dependent_launch, follow_previous
from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import chip_of

SILU, GELU, GELU_TANH = 0, 1, 2  # GELU_TANH: the approximation of Hendrycks & Gimpel 2016, section 2
# gpt-oss: gate * sigmoid(ALPHA * gate) * (up + 1), gate at most LIMIT and up within LIMIT of 0 (its model card).
SWIGLU_CLAMPED = 3
SILU_UP_FIRST = 4  # SILU of inputs whose first half is up, the second gate: as libraries have experts
ALPHA, LIMIT = 1.702, 7.0
_TILE = 2048  # numbers of a program at once, in several rows where they are short
_NUM_WARPS = 4


def gate_mul(gate_up: Tensor, activation: int) -> Tensor:
    """gate_up: [T, 2I], last axis contiguous; gate in the first half of each row, up in the second, but for
    SILU_UP_FIRST.

    activation: SILU, GELU, GELU_TANH, SWIGLU_CLAMPED or SILU_UP_FIRST. Returns [T, I] contiguous, of the same dtype.
    """
    return kernel_for(gate_up, gate_mul_triton, gate_mul_twin)(gate_up, activation)


def gate_mul_twin(gate_up: Tensor, activation: int) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == SWIGLU_CLAMPED:
        gate = gate.clamp(max=LIMIT)
        return (gate * ALPHA).sigmoid_().mul_(gate).mul_(up.clamp(-LIMIT, LIMIT) + 1)
    if activation == SILU_UP_FIRST:
        gate, up = up, gate
    if activation in (SILU, SILU_UP_FIRST):
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh" if activation == GELU_TANH else "none").mul_(up)


def gate_mul_triton(gate_up: Tensor, activation: int) -> Tensor:
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.dim() == 2 and gate_up.shape[1] == 2 * dim and gate_up.stride(1) == 1
    assert activation in (SILU, GELU, GELU_TANH, SWIGLU_CLAMPED, SILU_UP_FIRST)
    out = torch.empty(num_rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    if not num_rows or not dim:
        return out
    block = min(next_power_of_2(dim), _TILE)
    rows = _TILE // block
    num_tiles = -(-num_rows // rows) * -(-dim // block)
    _gate_mul_kernel[(min(num_tiles, chip_of(gate_up.device).resident_programs(_NUM_WARPS)),)](
        gate_up,
        out,
        gate_up.stride(0),
        num_rows,
        dim,
        ACTIVATION=activation,
        ALPHA=ALPHA,
        LIMIT=LIMIT,
        ROWS=rows,
        BLOCK=block,
        num_warps=_NUM_WARPS,
        **dependent_launch(gate_up.device),
    )
    return out


@jit
def activated(gate: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """gate: float32, clamped where it is to be.

    tanh is written with the logistic function: 1 + tanh(z) = 2 / (1 + exp(-2 z)).
    """
    if ACTIVATION == 0 or ACTIVATION == 4:  # noqa: PLR1714 (Triton knows no sets)
        return gate / (1.0 + tl.exp(-gate))
    if ACTIVATION == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    if ACTIVATION == 3:
        return gate / (1.0 + tl.exp(-ALPHA * gate))
    return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))


@jit
def clamped(gate: tl.tensor, up: tl.tensor, LIMIT: tl.constexpr):
    """float32 both, as SWIGLU_CLAMPED has them before what is activated is multiplied."""
    return tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0


@jit
def _gate_mul_kernel(
    gate_up: tl.tensor,  # [num_rows, 2 dim]
    out: tl.tensor,  # [num_rows, dim] contiguous
    row_stride: int,
    num_rows: int,
    dim: int,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (programs that are resident at once, or fewer,): a program takes every so many-th tile of ROWS x BLOCK."""
    follow_previous(PDL)
    num_columns = tl.cdiv(dim, BLOCK)
    num_tiles = tl.cdiv(num_rows, ROWS) * num_columns
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = (tile // num_columns * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        i = tile % num_columns * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < num_rows) & (i < dim)
        source = gate_up + row * row_stride + i
        gate = tl.load(source, mask=inside, other=0.0)
        up = tl.load(source + dim, mask=inside, other=0.0)
        wide, factor = gate.to(tl.float32), up.to(tl.float32)
        if ACTIVATION == 3:
            wide, factor = clamped(wide, factor, LIMIT)
        if ACTIVATION == 4:
            wide, factor = factor, wide
        rounded = activated(wide, ACTIVATION, ALPHA).to(gate.dtype).to(tl.float32)
        tl.store(out + row * dim + i, (rounded * factor).to(gate.dtype), mask=inside)
