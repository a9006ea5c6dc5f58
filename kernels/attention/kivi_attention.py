"""Attention over KV that kv/kivi.py keeps.

A token reads the blocks before its own in 4 bits, from the pool, and its own block at full width, from the tail. What
it reads depends on the tokens and its position alone, not on how they are divided into steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import kernel_for
from ..kv.kivi import GROUP, widen_blocks
from .kivi_kernels import kivi_attention_triton
from .paged_batch import AttentionOptions, PagedBatch


def kivi_attention(
    q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, slots: Tensor, options: AttentionOptions
) -> Tensor:
    """Softmax(q K^T scale) V of every token over its own sequence, up to and with itself.

    q: [T, N, D]; pool: [num_blocks, 2, K, 20 D] uint8; tail: [num_tail_blocks, 2, 32, K, D] of q's dtype; N a multiple
    of K. batch: in blocks of 32 tokens. slots: [T or more] int64, where in the tail each token's KV is: its own block
    is slot // 32; below 0: the token is idle, and may read anything. Returns [T, N, D] contiguous, of q's dtype.
    """
    return kernel_for(q, kivi_attention_triton, kivi_attention_twin)(q, pool, tail, batch, slots, options)


def kivi_attention_twin(
    q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, slots: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute it in float32. The sequences may be in any order."""
    assert batch.block_size == GROUP
    if not batch.host_context_lens:
        rows, out = batch.looked_up(), torch.zeros_like(q, memory_format=torch.contiguous_format)
        busy = rows.context_lens.nonzero()[:, 0]
        if len(busy):
            out[busy] = kivi_attention_twin(q[busy], pool, tail, rows.decodes(busy), slots[busy], options)
        return out
    out, row = torch.empty_like(q, memory_format=torch.contiguous_format), 0
    blocks = (slots // GROUP).clamp_min(0)
    for table, length, num_new in zip(batch.block_tables, batch.host_context_lens, batch.host_num_new, strict=True):
        first, end = length - num_new, row + num_new
        while row < end:
            own = first // GROUP
            last = min((own + 1) * GROUP, length)
            rows = slice(row, row + last - first)
            keys, values, start = _seen(pool, tail[blocks[row]], table, range(first, last), options.window)
            out[rows] = _attend(q[rows], keys, values, first - start, options)
            row, first = rows.stop, last
    assert row == len(q)
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
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril_(first)
    if options.window:
        seen.triu_(first - options.window + 1)
    scores.masked_fill_(~seen, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[:, None, None].expand(-1, num_rows, 1)), dim=2)
    weights = scores.softmax(dim=2)[:, :, : values.shape[1]]
    return (weights @ values).transpose(0, 1)
