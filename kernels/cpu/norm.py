"""The compiled twins of rms_norm.py."""

import ctypes

import torch
from torch import Tensor

from .library import DTYPES, Team

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def rms_norm(team: Team, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [R, D], rows contiguous; weight: [D] float32. Returns [R, D] contiguous, rounded once."""
    return _norm(team, x, None, weight, eps)


def add_rms_norm(team: Team, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual), [R, D] contiguous.

    x, residual: [R, D], rows contiguous, of one dtype; weight: as `rms_norm` has it.
    """
    assert residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
    return _norm(team, x, residual, weight, eps)


def _norm(team: Team, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, dim = x.shape
    assert weight.shape == (dim,) and weight.dtype == torch.float32 and x.stride(1) == weight.stride(0) == 1
    out = torch.empty((num_rows, dim), dtype=x.dtype)
    kernel = team.library.kernel("rms_norm", _I, _P, _L, _P, _L, _P, _P, _L, _L, _F)
    kernel(
        team.address,
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr() if residual is not None else None,
        residual.stride(0) if residual is not None else 0,
        weight.data_ptr(),
        out.data_ptr(),
        num_rows,
        dim,
        eps,
    )
    return out
