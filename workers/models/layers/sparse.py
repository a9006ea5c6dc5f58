"""Sparse attention of a step: the decodes that attend to some of their blocks alone (QUEST), and its other sequences.

SparseStep has them apart, as the host knows them; SparseDecodes side by side, as a captured graph computes them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.attention.decode_attention import decode_attention_twin
from ....kernels.attention.decode_plan import plan_decode_twin
from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import AttentionOptions, PagedBatch
from ....kernels.attention.quest import score_blocks_twin, summarise_twin
from ....kernels.attention.quest_choice import choose_blocks
from ....kernels.attention.sparse_attention import SparseRows, sparse_attention

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


@dataclass(frozen=True, slots=True)
class SparseDecodes:
    """The first n rows of a step of T, of which some are sparse decodes. Of their contexts, the bounds of all blocks
    but the two newest stand."""

    rows: SparseRows  # n
    is_sparse: Tensor  # [n] bool
    others: PagedBatch  # of all rows: sparse ones have no context

    @classmethod
    def of(
        cls, paged: PagedBatch, tables: Tensor, is_sparse: Tensor, context_lens: Tensor, num: int
    ) -> "SparseDecodes":
        """paged: of all rows, each of the n a sequence of it, in order; tables: [n, B] int32; is_sparse: [n] bool;
        context_lens: [n] int32, 0 of other rows; num: blocks that a sparse row attends to."""
        others = paged.context_lens.clone()
        others[: len(is_sparse)].masked_fill_(is_sparse, 0)
        rows = SparseRows(tables, context_lens, num, paged.block_size)
        return cls(rows, is_sparse, replace(paged, context_lens=others, plans={}))

    def attend(self, q: Tensor, cache: Tensor, bounds: Tensor, options: AttentionOptions) -> Tensor:
        """Compute what SparseStep.attend does."""
        num = len(self.is_sparse)
        found = sparse_attention(q[:num], cache, bounds[..., : q.shape[2]].transpose(1, 2), self.rows, options)
        out = paged_attention(q, cache, self.others, options)
        out[:num] = torch.where(self.is_sparse[:, None, None], found, out[:num])
        return out
