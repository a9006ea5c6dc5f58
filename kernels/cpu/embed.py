"""Embedding lookup, compiled: the twin of torch.nn.functional.embedding."""

import ctypes

import torch
from torch import Tensor

from .library import DTYPES, Team

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def embed(team: Team, ids: Tensor, table: Tensor) -> Tensor:
    """ids: [R] int64 contiguous, each a row of `table`; table: [vocab, H] contiguous. Returns [R, H] contiguous."""
    assert ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous() and table.is_contiguous()
    num_rows, dim = len(ids), table.shape[1]
    assert num_rows == 0 or (int(ids.min()) >= 0 and int(ids.max()) < len(table))
    out = torch.empty((num_rows, dim), dtype=table.dtype)
    kernel = team.library.kernel("embed", _I, _P, _P, _P, _L, _L)
    kernel(team.address, DTYPES[table.dtype], table.data_ptr(), ids.data_ptr(), out.data_ptr(), num_rows, dim)
    return out
