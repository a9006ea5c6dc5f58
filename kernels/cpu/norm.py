"""The compiled twin of rms_norm.py's `rms_norm`, as decoder_step calls it."""

import ctypes

import torch
from torch import Tensor

from .library import DTYPES, Team

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def rms_norm(team: Team, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [R, D], rows contiguous; weight: [D] float32. Returns [R, D] contiguous, rounded once."""
    num_rows, dim = x.shape
    assert weight.shape == (dim,) and weight.dtype == torch.float32 and x.stride(1) == weight.stride(0) == 1
    out = torch.empty((num_rows, dim), dtype=x.dtype)
    kernel = team.library.kernel("rms_norm", _I, _P, _L, _P, _P, _L, _L, _F)
    where = DTYPES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr()
    kernel(team.address, *where, num_rows, dim, eps)
    return out
