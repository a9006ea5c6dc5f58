"""Attention of a layer's decodes to the blocks that matter of their contexts (QUEST): bounds, scores, choice, walk.

All is computed on the device, in shapes that follow from the number of rows and the width of the tables alone: a
captured graph serves contexts of any length. Of each sparse row's context the bounds of all blocks but the two newest
must stand (`summarise`); those of these two are computed anew, from all of their keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..common.lang import kernel_for
from ..common.tuning import chip_of
from .decode_attention import decode_attention_triton, decode_attention_twin
from .decode_plan import DecodePlan, Decodes, decode_config, plan_decode, plan_decode_twin
from .paged_batch import NO_OPTIONS, AttentionOptions
from .quest import score_blocks_triton, score_blocks_twin, summarise_triton, summarise_twin
from .quest_choice import after_choice, choose_tables_triton, choose_tables_twin

_TWIN_TILE = 256  # slots


@dataclass(frozen=True)
class SparseRows:
    """S rows, each the newest token of a sequence."""

    block_tables: Tensor  # [S, blocks] int32, padded with any valid block
    context_lens: Tensor  # [S] int32, with the newest token, whose KV is stored; 0: not a sparse row, it becomes zeros
    num_chosen: int  # blocks that a row attends to
    block_size: int
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # what kernels keep for all layers

    def newest(self) -> tuple[Tensor, Tensor]:
        """The two newest blocks of each row, [2 S] int64, and how many of their slots hold keys, [2 S] int32; 0 of rows
        that are not sparse."""
        last = (self.context_lens.long() - 1).clamp(min=0) // self.block_size
        places = torch.stack(((last - 1).clamp(min=0), last), dim=1)
        blocks = self.block_tables.gather(1, places).long()
        lengths = (self.context_lens[:, None] - places * self.block_size).clamp(max=self.block_size)
        return blocks.view(-1), lengths.view(-1).int()


def sparse_attention(
    q: Tensor, cache: Tensor, summaries: Tensor, rows: SparseRows, options: AttentionOptions = NO_OPTIONS
) -> Tensor:
    """Softmax(q K^T scale) V of each row over `num_chosen` blocks of its context, other blocks for each KV head.

    q: [S, N, D], last axis contiguous; cache: [num_blocks, 2, block_size, K, D] of q's dtype; summaries: [num_blocks,
    2, K, D] of that dtype, see quest.py, written at the two newest blocks of each row. options: without a window.
    Returns [S, N, D] contiguous.
    """
    assert not options.window
    return kernel_for(q, sparse_attention_triton, sparse_attention_twin)(q, cache, summaries, rows, options)


def sparse_attention_twin(
    q: Tensor, cache: Tensor, summaries: Tensor, rows: SparseRows, options: AttentionOptions = NO_OPTIONS
) -> Tensor:
    summarise_twin(cache, summaries, *rows.newest())
    num_blocks, left = after_choice(rows.context_lens, rows.num_chosen, rows.block_size)
    scores = score_blocks_twin(q, summaries, rows.block_tables, num_blocks)
    tables = choose_tables_twin(scores, rows.block_tables, num_blocks, rows.num_chosen)
    starts = torch.arange(len(left) + 1, dtype=torch.int32, device=left.device)
    decodes = Decodes(tables, left, starts, max_queries=1)
    # The plan has room for splits of one tile each.
    capacity = len(q) + int((-(-left // _TWIN_TILE)).sum())
    plan = plan_decode_twin(decodes, 1, capacity, _TWIN_TILE)
    return decode_attention_twin(q, cache, decodes, plan, options)


def sparse_attention_triton(
    q: Tensor, cache: Tensor, summaries: Tensor, rows: SparseRows, options: AttentionOptions = NO_OPTIONS
) -> Tensor:
    step = _step_of(rows)
    summarise_triton(cache, summaries, step.blocks, step.lengths)
    scores = score_blocks_triton(q, summaries, rows.block_tables, step.num_blocks)
    tables = choose_tables_triton(scores, rows.block_tables, step.num_blocks, rows.num_chosen)
    decodes = Decodes(tables, step.left, step.starts, max_queries=1)
    return decode_attention_triton(q, cache, decodes, _plan_of(rows, decodes, cache), options)


@dataclass(frozen=True)
class _SharedInputs:
    """Inputs that all layers of a step share."""

    blocks: Tensor  # as SparseRows.newest has them, as `lengths`
    lengths: Tensor
    num_blocks: Tensor  # [S] int32, as `left`: see after_choice
    left: Tensor
    starts: Tensor  # [S + 1] int32


def _step_of(rows: SparseRows) -> _SharedInputs:
    if "step" not in rows.plans:
        starts = torch.arange(len(rows.context_lens) + 1, dtype=torch.int32, device=rows.context_lens.device)
        left = after_choice(rows.context_lens, rows.num_chosen, rows.block_size)
        rows.plans["step"] = _SharedInputs(*rows.newest(), *left, starts)
    return rows.plans["step"]


def _plan_of(rows: SparseRows, decodes: Decodes, cache: Tensor) -> DecodePlan:
    key = cache.shape[3:], cache.dtype
    if key not in rows.plans:
        rows.plans[key] = plan_decode(decodes, cache.shape[3], decode_config(chip_of(cache.device), cache))
    return rows.plans[key]
