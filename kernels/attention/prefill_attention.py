"""Causal grouped-query attention of prompt chunks over the paged cache, with what was cached before them.

The tiles of query rows of all sequences are listed once a step, the longest walk first, and dealt to programs that
stay: each takes its share of long and of short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, next_power_of_2, tl
from ..common.tuning import ANY, Chip, Row, Tuned, chip_of
from ..kv.kv_scales import dequantise, numbers_in
from .attention_tiles import check_paged, output_for, scale_strides, walk
from .paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch, sent
from .stored_bytes import apart, columns, layout_of, queries, stored_words, together, widening_of


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    rows: int  # of a tile of queries; BLOCK_M
    slots: int  # of a tile of keys; BLOCK_N
    num_warps: int
    num_stages: int
    programs_per_core: int


_PLAIN = PrefillConfig(16, 32, 4, 1, 1)  # other dtypes than bfloat16 and float16 are computed without matrix units
_PLAIN_FLOAT32: list[Row[PrefillConfig]] = [  # wide heads in _PLAIN's tiles and warps would spill
    ((128, ANY, ANY), _PLAIN),
    ((512, 4, 4), PrefillConfig(16, 16, 8, 1, 1)),
]
# By head_dim, bytes of a query's number and of a stored one: those of 8 and of 4 bits pass through registers to be
# widened, those of 4 bits in four parts, and queries and results are transformed.
TUNED = Tuned[PrefillConfig](
    generic=[((128, 2, ANY), PrefillConfig(64, 32, 4, 2, 2)), ((ANY, ANY, ANY), _PLAIN)],
    interpreter=[((ANY, ANY, ANY), PrefillConfig(16, 16, 4, 1, 1))],
    sm_80=[
        ((64, 2, 2), PrefillConfig(128, 64, 4, 3, 2)),
        ((128, 2, 0.5), PrefillConfig(32, 32, 4, 2, 2)),
        ((256, 2, 0.5), PrefillConfig(32, 32, 8, 2, 1)),
        ((128, 2, 1), PrefillConfig(64, 64, 4, 2, 2)),
        ((128, 2, 2), PrefillConfig(128, 64, 8, 2, 1)),
        ((256, 2, ANY), PrefillConfig(64, 32, 8, 2, 1)),
        ((512, 2, 2), PrefillConfig(32, 32, 8, 2, 1)),
        *_PLAIN_FLOAT32,
        ((ANY, ANY, ANY), _PLAIN),
    ],
    sm_90=[  # three stages: the block table comes a turn ahead of the blocks, and no turn waits for its entries
        ((128, 2, 0.5), PrefillConfig(64, 32, 8, 5, 1)),
        ((256, 2, 0.5), PrefillConfig(32, 32, 8, 3, 2)),
        ((128, 2, 1), PrefillConfig(128, 64, 8, 5, 1)),
        ((64, 2, 2), PrefillConfig(128, 128, 8, 3, 1)),
        ((128, 2, 2), PrefillConfig(128, 128, 8, 3, 1)),
        ((256, 2, ANY), PrefillConfig(128, 32, 8, 3, 1)),
        ((512, 2, 2), PrefillConfig(32, 32, 8, 3, 1)),  # of more rows registers spill
        *_PLAIN_FLOAT32,
        ((ANY, ANY, ANY), _PLAIN),
    ],
    cuda=[
        ((256, 2, 0.5), PrefillConfig(64, 32, 8, 3, 1)),
        ((128, 2, 1), PrefillConfig(128, 64, 8, 3, 1)),
        ((64, 2, 2), PrefillConfig(128, 128, 8, 3, 1)),
        ((128, 2, 2), PrefillConfig(128, 128, 8, 2, 1)),
        ((256, 2, ANY), PrefillConfig(128, 32, 8, 2, 1)),
        ((512, 2, 2), PrefillConfig(32, 32, 8, 2, 1)),  # of more rows registers spill
        *_PLAIN_FLOAT32,
        ((ANY, ANY, ANY), _PLAIN),
    ],
    hip=[
        ((128, 2, 1), PrefillConfig(64, 32, 4, 1, 2)),
        ((128, 2, 2), PrefillConfig(128, 64, 4, 1, 2)),
        ((256, 2, ANY), PrefillConfig(64, 32, 4, 1, 2)),
        ((512, 2, 2), PrefillConfig(32, 16, 4, 1, 2)),
        ((128, ANY, ANY), _PLAIN),
        ((512, 4, 4), PrefillConfig(16, 16, 4, 1, 1)),
        ((ANY, ANY, ANY), _PLAIN),
    ],
)


def prefill_attention_twin(
    q: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute what prefill_attention_triton does for all the batch's sequences, in float32."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group, start = q.shape[1] // cache.shape[3], 0
    for table, context_len, num_new in zip(
        batch.block_tables, batch.host_context_lens, batch.host_num_new, strict=True
    ):
        stored = cache[table[: -(-context_len // batch.block_size)].long()]
        kv = stored.float() if scales is None else dequantise(stored, scales[table[: len(stored)].long()])
        keys, values = (
            kv[:, which].flatten(0, 1)[:context_len].transpose(0, 1).repeat_interleave(group, 0) for which in (0, 1)
        )
        scores = q[start : start + num_new].transpose(0, 1).float() @ keys.mT * options.scale_of(q.shape[2])
        if options.softcap:
            scores = (scores / options.softcap).tanh() * options.softcap
        seen = torch.ones(num_new, context_len, dtype=torch.bool, device=q.device).tril_(context_len - num_new)
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


def prefill_config(chip: Chip, q: Tensor, cache: Tensor) -> PrefillConfig:
    return TUNED.of(chip, q.shape[2], q.element_size(), cache.element_size() / numbers_in(cache.dtype))


def list_tiles(
    context_lens: Sequence[int], num_new: Sequence[int], first_seq: int, tokens: int, window: int
) -> list[tuple[int, int]]:
    """(sequence, first new token) of each tile of `tokens` new tokens, those that walk over most slots first."""
    tiles: list[tuple[int, int, int]] = []
    for s in range(first_seq, len(num_new)):
        history = context_lens[s] - num_new[s]
        for token in range(0, num_new[s], tokens):
            end = history + min(token + tokens, num_new[s])
            start = max(history + token - window + 1, 0) if window else 0
            tiles.append((end - start, s, token))
    tiles.sort(key=lambda tile: -tile[0])
    return [tile[1:] for tile in tiles]


def tiles_of(batch: PagedBatch, first_seq: int, tokens: int, window: int) -> Tensor:
    """[tiles, 2] int32, on the batch's device, as list_tiles has them: made once a step for all layers alike."""
    key = ("tiles", first_seq, tokens, window)
    if key not in batch.plans:
        tiles = list_tiles(batch.host_context_lens, batch.host_num_new, first_seq, tokens, window)
        batch.plans[key] = sent(tiles, batch.block_tables.device)
    return batch.plans[key]


def prefill_attention_triton(
    q: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions = NO_OPTIONS,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    first_seq: int = 0,
) -> Tensor:
    """Softmax(q K^T scale) V of each new token over its sequence, up to and with itself.

    q: [T, N, D], last axis contiguous; cache: [num_blocks, 2, block_size, K, D], last axis contiguous, of q's dtype or
    of 8 or 4 bits (then D / 2 bytes, D a multiple of 4) with `scales` (kv_scales.py). Writes the rows of the sequences
    from `first_seq` on into `out`, [T, N, D] of any strides but the last, a new one if None; returns it.
    """
    check_paged(q, cache, scales, batch.block_tables, batch.context_lens)
    assert batch.block_tables.dim() == 2 and batch.block_size == cache.shape[2]
    assert len(batch.host_num_new) == len(batch.host_context_lens) == batch.block_tables.shape[0]
    options.check_heads(q.shape[1])
    out = output_for(q, out)
    num_heads, dim = q.shape[1:]
    num_kv_heads = cache.shape[3]
    chip = chip_of(q.device)
    config = prefill_config(chip, q, cache)
    stored, widening, layout = stored_words(cache), widening_of(chip, cache, q.dtype), layout_of(cache)
    group = num_heads // num_kv_heads
    tiles = tiles_of(batch, first_seq, max(config.rows // group, 1), options.window)
    _prefill_attention_kernel[(min(len(tiles) * num_kv_heads, chip.num_cores * config.programs_per_core),)](
        q,
        stored,
        scales,
        out,
        tiles,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        options.sinks,
        *q.stride()[:2],
        *stored.stride()[:4],
        *scale_strides(scales),
        *out.stride()[:2],
        batch.block_tables.stride(0),
        len(tiles),
        *options.numbers(dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        **(options.flags(scales) | widening.flags | layout),
        BLOCK_SIZE=cache.shape[2],
        DIM=dim,
        BLOCK_M=max(config.rows, next_power_of_2(group)),
        BLOCK_N=config.slots,
        BLOCK_D=max(16 * layout["PARTS"], next_power_of_2(dim)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@jit
def _rows(
    zero: int,  # where compilers do not know that it is, they compute again what they would keep in registers
    first_token: int,
    num_new: int,
    query_start: int,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(new token, its row of the queries, query head, whether there is such a row) of a tile's rows, each [BLOCK_M]."""
    row = zero + tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    is_row = (row // GROUP < BLOCK_M // GROUP) & (token < num_new)
    return token, (query_start + token).to(tl.int64), kv_head * GROUP + row % GROUP, is_row


@jit
def _prefill_attention_kernel(
    q: tl.tensor,  # [T, N, DIM]
    cache: tl.tensor,  # [num_blocks, 2, BLOCK_SIZE, K, DIM]; where HAS_SCALES, words
    scales: tl.tensor,  # [num_blocks, 2, BLOCK_SIZE, K] float32, where HAS_SCALES
    out: tl.tensor,  # [T, N, DIM]
    tiles: tl.tensor,  # [num_tiles, 2] int32: sequence, first new token
    block_tables: tl.tensor,  # [S, max_blocks] int32
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
    num_tiles: int,
    scale: float,
    softcap: float,
    window: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UNIT: tl.constexpr,  # of a Widening
    PTX: tl.constexpr,
    PARTS: tl.constexpr,  # see layout_of
    TRANSFORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (programs that are resident at once,): each takes every so many pairs of tile and KV head, back and forth.

    Row r of a tile is query head r % GROUP of its token r // GROUP: the heads that share a KV head share its loads.
    """
    num_programs = tl.num_programs(0)
    d, is_number = columns(DIM, BLOCK_D, PARTS)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    for turn in range(0, (num_tiles * NUM_KV_HEADS + num_programs - 1) // num_programs):
        # The order of tiles is reversed in every other round, so that programs get nearly equal work.
        place = tl.where(turn % 2 == 0, tl.program_id(0), num_programs - 1 - tl.program_id(0))
        item = turn * num_programs + place
        if item < num_tiles * NUM_KV_HEADS:
            kv_head = (item % NUM_KV_HEADS).to(tl.int64)
            seq = tl.load(tiles + item // NUM_KV_HEADS * 2).to(tl.int64)
            first_token = tl.load(tiles + item // NUM_KV_HEADS * 2 + 1)
            query_start = tl.load(query_starts + seq)
            num_new = tl.load(query_starts + seq + 1) - query_start
            history = tl.load(context_lens + seq) - num_new
            token, token_row, head, is_row = _rows(0, first_token, num_new, query_start, kv_head, GROUP, BLOCK_M)
            q_address = q + (token_row * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
            inside = is_row[:, None] & is_number[None, :]
            query = queries(tl.load(q_address, mask=inside, other=0.0), PARTS, TRANSFORM)
            last_token = tl.minimum(first_token + TOKENS, num_new) - 1
            position = history + tl.minimum(token, last_token)
            acc = apart(tl.zeros((BLOCK_M, BLOCK_D), tl.float32), PARTS)
            if HAS_SINKS:
                highest = tl.load(sinks + head) * 1.4426950408889634
                total = tl.full((BLOCK_M,), 1.0, tl.float32)
            else:
                highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
            stop = history + last_token + 1
            # Every row sees slots [whole, diagonal); rows see different parts of what lies before and after.
            diagonal = (history + first_token + 1) // BLOCK_N * BLOCK_N
            start = 0
            whole = 0
            if HAS_WINDOW:
                start = tl.maximum(history + first_token - window + 1, 0) // BLOCK_N * BLOCK_N
                edge = tl.maximum(history + last_token - window + 1, 0)
                whole = tl.minimum((edge + BLOCK_N - 1) // BLOCK_N * BLOCK_N, diagonal)
                whole = tl.maximum(whole, start)
                diagonal = tl.maximum(diagonal, whole)
            table = block_tables + seq * table_stride
            head_cache = cache + kv_head * cache_head_stride
            head_scales = scales + kv_head * scale_head_stride if HAS_SCALES else scales
            if HAS_WINDOW:
                acc, total, highest = walk(
                    acc, total, highest, query, position, start, whole, table, head_cache,
                    head_scales, cache_block_stride, cache_kv_stride, cache_slot_stride,
                    scale_block_stride, scale_kv_stride, scale_slot_stride, scale * UNIT, softcap, window,
                    True, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, PARTS, PTX, BLOCK_SIZE, DIM, BLOCK_N, BLOCK_D,
                )  # fmt: skip
            acc, total, highest = walk(
                acc, total, highest, query, position, whole, diagonal, table, head_cache,
                head_scales, cache_block_stride, cache_kv_stride, cache_slot_stride,
                scale_block_stride, scale_kv_stride, scale_slot_stride, scale * UNIT, softcap, window,
                False, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, PARTS, PTX, BLOCK_SIZE, DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            acc, total, highest = walk(
                acc, total, highest, query, position, diagonal, stop, table, head_cache,
                head_scales, cache_block_stride, cache_kv_stride, cache_slot_stride,
                scale_block_stride, scale_kv_stride, scale_slot_stride, scale * UNIT, softcap, window,
                True, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, PARTS, PTX, BLOCK_SIZE, DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            if TRANSFORM > 0:
                again = tl.minimum(history, 0)
                _, token_row, head, is_row = _rows(again, first_token, num_new, query_start, kv_head, GROUP, BLOCK_M)
                inside = is_row[:, None] & is_number[None, :]
            out_address = out + (token_row * out_token_stride + head * out_head_stride)[:, None] + d[None, :]
            value = together(acc, total, query[0], UNIT, TRANSFORM, PARTS)
            tl.store(out_address, value.to(query[0].dtype), mask=inside)
