"""Attention over KV that kv/kivi.py keeps.

A token reads the blocks before its own in 4 bits, from the pool, and its own block at full width, from the tail. What
it reads depends on the tokens and its position alone, not on how they are divided into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv.kivi import GROUP, widen_blocks
from .paged_batch import AttentionOptions, PagedBatch


def kivi_attention(
    q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, tails: Sequence[int], options: AttentionOptions
) -> Tensor:
    """Softmax(q K^T scale) V of every token over its own sequence, up to and with itself, in float32.

    q: [T, N, D]; pool: [num_blocks, 2, K, 20 D] uint8; tail: [num_tail_blocks, 2, 32, K, D]; N a multiple of K. batch:
    in blocks of 32 tokens, its sequences in any order. tails: of each sequence in order, the tail's blocks of its own
    blocks, those of its new tokens. Returns [T, N, D] contiguous, of q's dtype.
    """
    assert batch.block_size == GROUP
    out, row, place = torch.empty_like(q, memory_format=torch.contiguous_format), 0, 0
    for table, length, num_new in zip(batch.block_tables, batch.host_context_lens, batch.host_num_new, strict=True):
        first, end = length - num_new, row + num_new
        while row < end:
            own = first // GROUP
            last = min((own + 1) * GROUP, length)
            rows = slice(row, row + last - first)
            keys, values, start = _seen(pool, tail[tails[place]], table, range(first, last), options.window)
            out[rows] = _attend(q[rows], keys, values, first - start, options)
            row, first, place = rows.stop, last, place + 1
    assert row == len(q) and place == len(tails)
    return out


def _seen(pool: Tensor, own: Tensor, table: Tensor, positions: range, window: int) -> tuple[Tensor, Tensor, int]:
    """own: [2, 32, K, D], the block of these positions; table: [blocks]. Returns the keys and values that they see,
    each [L, K, D] float32, and the position of the first one."""
    number = positions.start // GROUP
    oldest = min(max(positions.start + 1 - window, 0) // GROUP, number) if window else 0
    keys, values = widen_blocks(pool, table[oldest:number].long())
    own_keys, own_values = own[:, : positions.stop - number * GROUP].float()
    return torch.cat((keys, own_keys)), torch.cat((values, own_values)), oldest * GROUP


def _attend(q: Tensor, keys: Tensor, values: Tensor, first: int, options: AttentionOptions) -> Tensor:
    """q: [T, N, D], of the last T of the keys and values, each [L, K, D] float32; first: the place of the first query
    among these. Returns [T, N, D] float32."""
    num_rows, num_heads, dim = q.shape
    group = num_heads // keys.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
    scores = q.transpose(0, 1).float() @ keys.mT * options.scale_of(dim)  # [N, T, L]
    if options.softcap:
        scores = (scores / options.softcap).tanh() * options.softcap
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril_(first)
    if options.window:
        seen.triu_(first - options.window + 1)
    scores.masked_fill_(~seen, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[:, None, None].expand(-1, num_rows, 1)), dim=2)
    weights = scores.softmax(dim=2)[:, :, : values.shape[1]]
    return (weights @ values).transpose(0, 1)
