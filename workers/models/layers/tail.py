"""Attention where blocks of the KV cache are rounded once they are full, and are in the KV tail until then."""

from dataclasses import dataclass

from torch import Tensor

from ....kernels.attention.kivi_attention import kivi_attention
from ....kernels.attention.paged_batch import AttentionOptions, PagedBatch
from ....kernels.kv.kivi import round_blocks
from ...device.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class TailStep:
    """Places in the KV tail of a step's tokens, for all its layers."""

    slots: Tensor  # [T] int64: where each token's KV goes; below 0: nowhere
    # [F, 2] int64: a block of the tail that the step fills, and the cache's block that it is rounded to; below 0: none
    filled: Tensor

    def attend(
        self, q: Tensor, cache: KVCache, kv_id: int, paged: PagedBatch, options: AttentionOptions, *, stores: bool
    ) -> Tensor:
        """Round the blocks that are full now, where this layer has stored its KV (`stores`). Then each token attends to
        the blocks before its own, and to its own block in the tail. q: [T, N, D]. Returns [T, N, D]. kv_id: the cache's
        layer."""
        pool, tail = cache.layer(kv_id), cache.tail[kv_id]
        if stores and len(self.filled):
            round_blocks(tail, pool, self.filled)
        return kivi_attention(q, pool, tail, paged, self.slots, options)
