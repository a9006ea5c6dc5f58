"""Streams of bytes out of a region's runs, and into them. No I/O."""

from collections.abc import Iterator

import numpy as np

from ..kv_layout import Runs


def in_parts(runs: Runs, num_bytes: int) -> Iterator[Runs]:
    """The same bytes in parts of `num_bytes`; the last may be smaller. Runs are cut where a part ends."""
    ends = np.cumsum(runs.lengths)
    for first in range(0, runs.num_bytes, num_bytes):
        end = min(first + num_bytes, runs.num_bytes)
        a, b = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, end)
        offsets, lengths = runs.offsets[a : b + 1].copy(), runs.lengths[a : b + 1].copy()
        skipped = first - (ends[a] - lengths[0])
        offsets[0] += skipped
        lengths[0] -= skipped
        lengths[-1] -= ends[b] - end
        yield Runs(offsets, lengths)


def gather(view: memoryview, runs: Runs, chunk_bytes: int) -> Iterator[bytes]:
    """Copy the runs out, in pieces of `chunk_bytes` (the last may be shorter). Each piece is copied when asked for."""
    piece = bytearray()
    for start, length in zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True):
        at, end = start, start + length
        while at < end:
            step = min(end - at, chunk_bytes - len(piece))
            if step == chunk_bytes:
                yield bytes(view[at : at + step])  # the common case, copied once
            else:
                piece += view[at : at + step]
                if len(piece) == chunk_bytes:
                    yield bytes(piece)
                    piece.clear()
            at += step
    if piece:
        yield bytes(piece)


class Scatter:
    """Writes a stream of bytes into runs, in order."""

    def __init__(self, view: memoryview, runs: Runs) -> None:
        self._view = view
        self._runs = list(zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True))
        self._runs.reverse()
        self.num_missing = runs.num_bytes

    def write(self, data: bytes) -> None:
        """Raises ValueError, and writes nothing, when there is more data than room."""
        if len(data) > self.num_missing:
            raise ValueError(f"{len(data)} bytes for {self.num_missing}")
        self.num_missing -= len(data)
        rest = memoryview(data)
        while rest:
            offset, length = self._runs.pop()
            step = min(length, len(rest))
            self._view[offset : offset + step] = rest[:step]
            if step < length:
                self._runs.append((offset + step, length - step))
            rest = rest[step:]
