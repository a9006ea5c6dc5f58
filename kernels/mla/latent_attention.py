"""Attention of a step's sequences over latent KV as it is paged, for queries into which the projections are taken.

See decode.py for what is computed. A sequence of many new tokens is cut into pieces of MAX_QUERIES; each is to that
kernel a sequence of its own, which ends with the piece.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention.decode_plan import MAX_QUERIES, DecodePlan, Decodes
from ..attention.paged_batch import LatentLibrary, PagedBatch, sent
from ..common.lang import kernel_for
from .decode import mla_decode_triton, plan_mla_decode
from .prefill import attend_in_order

TOGETHER_BYTES = 24 << 20  # of contexts that the twin gathers at once: beyond, it is the memory that they wait for
MOST_PIECES = 32  # at once: each has max_queries * N rows of `rank` float32 for every split


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, batch: PagedBatch, sequences: range, scale: float
) -> Tensor:
    """softmax((q_latent latent^T + q_rope rope^T) scale) latent, up to and with the token itself.

    sequences: of the batch, side by side: all that decode, or others. q_latent: [T, N, rank] and q_rope: [T, N, rope],
    of their T new tokens, last axes contiguous; cache: [num_blocks, block_size, rank + rope], last axis contiguous.
    Returns [T, N, rank].
    """
    run = kernel_for(q_latent, latent_attention_triton, latent_attention_twin)
    return run(q_latent, q_rope, cache, batch, sequences, scale)


def latent_attention_twin(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, batch: PagedBatch, sequences: range, scale: float
) -> Tensor:
    if not batch.host_context_lens:
        rows = batch.looked_up()
        attended = latent_attention_twin(q_latent, q_rope, cache, rows, sequences, scale)
        return attended.masked_fill_((rows.context_lens == 0)[:, None, None], 0)
    q, rank = torch.cat((q_latent, q_rope), dim=2), q_latent.shape[2]
    if sequences.stop <= batch.num_decodes:
        return _decodes(q, cache, batch, scale)[..., :rank]
    out, start = torch.empty_like(q_latent, memory_format=torch.contiguous_format), 0
    for s in sequences:
        rows = slice(start, start + batch.host_num_new[s])
        seen = _context(cache, batch, s)[:, None].expand(-1, q.shape[1], -1)
        out[rows] = attend_in_order(q[rows], seen, seen, scale)[..., :rank]
        start = rows.stop
    return out


def _decodes(q: Tensor, cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """q: [S, N, D], of the sequences with one new token. Gathers all contexts, padded to the longest; one by one where
    together they would not stay in the processor's cache. Returns [S, N, D]."""
    num_seqs, dim = len(q), cache.shape[2]
    longest = max(batch.host_context_lens[:num_seqs])
    if num_seqs * longest * dim * cache.itemsize > TOGETHER_BYTES:
        each = (_over(q[s : s + 1], _context(cache, batch, s)[None], scale) for s in range(num_seqs))
        return torch.cat(list(each))
    bias, padding = batch.decode_padding
    rows = cache.index_select(0, batch.decode_blocks).flatten(0, 1)
    # What lies beyond a context may be anything, even NaN, and NaN survives a weight of zero.
    contexts = rows.index_fill_(0, padding, 0).view(num_seqs, -1, dim)
    return _over(q, contexts, scale, bias.to(q.dtype))


def _over(q: Tensor, contexts: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """q: [S, N, D]; contexts: [S, L, D]; bias: [S, 1, 1, L]. Returns [S, N, D].

    The heads are the rows of one small matrix: what they share is read once. Values are as wide as keys: torch's fused
    attention takes no others.
    """
    seen = contexts[:, None]
    return scaled_dot_product_attention(q[:, None], seen, seen, attn_mask=bias, scale=scale)[:, 0]


def _context(cache: Tensor, batch: PagedBatch, s: int) -> Tensor:
    """Return the cached latents of sequence s, [context, rank + rope]."""
    context_len = batch.host_context_lens[s]
    blocks = batch.block_tables[s, : -(-context_len // batch.block_size)]
    return cache.index_select(0, blocks).flatten(0, 1)[:context_len]


def latent_attention_triton(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, batch: PagedBatch, sequences: range, scale: float
) -> Tensor:
    calls = _calls_of(batch, cache, sequences, q_latent.shape[1], q_latent.shape[2])
    parts = [_attend(batch.latents, q_latent[of.rows], q_rope[of.rows], cache, of, scale) for of in calls]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    library: LatentLibrary | None, q_latent: Tensor, q_rope: Tensor, cache: Tensor, call: _Call, scale: float
) -> Tensor:
    inputs = q_latent, q_rope, cache, call.decodes
    if library is not None and library.takes(*inputs):
        return library.attend(*inputs, call.plan, scale)
    return mla_decode_triton(*inputs, call.plan, scale)


@dataclass(frozen=True)
class _Call:
    """Call of the kernel."""

    rows: slice  # of the queries
    decodes: Decodes
    plan: DecodePlan


def _calls_of(batch: PagedBatch, cache: Tensor, sequences: range, num_heads: int, rank: int) -> list[_Call]:
    """Made once a step for all layers alike."""
    key = ("latent", sequences, num_heads, rank, cache.dtype)
    if key not in batch.plans:
        if sequences.stop <= batch.num_decodes:
            n = sequences.stop
            of = batch.block_tables[:n], batch.context_lens[:n], batch.query_starts[: n + 1]
            made = [(slice(0, n), Decodes(*of, batch.max_queries))]
        else:
            made = _in_pieces(batch, sequences)
        batch.plans[key] = [_Call(*of, plan_mla_decode(of[1], cache, num_heads, rank)) for of in made]
    return batch.plans[key]


def _in_pieces(batch: PagedBatch, sequences: range) -> list[tuple[slice, Decodes]]:
    pieces: list[tuple[int, int, int]] = []  # sequence, new tokens, context with these
    for s in sequences:
        num_new, context_len = batch.host_num_new[s], batch.host_context_lens[s]
        for first in range(0, num_new, MAX_QUERIES):
            end = min(first + MAX_QUERIES, num_new)
            pieces.append((s, end - first, context_len - num_new + end))
    found: list[tuple[slice, Decodes]] = []
    start, device = 0, batch.block_tables.device
    for first in range(0, len(pieces), MOST_PIECES):
        of, lens, contexts = zip(*pieces[first : first + MOST_PIECES], strict=True)
        tables = batch.block_tables.index_select(0, sent(of, device))
        starts = sent([0, *itertools.accumulate(lens)], device)
        found.append((slice(start, start + sum(lens)), Decodes(tables, sent(contexts, device), starts, MAX_QUERIES)))
        start += sum(lens)
    return found
