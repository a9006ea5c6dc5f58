"""Attention of decodes over the paged cache, each of 1 to 16 new tokens (FlashDecoding, Dao et al. 2023).

Every program reads one split of a context (decode_plan.py) of one KV head, for all query rows that share it. Then the
splits of a row are merged by their log-sum-exps; a context of one split is written at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.dependent_launch import dependent_launch, follow_previous, prefetch_lines
from ..common.lang import jit, next_power_of_2, tl
from ..common.tuning import chip_of
from ..kv.kv_scales import dequantise
from .attention_tiles import begin_softmax, check_paged, find_split, output_for, scale_strides, walk
from .decode_plan import DecodePlan, Decodes, decode_config, first_slots, tile_rows
from .paged_batch import NO_OPTIONS, AttentionOptions
from .stored_bytes import apart, columns, layout_of, queries, stored_words, together, widening_of

_MERGED_AT_ONCE = 32


def decode_attention_twin(
    q: Tensor,
    cache: Tensor,
    decodes: Decodes,
    plan: DecodePlan,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute what decode_attention_triton does, in float32: attend to each of the same splits, then merge them."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, group = cache.shape[3], num_heads // cache.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    num_queries = decodes.query_starts.diff()
    first = first_slots(decodes.context_lens, num_queries, plan.window, plan.slots).tolist()
    for s, context_len in enumerate(decodes.context_lens.tolist()):
        rows = slice(int(decodes.query_starts[s]), int(decodes.query_starts[s + 1]))
        position = torch.arange(context_len - (rows.stop - rows.start), context_len, device=q.device)
        partial: list[tuple[Tensor, Tensor]] = []
        for begin in range(first[s], context_len, int(plan.split)):
            slot = torch.arange(begin, min(begin + int(plan.split), context_len), device=q.device)
            keys, values = _slots(cache, scales, decodes.block_tables[s], slot)
            queries = q[rows].float().view(-1, num_kv_heads, group, dim)
            scores = torch.einsum("tkgd,jkd->tkgj", queries, keys) * options.scale_of(dim)
            if options.softcap:
                scores = (scores / options.softcap).tanh() * options.softcap
            seen = slot <= position[:, None]
            if options.window:
                seen &= slot > position[:, None] - options.window
            scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
            partial.append((scores.softmax(-1).nan_to_num() @ values.transpose(0, 1)[None], scores.logsumexp(-1)))
        if options.sinks is not None and context_len:
            sink = options.sinks.view(1, num_kv_heads, group).expand(len(position), -1, -1)
            partial.append((torch.zeros_like(partial[0][0]), sink))
        if partial:
            values, sums = (torch.stack(parts) for parts in zip(*partial, strict=True))
            out[rows] = (sums.softmax(0)[..., None] * values).sum(0).flatten(1, 2)
    return out.to(q.dtype)


def _slots(cache: Tensor, scales: Tensor | None, table: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence's slots, each [slots, K, D] float32. table: [blocks] or [K, blocks]."""
    block_size, num_kv_heads = cache.shape[2:4]
    blocks = table.expand(num_kv_heads, -1)[:, slot // block_size].long().T
    heads = torch.arange(num_kv_heads, device=cache.device)
    parts: list[Tensor] = []
    for which in (0, 1):
        place = (blocks, which, (slot % block_size)[:, None], heads)
        parts.append(cache[place].float() if scales is None else dequantise(cache[place], scales[place]))
    return parts[0], parts[1]


def decode_attention_triton(
    q: Tensor,
    cache: Tensor,
    decodes: Decodes,
    plan: DecodePlan,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax(q K^T scale) V of each new token over its sequence, up to and with itself.

    q: [T, N, D], last axis contiguous; cache: [num_blocks, 2, block_size, K, D], last axis contiguous, of q's dtype or
    of 8 or 4 bits (then D / 2 bytes, D a multiple of 4) with `scales` (kv_scales.py). plan: made of the same decodes,
    KV heads and window. Writes the rows of the sequences into `out`, [T, N, D] of any strides but the last, a new one
    if None; returns it.
    """
    check_paged(q, cache, scales, decodes.block_tables, decodes.context_lens)
    options.check_heads(q.shape[1])
    out = output_for(q, out)
    (num_heads, dim), num_kv_heads = q.shape[1:], cache.shape[3]
    chip, stored = chip_of(q.device), stored_words(cache)
    config, widening, layout = decode_config(chip, cache), widening_of(chip, cache, q.dtype), layout_of(cache)
    assert (plan.window, plan.slots) == (options.window, config.slots) and len(plan.starts) == len(decodes.query_starts)
    tables, rows = decodes.block_tables, decodes.max_queries * (num_heads // num_kv_heads)
    partial, sums = plan.parts(num_kv_heads, rows, dim)
    following = dependent_launch(q.device)
    block_m = min(max(16, next_power_of_2(rows)), tile_rows(dim, q.element_size()))
    _decode_attention_kernel[(len(plan.work), num_kv_heads, -(-rows // block_m))](
        q,
        stored,
        scales,
        out,
        partial,
        sums,
        *(plan.work, plan.starts, plan.split),
        tables,
        decodes.context_lens,
        decodes.query_starts,
        options.sinks,
        *q.stride()[:2],
        *stored.stride()[:4],
        *scale_strides(scales),
        *out.stride()[:2],
        tables.stride(0),
        tables.stride(1) if tables.dim() == 3 else 0,
        *options.numbers(dim),
        len(decodes.context_lens) if following["PDL"] else None,
        GROUP=num_heads // num_kv_heads,
        MAX_QUERIES=decodes.max_queries,
        DIM=dim,
        **(options.flags(scales) | widening.flags | layout | following),
        BLOCK_SIZE=cache.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=config.slots,
        BLOCK_D=max(16 * layout["PARTS"], next_power_of_2(dim)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_splits(partial, sums, out, decodes, plan)
    return out


def merge_splits(partial: Tensor, sums: Tensor, out: Tensor, decodes: Decodes, plan: DecodePlan) -> None:
    """partial: [P, K, rows, D], sums: [P, K, rows] float32, contiguous, rows being max_queries * group: what each split
    gives, and its log-sum-exps to base 2. Writes the rows of `out` ([T, K * group, D]) but those of one split.
    """
    num_kv_heads, rows, dim = partial.shape[1:]
    _merge_splits_kernel[(len(decodes.context_lens), num_kv_heads, rows)](
        partial,
        sums,
        out,
        plan.starts,
        decodes.query_starts,
        *out.stride()[:2],
        GROUP=rows // decodes.max_queries,
        MAX_QUERIES=decodes.max_queries,
        DIM=dim,
        BLOCK_D=max(16, next_power_of_2(dim)),
        AT_ONCE=_MERGED_AT_ONCE if dim <= 128 else 8,
        **dependent_launch(out.device),
    )


@jit
def _decode_attention_kernel(
    q: tl.tensor,  # [T, N, DIM]
    cache: tl.tensor,  # [num_blocks, 2, BLOCK_SIZE, K, DIM]; where HAS_SCALES, words
    scales: tl.tensor,  # [num_blocks, 2, BLOCK_SIZE, K] float32, where HAS_SCALES
    out: tl.tensor,  # [T, N, DIM]
    partial: tl.tensor,  # [P, K, MAX_QUERIES * GROUP, DIM] float32: results of the splits
    sums: tl.tensor,  # [P, K, MAX_QUERIES * GROUP] float32: its log-sum-exps, to base 2
    work: tl.tensor,  # [P] int32
    starts: tl.tensor,  # [S + 1] int32
    split: tl.tensor,  # [1] int32
    block_tables: tl.tensor,  # [S, max_blocks] int32, or [S, K, max_blocks]
    context_lens: tl.tensor,  # [S] int32
    query_starts: tl.tensor,  # [S + 1] int32
    sinks: tl.tensor,  # [N] float32, where HAS_SINKS
    q_token_stride: int,
    q_head_stride: int,
    cache_block_stride: int,
    cache_kv_stride: int,
    cache_slot_stride: int,
    cache_head_stride: int,
    scale_block_stride: int,
    scale_kv_stride: int,
    scale_slot_stride: int,
    scale_head_stride: int,
    out_token_stride: int,
    out_head_stride: int,
    table_stride: int,
    table_head_stride: int,
    scale: float,
    softcap: float,
    window: int,
    num_seqs: int | None,  # S where PDL
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UNIT: tl.constexpr,  # of a Widening
    PTX: tl.constexpr,
    PARTS: tl.constexpr,  # see layout_of
    TRANSFORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (P, K, ceil(MAX_QUERIES * GROUP / BLOCK_M)). Row r is query head r % GROUP of new token r // GROUP."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    _follow(work, starts, split, block_tables, context_lens, query_starts, table_stride, num_seqs, item, PDL)
    seq = tl.load(work + item).to(tl.int64)
    if seq >= 0:
        first_item, is_only, query_start, num_queries, history, start, stop = find_split(
            item, seq, starts, split, context_lens, query_starts, window, HAS_WINDOW, BLOCK_N
        )
        row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
        token = row // GROUP
        is_row = token < num_queries
        head = kv_head * GROUP + row % GROUP
        token_row = (query_start + token).to(tl.int64)
        d, is_number = columns(DIM, BLOCK_D, PARTS)
        inside = is_row[:, None] & is_number[None, :]
        q_address = q + (token_row * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
        query = queries(tl.load(q_address, mask=inside, other=0.0), PARTS, TRANSFORM)
        position = history + tl.minimum(token, num_queries - 1)
        acc = apart(tl.zeros((BLOCK_M, BLOCK_D), tl.float32), PARTS)
        highest, total = begin_softmax(sinks, head, is_row, item == first_item, HAS_SINKS, BLOCK_M)
        # Every row sees slots [start, whole) whole.
        whole = start
        if not HAS_WINDOW:
            whole = tl.maximum(start, tl.minimum(stop, history + 1) // BLOCK_N * BLOCK_N)
        table = block_tables + seq * table_stride + kv_head * table_head_stride
        head_cache = cache + kv_head * cache_head_stride
        head_scales = scales + kv_head * scale_head_stride if HAS_SCALES else scales
        if not HAS_WINDOW:
            acc, total, highest = walk(
                acc, total, highest, query, position, start, whole, table, head_cache,
                head_scales, cache_block_stride, cache_kv_stride, cache_slot_stride,
                scale_block_stride, scale_kv_stride, scale_slot_stride, scale * UNIT, softcap, window,
                False, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, PARTS, PTX, BLOCK_SIZE, DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        acc, total, highest = walk(
            acc, total, highest, query, position, whole, stop, table, head_cache,
            head_scales, cache_block_stride, cache_kv_stride, cache_slot_stride,
            scale_block_stride, scale_kv_stride, scale_slot_stride, scale * UNIT, softcap, window,
            True, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, PARTS, PTX, BLOCK_SIZE, DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        # A row that sees nothing of this split gives nothing, with a weight of zero.
        value = together(acc, tl.where(total == 0.0, 1.0, total), query[0], UNIT, TRANSFORM, PARTS)
        if is_only:
            out_address = out + (token_row * out_token_stride + head * out_head_stride)[:, None] + d[None, :]
            tl.store(out_address, value.to(query[0].dtype), mask=inside)
        else:
            place = (item.to(tl.int64) * tl.num_programs(1) + kv_head) * (MAX_QUERIES * GROUP) + row
            tl.store(partial + place[:, None] * DIM + d[None, :], value, mask=inside)
            log_sum = tl.where(total == 0.0, float("-inf"), highest + tl.log2(tl.where(total == 0.0, 1.0, total)))
            tl.store(sums + place, log_sum, mask=is_row)


@jit
def _follow(
    work: tl.tensor,
    starts: tl.tensor,
    split: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    query_starts: tl.tensor,
    table_stride: int,
    num_seqs: int,
    item: tl.tensor,
    PDL: tl.constexpr,
):
    """Wait for the kernel before; meanwhile ask for what a program reads first, one after the other, of the sequence
    that it likely has: since the layer before, weights have pushed it out of the second cache."""
    if PDL:
        seq = tl.minimum(item, num_seqs - 1)
        prefetch_lines(work + item)
        prefetch_lines(split)
        prefetch_lines(starts + seq)
        prefetch_lines(context_lens + seq)
        prefetch_lines(query_starts + seq)
        prefetch_lines(block_tables + seq.to(tl.int64) * table_stride)
    follow_previous(PDL)


@jit
def _merge_splits_kernel(
    partial: tl.tensor,  # [P, K, MAX_QUERIES * GROUP, DIM] float32
    sums: tl.tensor,  # [P, K, MAX_QUERIES * GROUP] float32
    out: tl.tensor,  # [T, N, DIM]
    starts: tl.tensor,  # [S + 1] int32
    query_starts: tl.tensor,  # [S + 1] int32
    out_token_stride: int,
    out_head_stride: int,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (S, K, MAX_QUERIES * GROUP), one program a row: those of one split are written, those of none become 0."""
    follow_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2)
    first = tl.load(starts + seq)
    last = tl.load(starts + seq + 1)
    query_start = tl.load(query_starts + seq)
    token = row // GROUP
    if (last - first != 1) & (token < tl.load(query_starts + seq + 1) - query_start):
        d = tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        highest = float("-inf")
        total = 0.0
        for begin in range(first, last, AT_ONCE):
            item = begin + tl.arange(0, AT_ONCE)
            place = (item.to(tl.int64) * tl.num_programs(1) + kv_head) * (MAX_QUERIES * GROUP) + row
            log_sum = tl.load(sums + place, mask=item < last, other=float("-inf"))
            inside = (item < last)[:, None] & (d < DIM)[None, :]
            value = tl.load(partial + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
            new_highest = tl.maximum(highest, tl.max(log_sum, 0))
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight = tl.exp2(log_sum - base)
            decay = tl.exp2(highest - base)
            total = total * decay + tl.sum(weight, 0)
            acc = acc * decay + tl.sum(value * weight[:, None], 0)
            highest = new_highest
        out_row = (query_start + token).to(tl.int64) * out_token_stride + (
            kv_head * GROUP + row % GROUP
        ) * out_head_stride
        value = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out + out_row + d, value, mask=d < DIM)
