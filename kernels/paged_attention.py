"""Causal grouped-query attention of a ragged batch over the paged KV cache: decodes and prefill chunks alike."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of a step stand. S sequences; those with one new token come first.

    A sequence's `num_new` tokens are the last of its `context_lens` ones; their KV is already in the cache.
    """

    block_tables: Tensor  # [S, max_blocks] int32, padded with any valid block
    context_lens: Tensor  # [S] int32
    query_starts: Tensor  # [S + 1] int32: sequence s owns query rows query_starts[s] to query_starts[s + 1]
    host_context_lens: list[int]
    host_num_new: list[int]
    num_decodes: int
    block_size: int

    @cached_property
    def decode_blocks(self) -> Tensor:
        """[num_decodes * padded blocks] int64: what the twin gathers for its decodes."""
        longest = max(self.host_context_lens[: self.num_decodes])
        return self.block_tables[: self.num_decodes, : -(-longest // self.block_size)].reshape(-1).long()

    @cached_property
    def decode_padding(self) -> tuple[Tensor, Tensor]:
        """(bias [num_decodes, 1, 1, L] float32 of 0 and -inf, rows of the gathered KV beyond the contexts, int64)."""
        num_slots = self.decode_blocks.numel() // self.num_decodes * self.block_size
        beyond = torch.arange(num_slots) >= self.context_lens[: self.num_decodes, None]
        bias = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
        return bias[:, None, None, :], beyond.view(-1).nonzero().view(-1)


def paged_attention(q: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
    """Softmax(q K^T / sqrt(D)) V of every token over its own sequence, up to and with itself.

    q: [T, N, D]; cache: [num_blocks, 2, block_size, K, D], strided, of q's dtype; N a multiple of K.
    Returns [T, N, D] contiguous.
    """
    return paged_attention_twin(q, cache, batch)


def paged_attention_twin(q: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
    num_decodes = batch.num_decodes
    if num_decodes == q.shape[0]:
        return _decodes(q, cache, batch)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_decodes:
        out[:num_decodes] = _decodes(q[:num_decodes], cache, batch)
    start = num_decodes
    for s in range(num_decodes, len(batch.host_num_new)):
        end = start + batch.host_num_new[s]
        out[start:end] = _chunk(q[start:end], cache, batch.block_tables[s], batch.host_context_lens[s])
        start = end
    return out


def _decodes(q: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
    """q: [S, N, D], one row a sequence. Gathers all contexts, padded to the longest; returns [S, N, D]."""
    num_seqs, num_heads, dim = q.shape
    num_kv_heads = cache.shape[3]
    bias, padding = batch.decode_padding

    def gathered(which: int) -> Tensor:
        rows = cache[:, which].index_select(0, batch.decode_blocks).view(-1, num_kv_heads, dim)
        # What lies beyond a context may be anything, even NaN, and NaN survives a weight of zero.
        return rows.index_fill_(0, padding, 0).view(num_seqs, -1, num_kv_heads, dim).transpose(1, 2)

    # The query heads of one KV head are the rows of one small matrix: no KV head is repeated.
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, dim)
    out = scaled_dot_product_attention(grouped, gathered(0), gathered(1), attn_mask=bias.to(q.dtype))
    return out.reshape(num_seqs, num_heads, dim)


def _chunk(q: Tensor, cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """q: [T, N, D], the last T of one sequence's `context_len` tokens; block_table: [blocks]. Returns [T, N, D]."""
    num_new, _, dim = q.shape
    block_size, num_kv_heads = cache.shape[2], cache.shape[3]
    blocks = block_table[: -(-context_len // block_size)]
    keys, values = (
        cache[:, which].index_select(0, blocks).view(-1, num_kv_heads, dim)[:context_len].transpose(0, 1)[None]
        for which in (0, 1)
    )
    mask = None
    if num_new < context_len:
        mask = torch.ones(num_new, context_len, dtype=torch.bool).tril_(context_len - num_new)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)
