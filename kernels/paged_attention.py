"""Causal grouped-query attention of a ragged batch over the paged KV cache: decodes and prefill chunks alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .lang import jit, next_power_of_2, tl


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


@dataclass(frozen=True)
class AttentionOptions:
    scale: float | None = None  # of the scores; None: 1 / sqrt(D)
    softcap: float = 0.0  # 0: none; else scores become softcap * tanh(score / softcap) (Gemma 2, section 2)
    window: int = 0  # 0: all; else a token sees so many, itself the last (Mistral 7B, section 2)
    sinks: Tensor | None = None  # [N] float32: a score of each head that takes weight and gives no value (gpt-oss)

    @property
    def are_default(self) -> bool:
        return self.scale is None and not self.softcap and not self.window and self.sinks is None

    def scale_of(self, dim: int) -> float:
        return 1.0 / math.sqrt(dim) if self.scale is None else self.scale


NO_OPTIONS = AttentionOptions()


def paged_attention(q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions = NO_OPTIONS) -> Tensor:
    """Softmax(q K^T / sqrt(D)) V of every token over its own sequence, up to and with itself.

    q: [T, N, D]; cache: [num_blocks, 2, block_size, K, D], last axes contiguous, of q's dtype; N a multiple of K.
    Returns [T, N, D] contiguous. The Triton kernel knows no options.
    """
    if q.is_cuda:
        assert options.are_default
        return paged_attention_triton(q, cache, batch)
    return paged_attention_twin(q, cache, batch, options)


def paged_attention_twin(q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions = NO_OPTIONS) -> Tensor:
    if not options.are_default:
        return _with_options(q, cache, batch, options)
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
    num_new = q.shape[0]
    keys, values = _context(cache, block_table, context_len)
    mask = None
    if num_new < context_len:
        mask = torch.ones(num_new, context_len, dtype=torch.bool).tril_(context_len - num_new)
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


def _with_options(q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """The same written out, in float32."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group, start = q.shape[1] // cache.shape[3], 0
    for s, (context_len, num_new) in enumerate(zip(batch.host_context_lens, batch.host_num_new, strict=True)):
        keys, values = (
            part.float().repeat_interleave(group, 0) for part in _context(cache, batch.block_tables[s], context_len)
        )
        scores = q[start : start + num_new].transpose(0, 1).float() @ keys.mT * options.scale_of(q.shape[2])
        if options.softcap:
            scores = (scores / options.softcap).tanh() * options.softcap
        seen = torch.ones(num_new, context_len, dtype=torch.bool).tril_(context_len - num_new)
        if options.window:
            seen.triu_(context_len - num_new - options.window + 1)
        scores.masked_fill_(~seen, float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks[:, None, None].expand(-1, num_new, 1)
            weights = torch.cat((scores, sinks), dim=2).softmax(dim=2)[:, :, :-1]
        else:
            weights = scores.softmax(dim=2)
        out[start : start + num_new] = (weights @ values).transpose(0, 1).to(q.dtype)
        start += num_new
    return out


def paged_attention_triton(q: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
    num_heads, dim = q.shape[1:]
    num_kv_heads = cache.shape[3]
    group = num_heads // num_kv_heads
    assert q.stride(-1) == 1 and cache.stride(-1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_rows = max(batch.host_num_new) * group
    block_m = 16 if num_rows <= 16 else 64
    _paged_attention_kernel[(-(-num_rows // block_m), num_kv_heads, len(batch.host_num_new))](
        q,
        cache,
        out,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        *q.stride()[:2],
        *cache.stride()[:4],
        *out.stride()[:2],
        batch.block_tables.stride(0),
        math.log2(math.e) / math.sqrt(dim),
        batch.block_size,
        GROUP=group,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=64 if dim <= 128 else 32,
        BLOCK_D=max(16, next_power_of_2(dim)),
    )
    return out


@jit
def _paged_attention_kernel(
    q: tl.tensor,  # [T, N, DIM]
    cache: tl.tensor,  # [num_blocks, 2, block_size, K, DIM]
    out: tl.tensor,  # [T, N, DIM]
    block_tables: tl.tensor,  # [S, max_blocks] int32
    context_lens: tl.tensor,  # [S] int32
    query_starts: tl.tensor,  # [S + 1] int32
    q_token_stride: int,
    q_head_stride: int,
    cache_block_stride: int,
    cache_kv_stride: int,
    cache_slot_stride: int,
    cache_head_stride: int,
    out_token_stride: int,
    out_head_stride: int,
    table_stride: int,
    scale: float,  # log2(e) / sqrt(DIM): exponentials are taken to base 2
    block_size: int,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (ceil(longest chunk * GROUP / BLOCK_M), K, S). Online softmax (FlashAttention-2, algorithm 1).

    Row r of a sequence is query head r % GROUP of new token r // GROUP: the heads that share a KV head share its loads,
    and a single decoded token still fills rows of the matrix product.
    """
    seq = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    query_start = tl.load(query_starts + seq).to(tl.int64)
    num_new = (tl.load(query_starts + seq + 1) - query_start).to(tl.int32)
    context_len = tl.load(context_lens + seq)
    if first_row < num_new * GROUP:
        row = first_row + tl.arange(0, BLOCK_M)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        position = context_len - num_new + token
        d = tl.arange(0, BLOCK_D)
        inside = (token < num_new)[:, None] & (d < DIM)[None, :]
        query_rows = (query_start + token)[:, None]
        query = tl.load(
            q + query_rows * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=inside, other=0.0
        )
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, num_new - 1)
        end = context_len - num_new + last_token + 1
        for start in range(0, end, BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            used = slot < end
            block = tl.load(block_tables + seq * table_stride + slot // block_size, mask=used, other=0).to(tl.int64)
            base = block * cache_block_stride + (slot % block_size) * cache_slot_stride + kv_head * cache_head_stride
            address = cache + base[:, None] + d[None, :]
            loaded = used[:, None] & (d < DIM)[None, :]
            key = tl.load(address, mask=loaded, other=0.0)
            value = tl.load(address + cache_kv_stride, mask=loaded, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(used[None, :] & (slot[None, :] <= position[:, None]), score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, 1))
            weight = tl.exp2(score - new_highest[:, None])
            decay = tl.exp2(highest - new_highest)
            total = total * decay + tl.sum(weight, 1)
            acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            highest = new_highest
        target = out + query_rows * out_token_stride + head[:, None] * out_head_stride + d[None, :]
        tl.store(target, (acc / total[:, None]).to(query.dtype), mask=inside)
