"""Copies of whole blocks of a KV pool, compiled, and their torch twin; copies of runs anywhere in memory."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .library import Team

_P, _L = ctypes.c_void_p, ctypes.c_int64


def copy_blocks(team: Team, pool: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """pool: [outer, num_blocks, ...], a block of an outer index contiguous, of any dtype: in each outer index block
    sources[i] is copied to targets[i]. A block that is a target stands in one pair only."""
    num_pairs = _checked(pool, sources, targets)
    size, block = pool.element_size(), pool[0, 0]
    assert block.is_contiguous()
    kernel = team.library.kernel("copy_blocks", _P, _L, _L, _L, _L, _P, _P, _L)
    kernel(
        team.address,
        pool.data_ptr(),
        pool.shape[0],
        pool.stride(0) * size,
        pool.stride(1) * size,
        block.numel() * size,
        (_L * num_pairs)(*sources),
        (_L * num_pairs)(*targets),
        num_pairs,
    )


def copy_blocks_twin(pool: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy as copy_blocks does, on any device."""
    _checked(pool, sources, targets)
    of, to = (torch.tensor(blocks, dtype=torch.int64, device=pool.device) for blocks in (sources, targets))
    if pool.element_size() == 1:
        pool = pool.view(torch.uint8)  # torch puts no float8 by index
    pool.index_copy_(1, to, pool.index_select(1, of))


def copy_runs(team: Team, targets: NDArray[np.int64], sources: NDArray[np.int64], num_bytes: int) -> None:
    """targets, sources: [n] addresses of runs of `num_bytes` each; run i of `sources` is copied to run i of `targets`,
    which none other touches. The kernel takes addresses as numbers of blocks that begin at each byte."""
    assert targets.dtype == sources.dtype == np.int64 and targets.shape == sources.shape == (len(targets),)
    assert targets.flags.c_contiguous and sources.flags.c_contiguous
    kernel = team.library.kernel("copy_blocks", _P, _L, _L, _L, _L, _P, _P, _L)
    kernel(team.address, None, 1, 0, 1, num_bytes, sources.ctypes.data, targets.ctypes.data, len(targets))


def _checked(pool: Tensor, sources: Sequence[int], targets: Sequence[int]) -> int:
    """Check the pairs of blocks and return their number."""
    num_blocks, written = pool.shape[1], set(targets)
    assert len(sources) == len(targets) == len(written) and written.isdisjoint(sources)
    assert all(0 <= block < num_blocks for block in (*sources, *targets))
    return len(sources)
