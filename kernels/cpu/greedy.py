"""The likeliest token of final hidden states, compiled: the head's product without its logits written."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .library import DTYPES, Team
from .linear import PackedLinear

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
BEST = np.dtype([("logit", np.float32), ("", np.int32), ("id", np.int64)])  # Best of logits.h
SCRATCH = 128 * 4 * 32  # kGreedyScratch of logits.h


class TokenMasks:
    """Tokens that some rows may have: TokenMasks of logits.h. Keeps what it points to."""

    def __init__(self, num_rows: int, rows: Sequence[int], bits: NDArray[np.int32]) -> None:
        """rows: r of num_rows; bits: [r, ceil(vocab / 32)] contiguous, bit i % 32 of word i // 32 is set where token i
        is allowed."""
        assert len(rows) == len(bits) and bits.flags.c_contiguous
        self._bits, self._addresses = bits, np.zeros(num_rows, dtype=np.int64)
        self._addresses[list(rows)] = bits.ctypes.data + bits.strides[0] * np.arange(len(rows))
        self.address = self._addresses.ctypes.data


def greedy(team: Team, hidden: Tensor, head: PackedLinear, masks: TokenMasks | None = None) -> Tensor:
    """hidden: [R, H] of the head's dtype, rows contiguous. Returns argmax(hidden head^T), the lowest id among equals,
    [R] int64: a function of each row alone, the same as that of the float32 logits that `linear` makes. With masks, of
    the tokens that they allow; 0 where they allow none."""
    num_rows, k = hidden.shape
    assert k == head.of.k and hidden.dtype == head.dtype and hidden.stride(1) == 1 and not head.of.is_gated
    ids = torch.empty(num_rows, dtype=torch.int64)
    bests = torch.empty(team.num_threads * num_rows * BEST.itemsize, dtype=torch.uint8)
    scratch = torch.empty(team.num_threads * SCRATCH)
    kernel = team.library.kernel("greedy", _P, _I, _P, _L, _L, _P, _P, _P, _P)
    kernel(
        team.address,
        ctypes.addressof(head.of),
        DTYPES[hidden.dtype],
        hidden.data_ptr(),
        hidden.stride(0),
        num_rows,
        masks.address if masks is not None else None,
        ids.data_ptr(),
        bests.data_ptr(),
        scratch.data_ptr(),
    )
    return ids
