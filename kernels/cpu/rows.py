"""Operations on rows that steps do, as kernels of their own: an embedding lookup, twin of torch's, and RMSNorm, twin of
rms_norm.py's `rms_norm`."""

import ctypes

import torch
from torch import Tensor

from .library import DTYPES, Team

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def embed(team: Team, ids: Tensor, table: Tensor) -> Tensor:
    """ids: [R] int64 contiguous, each a row of `table`; table: [vocab, H] contiguous. Returns [R, H] contiguous."""
    assert ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous() and table.is_contiguous()
    num_rows, dim = len(ids), table.shape[1]
    assert num_rows == 0 or (int(ids.min()) >= 0 and int(ids.max()) < len(table))
    out = torch.empty((num_rows, dim), dtype=table.dtype)
    kernel = team.library.kernel("embed", _I, _P, _P, _P, _L, _L)
    kernel(team.address, DTYPES[table.dtype], table.data_ptr(), ids.data_ptr(), out.data_ptr(), num_rows, dim)
    return out


def rms_norm(team: Team, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [R, D], rows contiguous; weight: [D] float32. Returns [R, D] contiguous, rounded once."""
    num_rows, dim = x.shape
    assert weight.shape == (dim,) and weight.dtype == torch.float32 and x.stride(1) == weight.stride(0) == 1
    out = torch.empty((num_rows, dim), dtype=x.dtype)
    kernel = team.library.kernel("rms_norm", _I, _P, _L, _P, _P, _L, _L, _F)
    where = DTYPES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr()
    kernel(team.address, *where, num_rows, dim, eps)
    return out
