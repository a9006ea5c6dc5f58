"""Tokens and log-probabilities of rows of logits, compiled: the twins of workers/sampling/choice.py."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .library import Team

_P, _L = ctypes.c_void_p, ctypes.c_int64
_LANES = 16


class Draw(ctypes.Structure):
    """Parameters of the choice of one row's token: Draw of sample.h."""

    _fields_ = (
        ("temperature", ctypes.c_float),  # 0: greedy
        ("log_min_p", ctypes.c_float),  # -inf: off
        ("top_p", ctypes.c_float),  # 1: off
        ("top_k", ctypes.c_int32),  # 0: off
        ("key", ctypes.c_uint64),  # of the noise
    )


class RowSampler:
    """Samples rows of logits; owns the memory that it takes."""

    def __init__(self, team: Team) -> None:
        self._team, self._scratch = team, torch.empty(0)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """logits: [R, vocab] float32, rows contiguous; not changed. Returns one id a row, a function of that row and
        its draw alone: the lowest among equals."""
        num_rows, vocab_size = _checked(logits)
        assert num_rows == len(draws)
        num_floats = self._team.num_threads * 2 * (-(-vocab_size // _LANES) * _LANES)
        if len(self._scratch) < num_floats:
            self._scratch = torch.empty(num_floats)
        ids = (ctypes.c_int64 * num_rows)()
        kernel = self._team.library.kernel("sample", _P, _L, _L, _L, _P, _P, _P)
        kernel(
            self._team.address,
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            vocab_size,
            (Draw * num_rows)(*draws),
            ids,
            self._scratch.data_ptr(),
        )
        return list(ids)

    def mask(self, logits: Tensor, rows: Sequence[int], masks: Tensor) -> None:
        """-inf for the tokens of rows[i] whose bit of masks[i] is not set.

        logits: [R, vocab] float32, rows contiguous, changed in place; rows: r of them; masks: [r, ceil(vocab / 32)]
        int32 contiguous: bit i % 32 of word i // 32 is token i's.
        """
        num_rows, vocab_size = _checked(logits)
        assert all(0 <= row < num_rows for row in rows)
        assert masks.shape == (len(rows), -(-vocab_size // 32)) and masks.dtype == torch.int32
        assert masks.is_contiguous()
        kernel = self._team.library.kernel("mask", _P, _L, _P, _L, _L, _P)
        kernel(
            self._team.address,
            logits.data_ptr(),
            logits.stride(0),
            (_L * len(rows))(*rows),
            len(rows),
            vocab_size,
            masks.data_ptr(),
        )

    def logsumexp_top_k(self, logits: Tensor, rows: Sequence[int], num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """logits: [R, vocab] float32, rows contiguous; rows: r of them.

        Returns the log of the sum of each row's exponentials, [r] float32, and its `num_top` largest logits: their ids,
        [r, num_top] int64, and values, in descending order, the lowest id first among equals.
        """
        num_rows, vocab_size = _checked(logits)
        assert num_top <= vocab_size and all(0 <= row < num_rows for row in rows)
        totals = torch.empty(len(rows))
        ids, values = torch.empty(len(rows), num_top, dtype=torch.int64), torch.empty(len(rows), num_top)
        kernel = self._team.library.kernel("logsumexp_top_k", _P, _L, _P, _L, _L, _L, _P, _P, _P)
        kernel(
            self._team.address,
            logits.data_ptr(),
            logits.stride(0),
            (_L * len(rows))(*rows),
            len(rows),
            vocab_size,
            num_top,
            totals.data_ptr(),
            ids.data_ptr(),
            values.data_ptr(),
        )
        return totals, ids, values


def _checked(logits: Tensor) -> tuple[int, int]:
    assert logits.dim() == 2 and logits.dtype == torch.float32 and logits.stride(1) == 1
    return logits.shape[0], logits.shape[1]
