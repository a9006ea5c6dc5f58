"""Attention over the blocks that matter to a query (QUEST, Tang et al. 2024): a long context is read in part.

    summaries  [num_blocks, 2, K, D]   smallest and largest of each number of a block's keys, kept as blocks fill
    scores     of a block: the most that a query's product with any key of such a block can be (section 3.3), and over
               the query heads that share a KV head the largest of those
    choice     the best blocks of each KV head, and always the first and the two newest: quest_choice.py

The choice is a table of blocks as any other: decode_attention.py reads it. sparse_attention.py does all of it for a
layer; cpu/sparse.py has the same, compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, next_power_of_2, tl
from .attention_tiles import HALVES

_BLOCKS_AT_ONCE = 32


def summarise_twin(cache: Tensor, summaries: Tensor, blocks: Tensor, lengths: Tensor) -> None:
    """Compute what summarise_triton does."""
    blocks, lengths = blocks[lengths > 0], lengths[lengths > 0]
    used = torch.arange(cache.shape[2], device=cache.device) < lengths[:, None]
    keys = cache[blocks, 0]
    for which, (most, reduce) in enumerate(((torch.inf, torch.amin), (-torch.inf, torch.amax))):
        summaries[blocks, which] = reduce(keys.masked_fill(~used[:, :, None, None], most), dim=1)


def summarise_triton(cache: Tensor, summaries: Tensor, blocks: Tensor, lengths: Tensor) -> None:
    """Summarise anew the blocks that a step has written to.

    cache: [num_blocks, 2, block_size, K, D] of floats; summaries: [num_blocks, 2, K, D] of its dtype, written at
    `blocks`: [B] int64, of which `lengths` [B] int32 slots hold keys; 0: it is left as it is. Last axes contiguous.
    """
    block_size, num_kv_heads, dim = cache.shape[2:]
    assert summaries.shape == (len(cache), 2, num_kv_heads, dim) and summaries.dtype == cache.dtype
    assert cache.dtype in (*HALVES, torch.float32) and cache.stride(4) == summaries.stride(3) == 1
    assert blocks.dtype == torch.int64 and lengths.dtype == torch.int32 and len(blocks) == len(lengths)
    assert blocks.stride(0) == lengths.stride(0) == 1
    if len(blocks):
        _summarise_kernel[(len(blocks), num_kv_heads)](
            cache,
            summaries,
            blocks,
            lengths,
            cache.stride(0),
            *cache.stride()[2:4],
            *summaries.stride()[:3],
            DIM=dim,
            BLOCK_D=next_power_of_2(dim),
            SLOTS=next_power_of_2(block_size),
        )


def score_blocks_twin(q: Tensor, summaries: Tensor, block_tables: Tensor, num_blocks: Tensor) -> Tensor:
    """Compute what score_blocks_triton does; -inf beyond a sequence's blocks."""
    num_seqs, num_heads, dim = q.shape
    num_kv_heads = summaries.shape[2]
    smallest, largest = (summaries[block_tables.long(), which].float() for which in (0, 1))
    used = torch.arange(block_tables.shape[1], device=q.device) < num_blocks[:, None]
    queries = q.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = torch.full((num_seqs, num_kv_heads, block_tables.shape[1]), -torch.inf, device=q.device)
    for s in range(num_seqs):
        low, high = smallest[s, used[s]], largest[s, used[s]]
        best = torch.maximum(
            queries[s, :, :, None] * low.transpose(0, 1)[:, None],
            queries[s, :, :, None] * high.transpose(0, 1)[:, None],
        )
        scores[s][:, used[s]] = best.sum(-1).amax(1)
    return scores


def score_blocks_triton(q: Tensor, summaries: Tensor, block_tables: Tensor, num_blocks: Tensor) -> Tensor:
    """The most that a key of each block can score. What is beyond a sequence's blocks is not written.

    q: [S, N, D], one new token each; summaries: [num_blocks, 2, K, D] of q's dtype, last axes contiguous; block_tables:
    [S, blocks] int32; num_blocks: [S] int32, of each sequence. Returns [S, K, blocks] float32.
    """
    num_seqs, num_heads, dim = q.shape
    num_kv_heads, width = summaries.shape[2], block_tables.shape[1]
    assert num_heads % num_kv_heads == 0 and summaries.shape[3] == dim and q.stride(2) == summaries.stride(3) == 1
    assert q.dtype == summaries.dtype and q.dtype in (*HALVES, torch.float32)
    assert block_tables.dtype == num_blocks.dtype == torch.int32
    assert block_tables.stride(1) == num_blocks.stride(0) == 1 and len(block_tables) == len(num_blocks) == num_seqs
    scores = torch.empty(num_seqs, num_kv_heads, width, dtype=torch.float32, device=q.device)
    _score_blocks_kernel[(-(-width // _BLOCKS_AT_ONCE), num_kv_heads, num_seqs)](
        q,
        summaries,
        block_tables,
        num_blocks,
        scores,
        *q.stride()[:2],
        *summaries.stride()[:3],
        block_tables.stride(0),
        width,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        BLOCK_M=max(16, next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_D=max(16, next_power_of_2(dim)),
        BLOCKS=_BLOCKS_AT_ONCE,
    )
    return scores


@jit
def _summarise_kernel(
    cache: tl.tensor,  # [num_blocks, 2, block_size, K, DIM]
    summaries: tl.tensor,  # [num_blocks, 2, K, DIM]
    blocks: tl.tensor,  # [B] int64
    lengths: tl.tensor,  # [B] int32
    cache_block_stride: int,
    cache_slot_stride: int,
    cache_head_stride: int,
    summary_block_stride: int,
    summary_kind_stride: int,
    summary_head_stride: int,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid: (B, K)."""
    block = tl.load(blocks + tl.program_id(0))
    length = tl.load(lengths + tl.program_id(0))
    kv_head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, SLOTS)
    address = cache + block * cache_block_stride + kv_head * cache_head_stride
    inside = (slot < length)[:, None] & (d < DIM)[None, :]
    keys = tl.load(address + slot[:, None] * cache_slot_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    smallest = tl.min(tl.where(inside, keys, float("inf")), 0)
    largest = tl.max(tl.where(inside, keys, float("-inf")), 0)
    target = summaries + block * summary_block_stride + kv_head * summary_head_stride + d
    if length > 0:
        tl.store(target, smallest, mask=d < DIM)
        tl.store(target + summary_kind_stride, largest, mask=d < DIM)


@jit
def _score_blocks_kernel(
    q: tl.tensor,  # [S, K * GROUP, DIM]
    summaries: tl.tensor,  # [num_blocks, 2, K, DIM]
    block_tables: tl.tensor,  # [S, width] int32
    num_blocks: tl.tensor,  # [S] int32
    scores: tl.tensor,  # [S, K, width] float32 contiguous
    q_seq_stride: int,
    q_head_stride: int,
    summary_block_stride: int,
    summary_kind_stride: int,
    summary_head_stride: int,
    table_stride: int,
    width: int,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid: (ceil(width / BLOCKS), K, S). sum(max(q low, q high)) is max(q, 0) high + min(q, 0) low: two products."""
    seq = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    start, num = tl.program_id(0) * BLOCKS, tl.load(num_blocks + seq)
    if start < num:
        place = start + tl.arange(0, BLOCKS)
        used = place < num
        block = tl.load(block_tables + seq * table_stride + place, mask=used, other=0).to(tl.int64)
        row = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        inside = (row < GROUP)[:, None] & (d < DIM)[None, :]
        head = kv_head * GROUP + row
        query = tl.load(q + seq * q_seq_stride + (head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
        address = summaries + (block * summary_block_stride + kv_head * summary_head_stride)[:, None] + d[None, :]
        inside = used[:, None] & (d < DIM)[None, :]
        smallest = tl.load(address, mask=inside, other=0.0)
        largest = tl.load(address + summary_kind_stride, mask=inside, other=0.0)
        zero = tl.zeros((BLOCK_M, BLOCK_D), query.dtype)
        # Triton 3.6 gives the larger of two bfloat16 as float32.
        positive, negative = tl.maximum(query, zero).to(query.dtype), tl.minimum(query, zero).to(query.dtype)
        score = tl.dot(positive, tl.trans(largest), input_precision="ieee")
        score = tl.dot(negative, tl.trans(smallest), score, input_precision="ieee")
        best = tl.max(tl.where((row < GROUP)[:, None], score, float("-inf")), 0)
        tl.store(scores + (seq * tl.num_programs(1) + kv_head) * width + place, best, mask=used)
