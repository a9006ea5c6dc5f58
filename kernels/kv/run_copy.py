"""Many runs of bytes, by their addresses, copied by one launch: what scattered KV blocks are in a mapped pool.

An address is any that the device can reach: also of memory of another process, or another GPU, that is mapped here. A
wrong one ends the process's use of the device, so whoever lists the runs has checked them.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..common.lang import jit, kernel_for, tl
from ..common.tuning import chip_of

Numbers = NDArray[np.int64]

ALIGNED_BYTES = 16  # what a thread copies at once: all addresses and lengths are multiples of it
_NUM_WARPS = 16


class RunTile(NamedTuple):
    """Amount that a program copies at once: `rows` chunks of `chunk_bytes`, of as many runs.

    64 KiB, of 16 warps: eight loads of 16 bytes are under way for each thread, in 64 registers of it.
    """

    rows: int
    chunk_bytes: int


TILES = RunTile(1, 64 << 10), RunTile(16, 4 << 10), RunTile(256, 256)  # for runs of blocks, of layers, of vectors


class RunList(NamedTuple):
    """Runs of at most `num_chunks` chunks each, and the tile that suits them."""

    numbers: Numbers  # [3, n] int64: addresses to write, addresses to read, bytes
    tile: RunTile
    num_chunks: int


def list_of(targets: Numbers, sources: Numbers, lengths: Numbers) -> RunList:
    """List runs ([n] each, n > 0). Long runs among short ones are cut: a program that looks for the last chunks of the
    short ones has nothing to do. The list grows to 2 n at most."""
    num = len(lengths)
    mean = int(lengths.sum()) // num
    tile = next((tile for tile in TILES if 4 * mean >= 3 * tile.chunk_bytes), TILES[-1])
    counts = -(-lengths // tile.chunk_bytes)
    num_chunks, mean_chunks = max(int(counts.max()), 1), max(int(counts.sum()) // num, 1)
    if num_chunks <= 2 * mean_chunks:
        return RunList(np.stack((targets, sources, lengths)), tile, num_chunks)
    step = mean_chunks * tile.chunk_bytes
    counts = -(-lengths // step)
    nth = np.repeat(np.arange(num), counts)
    skipped = (np.arange(len(nth)) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    cut = targets[nth] + skipped, sources[nth] + skipped, np.minimum(lengths[nth] - skipped, step)
    return RunList(np.stack(cut), tile, mean_chunks)


def copy_runs(runs: Tensor, tile: RunTile, num_chunks: int) -> None:
    """Copy each run; none that is written is read or written again.

    runs: [3, n] int64 contiguous, on the device: the numbers of a RunList, all of them multiples of ALIGNED_BYTES.
    """
    kernel_for(runs, copy_runs_triton, copy_runs_twin)(runs, tile, num_chunks)


def copy_runs_twin(runs: Tensor, tile: RunTile, num_chunks: int) -> None:
    _check(runs, tile, num_chunks)
    for target, source, num_bytes in runs.T.tolist():
        ctypes.memmove(target, source, num_bytes)


def copy_runs_triton(runs: Tensor, tile: RunTile, num_chunks: int, num_programs: int | None = None) -> None:
    """num_programs: at most; None: half of the device's cores have one each.

    With 64 KiB under way each that is 4.1 MiB on an H200: to read 2.1 TB/s with 1 us of latency takes 2.1 MB, a link of
    450 GB/s with 3 us 1.4 MB. An engine's programs may need a core of their own: they find the others free, however
    long a copy is.
    """
    _check(runs, tile, num_chunks)
    num = runs.shape[1]
    num_tiles = -(-num // tile.rows) * num_chunks
    assert num_tiles < 1 << 30  # the number of a tile, and the step to the next, are 32 bits
    most = max(chip_of(runs.device).num_cores // 2, 1) if num_programs is None else num_programs
    if num_tiles:
        _copy_runs_kernel[(min(num_tiles, most),)](
            runs,
            num,
            num_chunks,
            ROWS=tile.rows,
            WORDS=tile.chunk_bytes // 4,
            num_warps=_NUM_WARPS,
        )


def _check(runs: Tensor, tile: RunTile, num_chunks: int) -> None:
    assert runs.dtype == torch.int64 and runs.dim() == 2 and len(runs) == 3 and runs.is_contiguous()
    assert tile in TILES and num_chunks > 0


@jit
def _pointer(address: tl.tensor):
    """Return a pointer to words: [...] int64, multiples of 16 -> [...] int32 pointers, known to be that."""
    # The compiler forgets what is known of a number when it becomes a pointer.
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@jit
def _copy_runs_kernel(
    runs: tl.tensor,  # [3, num] int64
    num: int,
    num_chunks: int,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # of four bytes in a chunk
):
    """Grid: (any number of programs,): a program copies every so many-th tile, of one chunk of each of ROWS runs."""
    for tile in range(tl.program_id(0), tl.cdiv(num, ROWS) * num_chunks, tl.num_programs(0)):
        start = tl.cast(tile % num_chunks, tl.int64) * WORDS
        first = tile // num_chunks
        if ROWS == 1:
            at = runs + first
            left = tl.minimum((tl.load(at + 2 * num) >> 2) - start, WORDS).to(tl.int32)
            word = tl.arange(0, WORDS)
            inside = word < tl.multiple_of(left, 4)
            target = _pointer(tl.load(at)) + start + word
            source = _pointer(tl.load(at + num)) + start + word
        else:
            row = first * ROWS + tl.arange(0, ROWS)
            is_row = row < num
            at = runs + row
            left = tl.minimum((tl.load(at + 2 * num, mask=is_row, other=0) >> 2) - start, WORDS).to(tl.int32)
            word = tl.arange(0, WORDS)[None, :]
            inside = word < tl.multiple_of(left, 4)[:, None]
            target = _pointer(tl.load(at, mask=is_row, other=0))[:, None] + start + word
            source = _pointer(tl.load(at + num, mask=is_row, other=0))[:, None] + start + word
        # Evicted first: the KV of the steps that run beside it is to stay in the cache.
        numbers = tl.load(source, mask=inside, eviction_policy="evict_first")
        tl.store(target, numbers, mask=inside, eviction_policy="evict_first")
