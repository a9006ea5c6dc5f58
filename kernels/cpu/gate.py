"""The gate of an MLP, compiled: the twin of gate_mul.py, SiLU and GELU by its tanh form (Shazeer 2020)."""

import ctypes

import torch
from torch import Tensor

from .library import DTYPES, Team

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SILU, _GELU = 0, 1  # Activation of gate.h


def silu_mul(team: Team, gate_up: Tensor) -> Tensor:
    """gate_up: [R, 2I], rows contiguous, gate first. Returns silu(gate) * up, [R, I] contiguous, rounded once."""
    return _gate_mul(team, gate_up, _SILU)


def gelu_mul(team: Team, gate_up: Tensor) -> Tensor:
    """As silu_mul, with GELU by its tanh form."""
    return _gate_mul(team, gate_up, _GELU)


def _gate_mul(team: Team, gate_up: Tensor, activation: int) -> Tensor:
    num_rows, double = gate_up.shape
    assert gate_up.stride(1) == 1 and double % 2 == 0
    dim = double // 2
    out = torch.empty((num_rows, dim), dtype=gate_up.dtype)
    kernel = team.library.kernel("gate_mul", _I, _P, _L, _P, _L, _L, _I)
    dtype, stride = DTYPES[gate_up.dtype], gate_up.stride(0)
    kernel(team.address, dtype, gate_up.data_ptr(), stride, out.data_ptr(), num_rows, dim, activation)
    return out
