"""Bounds of the keys of each block, beside the KV pool: what sparse attention chooses blocks by (QUEST).

    of a layer   [num_blocks, K, 2, padded D], of the pool's dtype: smallest and largest number of each dimension

They say nothing of themselves: `Bounded` (execution/common/bounded.py) knows for which of a sequence's blocks they
stand. They take 1 / block_size of the pool's memory: on the host where blocks were used, on a GPU all of it at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.cpu.sparse import padded_dim
from ..common.memory import huge_page_mapping
from ..kv.layout import DOT, KVLayout
from .device_errors import LESS_KV, needing_memory


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """`layers`: by layer of the model that is served, of those that attend sparsely: to `budget` tokens of a longer
    context."""

    layers: Mapping[int, Tensor]
    budget: int = 0
    num_chosen: int = 0  # blocks of the budget

    @classmethod
    def of(cls, caches: Mapping[int, Tensor], layout: KVLayout, budget: int) -> "KeyBounds":
        """caches: by layer, as KVCache.layer gives them, in the packing of the target's layers; bounds are where they
        are. Raises ConfigError if the memory is not to be had."""
        layers = {i: _zeros(_shape(cache, layout), cache) for i, cache in caches.items()}
        return cls(layers, budget, budget // layout.block_size)


NO_BOUNDS = KeyBounds({})
_LESS = f"{LESS_KV}, or leave sparse_attention out"


def _shape(cache: Tensor, layout: KVLayout) -> Sequence[int]:
    """cache: a layer, in either packing."""
    if layout.packing == DOT:
        num_kv_heads, dim = cache.shape[2], cache.shape[3] * cache.shape[4] // layout.block_size
    else:
        num_kv_heads, dim = cache.shape[3:]
    return len(cache), num_kv_heads, 2, padded_dim(dim, cache.dtype)


def _zeros(shape: Sequence[int], cache: Tensor) -> Tensor:
    """Zeros of the dtype of `cache`. On the host, pages that are never written cost no memory."""
    dtype, num_bytes = cache.dtype, torch.Size(shape).numel() * cache.dtype.itemsize
    if not cache.is_cpu:
        with needing_memory("the bounds of keys", _LESS):
            return torch.zeros(*shape, dtype=dtype, device=cache.device)
    mapping = huge_page_mapping(num_bytes, _LESS)
    return torch.frombuffer(mapping, dtype=dtype, count=num_bytes // dtype.itemsize).view(*shape)
