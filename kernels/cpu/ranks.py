"""Sums over processes of one machine, through memory that all have mapped: where a step adds parts up dozens of times,
a message over a socket would take longer than what is computed between two of them."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .library import Library

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
SLOT_BYTES = 1 << 18  # bytes that a rank writes at a time: those of a few ranks fit into a cache
PAGE = 4096
_UNLIKE = 3  # Met of ranks.cpp


class Abandoned(Exception):
    """Another rank is gone, has not come in time, or means another step."""


class RankSums:
    """Shared-memory sums of one rank. All ranks call the same, with parts of the same sizes, in the same order."""

    def __init__(
        self, library: Library, memory: Tensor, rank: int, size: int, timeout_s: float, look_again_s: float = 0.1
    ) -> None:
        """memory: [num_bytes(size)] uint8, mapped by all, zeros before the first of them uses it. timeout_s: for which
        a rank waits for another; look_again_s: how long it sleeps at a time, if none wakes it."""
        assert memory.dtype == torch.uint8 and len(memory) == self.num_bytes(size) and 0 <= rank < size
        self._memory, self._rank, self._size = memory, rank, size
        self._put = _function(library, "ranks_put", _P, _I, _I, _L, _L, _L, _P, _L, _L)
        self._sum = _function(library, "ranks_sum", _P, _I, _I, _L, _L, _L, _P, _L)
        self._abandon = _function(library, "ranks_abandon", _P, _I)
        times_ms = (int(1000 * timeout_s), int(1000 * look_again_s))
        self._where = (memory.data_ptr(), rank, size, SLOT_BYTES, *times_ms)
        self._num_met = memory[64 * (1 + rank) :][:4].view(torch.int32)  # ranks.cpp's Rank::met
        self._stated = memory[64:][: 64 * size].view(torch.int64).view(size, 8)[:, 1:3]  # Rank::stated
        self._slots = memory[_head(size) :].view(2, size, SLOT_BYTES)

    @staticmethod
    def num_bytes(size: int) -> int:
        return _head(size) + 2 * size * SLOT_BYTES

    def add(self, part: Tensor) -> None:
        """part: float32 contiguous, of the same shape on every rank; becomes the sum, bit for bit the same on each.
        Raises Abandoned."""
        assert part.dtype == torch.float32 and part.is_contiguous()
        self._check(self._sum(*self._where, part.data_ptr(), part.numel()))

    def exchange(self, part: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
        """part: uint8 [any] contiguous; most: the longest of all ranks' parts. Yields the start of each piece and what
        all have of it, [size, up to SLOT_BYTES], theirs until the next; what is beyond a part's end is nothing. To be
        taken to its end. Raises Abandoned."""
        assert part.dtype == torch.uint8 and part.is_contiguous() and part.numel() <= most
        for start in range(0, most, SLOT_BYTES):
            own = part.view(-1)[start : start + SLOT_BYTES]
            self._check(self._put(*self._where, own.data_ptr(), own.numel(), most))
            yield start, self._slots[int(self._num_met) % 2][:, : min(SLOT_BYTES, most - start)]

    def abandon(self) -> None:
        """Tell whoever waits, or will wait, that a rank is gone; callable from any thread."""
        self._abandon(self._memory.data_ptr(), self._size)

    def _check(self, met: int) -> None:
        if met == _UNLIKE:
            count = int(self._num_met)
            stated = [int(n) for n in self._stated[:, count % 2]]
            own = stated[self._rank]
            other, theirs = next((rank, n) for rank, n in enumerate(stated) if n != own)
            raise Abandoned(f"rank {other} reached collective {count} with {theirs} bytes, this one with {own}")
        if met:
            raise Abandoned("it has ended" if met == 1 else "it did not arrive in time")


def _head(size: int) -> int:
    """Bytes before the slots."""
    return -(-64 * (size + 1) // PAGE) * PAGE


def _function(library: Library, name: str, *argtypes: Any) -> Callable[..., int]:
    function = getattr(library.handle, f"diptych_{name}")
    function.argtypes, function.restype = argtypes, _I if name != "ranks_abandon" else None
    return function
