"""Choice of the blocks that a decode attends to (QUEST), compiled: the twin of attention/quest.py for packed caches.

    bounds   [num_blocks, K, 2, padded D]   smallest and largest of each number of a block's keys; what pads them is 0

`choose_blocks` makes the bounds of a step's sparse sequences cover their contexts, and writes the chosen blocks to the
SparseMemory, by which plan_attention and paged_attention then attend to these alone.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..attention.paged_batch import PagedBatch
from .attention import Cache, Heads, Sequences, SparseStruct
from .library import DTYPES, Team

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_LANES = 16
MIN_CHOSEN = 4


def padded_dim(dim: int, dtype: torch.dtype) -> int:
    """Numbers of a row of bounds: a multiple of what a dot product takes at once."""
    step = _LANES * 4 // dtype.itemsize
    return -(-dim // step) * step


class SparseMemory:
    """Buffers of a step's sparse sequences, grown to the largest step so far. S sequences, N heads, K KV heads."""

    def __init__(self, heads: Heads, num_chosen: int, block_size: int, dtype: torch.dtype) -> None:
        """num_chosen: blocks that a sparse sequence attends to."""
        self._heads, self._num_chosen, self._block_size, self._dtype = heads, num_chosen, block_size, dtype
        self._num_seqs = self._width = 0
        self.struct = SparseStruct()

    def reserve(self, num_seqs: int, width: int) -> None:
        """width: blocks of the longest context."""
        if num_seqs <= self._num_seqs and width <= self._width:
            return
        assert self._num_chosen >= MIN_CHOSEN
        self._num_seqs, self._width = max(num_seqs, self._num_seqs), -(-max(width, self._width) // _LANES) * _LANES
        heads, num_seqs = self._heads, self._num_seqs
        bounded = torch.zeros(num_seqs, dtype=torch.int32)
        self.bounded = bounded.numpy()
        self.chosen = torch.zeros(num_seqs, heads.num_kv_heads, self._num_chosen, dtype=torch.int32)
        queries = torch.zeros(num_seqs, heads.num_heads, 2, padded_dim(heads.head_dim, self._dtype), dtype=self._dtype)
        self.scores = torch.zeros(num_seqs, heads.num_kv_heads, 2, self._width)
        self._kept = bounded, queries
        addresses = (of.data_ptr() for of in (bounded, self.chosen, queries, self.scores))
        self.struct = SparseStruct(num_seqs, self._num_chosen, self._block_size, *addresses, self._width)


def choose_blocks(
    team: Team,
    q: Tensor,
    cache: Tensor,
    bounds: Tensor,
    batch: PagedBatch,
    memory: SparseMemory,
    bounded: Sequence[int],
) -> SparseStruct:
    """Fill `memory.chosen` of the sequences with bounded[s] >= 0, whose first so many tokens `bounds` cover.

    q: [T, N, D], a row contiguous; cache: packed, of q's dtype; bounds: see above, of its dtype. Returns what
    attention takes.
    """
    num_heads, dim = q.shape[1:]
    source = Cache.of(cache)
    heads = Heads.of(num_heads, source.num_kv_heads, dim)
    assert source.head_dim == dim and q.dtype == cache.dtype == bounds.dtype and q[:1].is_contiguous()
    assert bounds.is_contiguous() and bounds.shape == (len(cache), source.num_kv_heads, 2, padded_dim(dim, q.dtype))
    memory.reserve(len(bounded), batch.block_tables.shape[1])
    memory.bounded[: len(bounded)] = np.array(bounded, dtype=np.int32)
    sequences = Sequences.of(batch, memory.struct)
    kernel = team.library.kernel("choose_blocks", _I, _P, _L, _P, _P, _P, _P)
    references = (ctypes.byref(part) for part in (heads, sequences, source))
    kernel(team.address, DTYPES[q.dtype], q.data_ptr(), q.stride(0), *references, bounds.data_ptr())
    return memory.struct
