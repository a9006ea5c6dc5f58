"""Causal grouped-query attention of a ragged batch over the paged KV cache: decodes and prefill chunks alike."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..common.lang import kernel_for
from ..common.tuning import chip_of
from .decode_attention import decode_attention_triton
from .decode_plan import DecodePlan, Decodes, decode_config, plan_decode
from .paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from .prefill_attention import prefill_attention_triton, prefill_attention_twin


def paged_attention(
    q: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
) -> Tensor:
    """Softmax(q K^T scale) V of every token over its own sequence, up to and with itself.

    q: [T, N, D]; cache: [num_blocks, 2, block_size, K, D], last axes contiguous, of q's dtype or of 8 bits with
    `scales` (kv_scales.py); N a multiple of K. Returns [T, N, D] contiguous.
    """
    run = kernel_for(q, paged_attention_triton, paged_attention_twin)
    return run(q, cache, batch, options, scales)


def paged_attention_twin(
    q: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
) -> Tensor:
    if not batch.host_context_lens:
        rows, out = batch.looked_up(), torch.zeros_like(q, memory_format=torch.contiguous_format)
        busy = rows.context_lens.nonzero()[:, 0]
        if len(busy):
            out[busy] = paged_attention_twin(q[busy], cache, rows.decodes(busy), options, scales)
        return out
    if not options.are_default or scales is not None:
        return prefill_attention_twin(q, cache, batch, options, scales)
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

    # The query heads of one KV head are the rows of one small matrix, so no KV head is repeated.
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, dim)
    out = scaled_dot_product_attention(grouped, gathered(0), gathered(1), attn_mask=bias.to(q.dtype))
    return out.reshape(num_seqs, num_heads, dim)


def _chunk(q: Tensor, cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """q: [T, N, D], the last T of one sequence's `context_len` tokens; block_table: [blocks]. Returns [T, N, D]."""
    num_new = q.shape[0]
    keys, values = _context(cache, block_table, context_len)
    mask = None
    if num_new < context_len:
        mask = torch.ones(num_new, context_len, dtype=torch.bool, device=q.device).tril_(context_len - num_new)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _context(cache: Tensor, block_table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, each [K, context_len, D]."""
    block_size, num_kv_heads, dim = cache.shape[2:]
    blocks = block_table[: -(-context_len // block_size)]
    keys, values = (
        cache[:, which].index_select(0, blocks).view(-1, num_kv_heads, dim)[:context_len].transpose(0, 1)
        for which in (0, 1)
    )
    return keys, values


def paged_attention_triton(
    q: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
) -> Tensor:
    """Decodes by decode_attention.py, the other sequences by prefill_attention.py or the batch's library."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.num_decodes:
        decodes, plan = _decodes_of(batch, cache, options.window)
        decode_attention_triton(q, cache, decodes, plan, options, scales, out)
    if batch.num_decodes < len(batch.host_num_new):
        library = batch.library
        if library is not None and library.takes(q, cache, options, scales):
            library.attend(q, cache, batch, options, out, batch.num_decodes)
        else:
            prefill_attention_triton(q, cache, batch, options, scales, out, first_seq=batch.num_decodes)
    return out


def _decodes_of(batch: PagedBatch, cache: Tensor, window: int) -> tuple[Decodes, DecodePlan]:
    """The sequences that decode, and where they are cut: made once a step for all layers alike."""
    key = ("decodes", cache.shape[3:], cache.dtype, window)
    if key not in batch.plans:
        n = batch.num_decodes
        of = batch.block_tables[:n], batch.context_lens[:n], batch.query_starts[: n + 1]
        decodes = Decodes(*of, batch.max_queries)
        config = decode_config(chip_of(cache.device), cache)
        batch.plans[key] = decodes, plan_decode(decodes, cache.shape[3], config, window)
    return batch.plans[key]
