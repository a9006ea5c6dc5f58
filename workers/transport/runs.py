"""Reads a region's runs as a stream of bytes, and writes one into runs; splits and merges copies. No I/O."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ..kv.device_kv import LISTED_BYTES, CopyList, CopyRows
from ..kv.layout import Copies, Offsets, Runs

FEW_COPIES = 16  # each takes the host some 7 us, a list and its kernel 100 us
LARGE_BYTES = 16 << 20  # of a copy: as long on its way as two or three calls of the driver, and it needs no core


def in_parts(runs: Runs, num_bytes: int) -> Iterator[Runs]:
    """Split runs into parts of `num_bytes`; the last may be smaller. Runs are cut where a part ends."""
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


def parts_of(copies: Copies, part_bytes: int) -> Iterator[Copies]:
    """Split copies into parts of about `part_bytes`; longer runs are cut."""
    if copies.num_bytes <= part_bytes:
        yield copies
        return
    counts = -(-copies.lengths // part_bytes)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    skips = (np.arange(len(firsts)) - firsts) * part_bytes
    lengths = np.minimum(np.repeat(copies.lengths, counts) - skips, part_bytes)
    remote, local = np.repeat(copies.remote, counts) + skips, np.repeat(copies.local, counts) + skips
    ends = np.searchsorted(np.cumsum(lengths), np.arange(1, lengths.sum() // part_bytes + 1) * part_bytes) + 1
    for part in np.split(np.arange(len(lengths)), ends):
        if len(part):
            yield Copies(remote[part], local[part], lengths[part])


def by_pieces(copies: Copies, remote_bytes: int, local_bytes: int) -> Iterator[Copies]:
    """Split copies between regions that consist of pieces, of `remote_bytes` there and of `local_bytes` here:
    those of each pair of pieces together."""
    sides = (copies.remote, remote_bytes), (copies.local, local_bytes)
    if all((side + copies.lengths).max(initial=0) <= size for side, size in sides):  # most have one piece
        yield copies
        return
    ends = np.union1d(*(np.cumsum(Runs(side, copies.lengths).cut(size).lengths) for side, size in sides))
    starts, whole_ends = np.concatenate(([0], ends[:-1])), np.cumsum(copies.lengths)
    nth = np.searchsorted(whole_ends, starts, side="right")
    skipped = starts - (whole_ends[nth] - copies.lengths[nth])
    remote, local, lengths = copies.remote[nth] + skipped, copies.local[nth] + skipped, ends - starts
    pairs = np.stack((remote // remote_bytes, local // local_bytes))
    for pair in np.unique(pairs, axis=1).T:
        is_of_pair = (pair[:, None] == pairs).all(axis=0)
        yield Copies(remote[is_of_pair], local[is_of_pair], lengths[is_of_pair])


def listed(copies: Copies, target: int, source: int) -> CopyList | None:
    """List copies for one kernel. None: the driver is to copy one by one, few or large ones, or what is not aligned.
    target, source: addresses of the two regions."""
    num = len(copies.lengths)
    if num <= FEW_COPIES or copies.num_bytes >= num * LARGE_BYTES:
        return None
    made = CopyList(target + copies.local, source + copies.remote, copies.lengths)
    bits = np.bitwise_or.reduce(made.targets | made.sources | made.lengths)
    return made if bits % LISTED_BYTES == 0 else None


def shares_of(copies: CopyList, most: int, most_bytes: int) -> Iterator[CopyList]:
    """Split a list into equal shares, of `most` copies each at most, and of about `most_bytes` if all are alike."""
    num = len(copies.lengths)
    num_shares = max(-(-num // most), -(-int(copies.lengths.sum()) // most_bytes))
    bounds = [num * i // num_shares for i in range(num_shares + 1)]
    for first, end in pairwise(bounds):
        if first < end:
            yield CopyList(*(of[first:end] for of in copies))


def equally_spaced(copies: Copies, target: int, source: int) -> list[CopyRows]:
    """Merge copies: those of a layer-major pool are the same runs in each layer, so that every one of the first
    layer's, with those at its place in the others, is one. target, source: addresses of the two regions. O(runs)."""
    num = len(copies.lengths)
    for first in (n for n in range(1, num // 2 + 1) if num % n == 0):  # number of entries of the first layer
        target_pitch, source_pitch = _pitch(copies.local, first), _pitch(copies.remote, first)
        widest = int(copies.lengths.max())
        are_alike = bool((copies.lengths[first:] == copies.lengths[:-first]).all())
        if are_alike and min(target_pitch, source_pitch) >= widest:
            return [
                CopyRows(target + local, source + remote, length, num // first, target_pitch, source_pitch)
                for local, remote, length in _rows(copies, first)
            ]
    return [CopyRows(target + local, source + remote, length) for local, remote, length in _rows(copies, num)]


def _pitch(offsets: Offsets, first: int) -> int:
    """Distance of each from the one `first` places before it; 0: the distances differ."""
    steps = offsets[first:] - offsets[:-first]
    return int(steps[0]) if (steps == steps[0]).all() else 0


def _rows(copies: Copies, num: int) -> Iterator[tuple[int, int, int]]:
    columns = copies.local[:num].tolist(), copies.remote[:num].tolist(), copies.lengths[:num].tolist()
    return zip(*columns, strict=True)


def gather(view: memoryview, runs: Runs, chunk_bytes: int) -> Iterator[bytes]:
    """Copy the runs out, in chunks of `chunk_bytes` (the last may be shorter). Each is copied when it is asked for."""
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
        """Write the next bytes. Raises ValueError, and writes nothing, for more data than fits."""
        if len(data) > self.num_missing:
            raise ValueError(f"received {len(data)} bytes, but only {self.num_missing} are missing")
        self.num_missing -= len(data)
        rest = memoryview(data)
        while rest:
            offset, length = self._runs.pop()
            step = min(length, len(rest))
            self._view[offset : offset + step] = rest[:step]
            if step < length:
                self._runs.append((offset + step, length - step))
            rest = rest[step:]
