"""Choice of the blocks of a context that a query attends to, by their scores (QUEST, Tang et al. 2024, section 3.3).

Of each KV head the best blocks, and always the first and the two newest, in the order of the context; of equal scores
the earlier ones. The kernel sorts nothing: it finds the least score that is chosen by halving the range of floats, then
writes the blocks in order. It reads as much as a context has, however wide the tables are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl
from .decode_plan import Decodes

MIN_CHOSEN = 3  # those that are always chosen
_NEWEST = 2
_TILE = 1024  # blocks that a program looks at together


def choose_blocks(scores: Tensor, block_tables: Tensor, context_lens: Tensor, most: int, block_size: int) -> Decodes:
    """The `most` best blocks of each KV head, in order, the first and the two newest among them. Waits for nothing.

    scores: [S, K, blocks] of score_blocks; block_tables: [S, blocks] int32; context_lens: [S] int32. Attention over
    the Decodes sees what is left of each context (a shorter one than `most` blocks: all of it).
    """
    num_blocks, left = after_choice(context_lens, most, block_size)
    tables = kernel_for(scores, choose_tables_triton, choose_tables_twin)(scores, block_tables, num_blocks, most)
    starts = torch.arange(len(scores) + 1, dtype=torch.int32, device=scores.device)
    return Decodes(tables, left, starts, max_queries=1)


def after_choice(context_lens: Tensor, most: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Number of blocks of each context, and number of tokens that are left of it; context_lens: [S] int32, as both."""
    num_blocks = (context_lens + (block_size - 1)) // block_size
    return num_blocks, context_lens - (num_blocks - most).clamp(min=0) * block_size


def choose_tables_twin(scores: Tensor, block_tables: Tensor, num_blocks: Tensor, most: int) -> Tensor:
    """Compute what choose_tables_triton does."""
    num_kv_heads, width = scores.shape[1:]
    assert most >= MIN_CHOSEN
    most, place = min(most, width), torch.arange(width, device=scores.device)
    last = (num_blocks.long() - 1).clamp(min=0)
    always = torch.stack((torch.zeros_like(last), (last - 1).clamp(min=0), last), dim=1)
    finite = scores.nan_to_num(nan=torch.finfo(torch.float32).max)
    wanted = finite.masked_fill((place >= num_blocks[:, None])[:, None], -torch.inf)
    wanted.scatter_(2, always[:, None].expand(-1, num_kv_heads, -1), torch.inf)
    best, order = wanted.sort(dim=2, descending=True, stable=True)
    # Places that are none go behind the last, in which the context ends.
    places = order[..., :most].masked_fill(best[..., :most] == -torch.inf, width).sort(dim=2).values
    return block_tables[:, None].expand(-1, num_kv_heads, -1).gather(2, places.clamp(max=width - 1))


def choose_tables_triton(scores: Tensor, block_tables: Tensor, num_blocks: Tensor, most: int) -> Tensor:
    """Tables of the chosen blocks, [S, K, most] int32; after the blocks of a short context, any that is valid.

    scores: [S, K, blocks] float32 contiguous, of what is beyond num_blocks ([S] int32) any; block_tables: [S, blocks]
    int32. At most all blocks are chosen.
    """
    num_seqs, num_kv_heads, width = scores.shape
    assert most >= MIN_CHOSEN and scores.dtype == torch.float32 and scores.is_contiguous()
    assert block_tables.dtype == num_blocks.dtype == torch.int32 and block_tables.shape == (num_seqs, width)
    assert block_tables.stride(1) == 1 and num_blocks.is_contiguous() and len(num_blocks) == num_seqs
    most = min(most, width)
    chosen = torch.empty(num_seqs, num_kv_heads, most, dtype=torch.int32, device=scores.device)
    _choose_tables_kernel[(num_seqs, num_kv_heads)](
        scores,
        block_tables,
        num_blocks,
        chosen,
        width,
        block_tables.stride(0),
        most,
        NEWEST=_NEWEST,
        TILE=_TILE,
    )
    return chosen


@jit
def in_order(scores: tl.tensor):
    """Whole numbers in the order of the floats."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _choose_tables_kernel(
    scores: tl.tensor,  # [S, K, width] float32
    block_tables: tl.tensor,  # [S, width] int32
    num_blocks: tl.tensor,  # [S] int32
    chosen: tl.tensor,  # [S, K, most] int32
    width: int,
    table_stride: int,
    most: int,
    NEWEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (S, K)."""
    seq = tl.program_id(0).to(tl.int64)
    head = seq * tl.num_programs(1) + tl.program_id(1)
    num = tl.load(num_blocks + seq)
    # A short context is chosen whole, as if all of it were new.
    first_newest = tl.where(num > most, num - NEWEST, 1)
    wanted = most - 1 - NEWEST
    own, table, to = scores + head * width, block_tables + seq * table_stride, chosen + head * most
    # Of the candidates, at least `wanted` are not below `low`, and fewer are not below `high`.
    low = tl.full((), -(1 << 31), tl.int64)
    high = tl.full((), 1 << 31, tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = 0
        for start in range(0, first_newest, TILE):
            i = start + tl.arange(0, TILE)
            is_candidate = (i >= 1) & (i < first_newest)
            key = in_order(tl.load(own + i, mask=is_candidate, other=0.0))
            count += tl.sum((is_candidate & (key >= middle)).to(tl.int32), 0)  # pyright: ignore[reportOperatorIssue]
        is_low = count >= wanted
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    num_above = 0
    for start in range(0, first_newest, TILE):
        i = start + tl.arange(0, TILE)
        is_candidate = (i >= 1) & (i < first_newest)
        key = in_order(tl.load(own + i, mask=is_candidate, other=0.0))
        num_above += tl.sum((is_candidate & (key > low)).to(tl.int32), 0)  # pyright: ignore[reportOperatorIssue]
    num_equal = wanted - num_above
    num_written = 0
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        is_candidate = (i >= 1) & (i < first_newest)
        key = in_order(tl.load(own + i, mask=is_candidate, other=0.0))
        equal = (is_candidate & (key == low)).to(tl.int32)
        is_first_equal = (equal > 0) & (tl.cumsum(equal, 0) <= num_equal)
        is_above = is_candidate & (key > low)
        is_taken = (i < num) & ((i == 0) | (i >= first_newest) | is_above | is_first_equal)
        taken = is_taken.to(tl.int32)
        block = tl.load(table + i, mask=is_taken, other=0)
        tl.store(to + num_written + tl.cumsum(taken, 0) - taken, block, mask=is_taken)
        num_written += tl.sum(taken, 0)  # pyright: ignore[reportOperatorIssue]
        num_equal -= tl.sum(equal, 0)
    any_block = tl.load(table)
    for start in range(0, most, TILE):
        i = start + tl.arange(0, TILE)
        tl.store(to + i, any_block, mask=(i >= num_written) & (i < most))
