"""Sparse attention with torch: the decodes of a step that attend to some of their blocks alone (QUEST)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.attention.decode_attention import decode_attention_twin
from ....kernels.attention.decode_plan import plan_decode_twin
from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import AttentionOptions, PagedBatch
from ....kernels.attention.quest import score_blocks_twin, summarise_twin
from ....kernels.attention.quest_choice import choose_blocks

_TILE = 256  # slots: what is attended to at once is four of these at least


@dataclass(frozen=True, slots=True)
class SparseStep:
    """n sparse decodes of a step of T rows, and its other sequences."""

    rows: Tensor  # [n] int64: their rows of the queries
    tables: Tensor  # [n, B] int32
    context_lens: Tensor  # [n] int32
    changed: Tensor  # [c] int64: blocks of theirs whose bounds are to be computed
    lengths: Tensor  # [c] int32: slots of these
    num_chosen: int  # blocks that each attends to
    other_rows: Tensor  # [T - n] int64
    others: PagedBatch

    def attend(self, q: Tensor, cache: Tensor, bounds: Tensor, options: AttentionOptions) -> Tensor:
        """q: [T, N, D]; cache: [num_blocks, 2, block_size, K, D], of one layer; bounds: its KeyBounds, brought up to
        date. Returns [T, N, D]."""
        queries, block_size = q[self.rows], cache.shape[2]
        summaries = bounds[..., : q.shape[2]].transpose(1, 2)
        summarise_twin(cache, summaries, self.changed, self.lengths)
        num_blocks = -(-self.context_lens // block_size)
        scores = score_blocks_twin(queries, summaries, self.tables, num_blocks)
        chosen = choose_blocks(scores, self.tables, self.context_lens, self.num_chosen, block_size)
        plan = plan_decode_twin(chosen, 1, len(self.rows), _TILE)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[self.rows] = decode_attention_twin(queries, cache, chosen, plan, options)
        if len(self.other_rows):
            out[self.other_rows] = paged_attention(q[self.other_rows], cache, self.others, options)
        return out
