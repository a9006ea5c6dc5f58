"""The gate of a SwiGLU MLP (Shazeer 2020): silu(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor

from .lang import jit, tl

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2I], last axis contiguous; gate in the first half of each row, up in the second.

    Returns [T, I] contiguous, of the same dtype.
    """
    return silu_mul_triton(gate_up) if gate_up.is_cuda else silu_mul_twin(gate_up)


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(num_rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _silu_mul_kernel[(num_rows, -(-dim // _BLOCK))](gate_up, out, gate_up.stride(0), dim, BLOCK=_BLOCK)
    return out


@jit
def _silu_mul_kernel(
    gate_up: tl.tensor,  # [T, 2 dim]
    out: tl.tensor,  # [T, dim] contiguous
    row_stride: int,
    dim: int,
    BLOCK: tl.constexpr,
):
    """Grid: (T, ceil(dim / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < dim
    gate = tl.load(gate_up + row * row_stride + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + dim + i, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * dim + i, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)
