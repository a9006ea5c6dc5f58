"""The attention of kivi_attention.py by Triton: decodes by splits of their contexts, prompt chunks by tiles of tokens.

A program's query rows are of one block of tokens, their own: so all of them see the pool's blocks before it whole, and
one block of the tail. What a row reads does not depend on the step; where its context is cut does, and with it the last
bits of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.dependent_launch import dependent_launch, follow_previous
from ..common.lang import jit, next_power_of_2, tl
from ..common.tuning import ANY, Row, Tuned, chip_of
from ..kv.kivi import GROUP, block_bytes
from .attention_tiles import begin_softmax, find_split, output_for
from .decode_attention import merge_splits
from .decode_plan import DecodeConfig, DecodePlan, Decodes, plan_decode
from .kivi_tiles import attend_to_own, load_queries, store_values, walk_blocks
from .paged_batch import AttentionOptions, PagedBatch, sent
from .stored_bytes import apart


@dataclass(frozen=True, slots=True)
class TileConfig:
    slots: int  # of a tile of keys: 16 or 32
    num_warps: int
    num_stages: int
    programs_per_core: int = 0  # for which decodes are split
    rows: int = 16  # of a tile of a chunk's queries


_WIDE: list[Row[TileConfig]] = [
    ((256, 2, ANY), TileConfig(16, 4, 2, 2)),
    ((256, ANY, ANY), TileConfig(16, 4, 1, 2)),
    ((ANY, ANY, ANY), TileConfig(16, 8, 2, 1)),
]
# By head_dim, bytes of a query's number and rows of a tile: of 16 rows two warps compute with fewer instructions.
DECODES = Tuned[TileConfig](
    generic=[((ANY, ANY, ANY), TileConfig(16, 4, 1, 2))],
    interpreter=[((32, ANY, ANY), TileConfig(32, 4, 1, 2)), ((ANY, ANY, ANY), TileConfig(16, 4, 1, 2))],
    sm_80=[((128, 2, 16), TileConfig(32, 2, 3, 4)), ((128, 2, ANY), TileConfig(16, 4, 3, 2)), *_WIDE],
    cuda=[((128, 2, 16), TileConfig(32, 2, 3, 5)), ((128, 2, ANY), TileConfig(32, 4, 3, 3)), *_WIDE],
    hip=[((128, 2, ANY), TileConfig(32, 4, 1, 2)), ((ANY, ANY, ANY), TileConfig(16, 4, 1, 2))],
)
_WIDE_CHUNKS: list[Row[TileConfig]] = [((256, ANY), TileConfig(16, 4, 1)), ((ANY, ANY), TileConfig(16, 8, 1))]
CHUNKS = Tuned[TileConfig](
    generic=[((ANY, ANY), TileConfig(16, 4, 1))],
    interpreter=[((32, ANY), TileConfig(32, 4, 1)), ((ANY, ANY), TileConfig(16, 4, 1))],
    sm_80=[((128, 2), TileConfig(16, 4, 2, rows=64)), *_WIDE_CHUNKS],
    cuda=[
        ((128, 2), TileConfig(32, 4, 2, rows=64)),
        ((256, 2), TileConfig(16, 8, 2, rows=64)),
        *_WIDE_CHUNKS,
    ],
    hip=[((128, 2), TileConfig(32, 4, 1, rows=64)), ((ANY, ANY), TileConfig(16, 4, 1))],
)


def kivi_attention_triton(
    q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, slots: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute what kivi_attention does. Of a batch's decodes the new tokens of each are in one block."""
    _check(q, pool, tail, batch, slots)
    out = output_for(q, None)
    if batch.num_decodes:
        _decode(q, pool, tail, batch, slots, options, out)
    if batch.num_decodes < len(batch.host_num_new):
        _prefill(q, pool, tail, batch, slots, options, out)
    return out


def chunk_tiles(
    context_lens: Sequence[int], num_new: Sequence[int], first_seq: int, tokens: int, window: int
) -> list[tuple[int, int]]:
    """(sequence, first new token) of each tile: of at most `tokens` new tokens, all of one block; those that walk over
    most slots first."""
    tiles: list[tuple[int, int, int]] = []
    for s in range(first_seq, len(num_new)):
        history, position = context_lens[s] - num_new[s], context_lens[s] - num_new[s]
        while position < context_lens[s]:
            start = max(position - window + 1, 0) if window else 0
            tiles.append((position - start, s, position - history))
            position = min(position + tokens, (position // GROUP + 1) * GROUP)
    tiles.sort(key=lambda tile: -tile[0])
    return [tile[1:] for tile in tiles]


def _check(q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, slots: Tensor) -> None:
    (num_tokens, num_heads, dim), num_kv_heads = q.shape, tail.shape[3]
    assert num_heads % num_kv_heads == 0 and tail.shape[1:] == (2, GROUP, num_kv_heads, dim) and tail.dtype == q.dtype
    assert pool.shape[1:] == (2, num_kv_heads, block_bytes(dim)) and pool.dtype == torch.uint8
    assert q.stride(2) == tail.stride(4) == pool.stride(3) == batch.block_tables.stride(1) == 1
    assert slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) >= num_tokens
    assert batch.block_size == GROUP and batch.block_tables.dim() == 2


def _decode_tile(batch: PagedBatch, q: Tensor, num_kv_heads: int) -> tuple[int, TileConfig]:
    """Rows of a tile of the batch's decodes, and its configuration."""
    rows = batch.max_queries * q.shape[1] // num_kv_heads
    is_narrow = q.shape[2] <= 128 and q.element_size() == 2
    block_m = min(max(16, next_power_of_2(rows)), 64 if is_narrow else 16)
    return block_m, DECODES.of(chip_of(q.device), q.shape[2], q.element_size(), block_m)


def _decodes_of(batch: PagedBatch, q: Tensor, num_kv_heads: int, window: int) -> tuple[Decodes, DecodePlan]:
    """The sequences that decode, and where they are cut: made once a step for all layers alike."""
    key = ("kivi decodes", q.shape[1:], num_kv_heads, window)
    if key not in batch.plans:
        n = batch.num_decodes
        of = batch.block_tables[:n], batch.context_lens[:n], batch.query_starts[: n + 1]
        decodes, (_, config) = Decodes(*of, batch.max_queries), _decode_tile(batch, q, num_kv_heads)
        cut = DecodeConfig(GROUP, config.num_warps, config.num_stages, config.programs_per_core)
        batch.plans[key] = decodes, plan_decode(decodes, num_kv_heads, cut, window)
    return batch.plans[key]


def _decode(
    q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, slots: Tensor, options: AttentionOptions, out: Tensor
) -> None:
    """Write the rows of the batch's decodes into `out`."""
    (num_heads, dim), num_kv_heads = q.shape[1:], tail.shape[3]
    options.check_heads(num_heads)
    decodes, plan = _decodes_of(batch, q, num_kv_heads, options.window)
    (block_m, config), rows = _decode_tile(batch, q, num_kv_heads), batch.max_queries * num_heads // num_kv_heads
    assert (plan.window, plan.slots) == (options.window, GROUP)
    partial, sums = plan.parts(num_kv_heads, rows, dim)
    _kivi_decode_kernel[(len(plan.work), num_kv_heads, -(-rows // block_m))](
        q,
        pool,
        tail,
        slots,
        out,
        partial,
        sums,
        *(plan.work, plan.starts, plan.split),
        *(decodes.block_tables, decodes.context_lens, decodes.query_starts, options.sinks),
        *q.stride()[:2],
        *pool.stride()[:3],
        *tail.stride()[:4],
        *out.stride()[:2],
        decodes.block_tables.stride(0),
        *options.numbers(dim),
        GROUP=num_heads // num_kv_heads,
        MAX_QUERIES=decodes.max_queries,
        DIM=dim,
        **_flags(options),
        BLOCK_M=block_m,
        BLOCK_D=next_power_of_2(dim),
        SLOTS=config.slots,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(q.device),
    )
    merge_splits(partial, sums, out, decodes, plan)


def _prefill(
    q: Tensor, pool: Tensor, tail: Tensor, batch: PagedBatch, slots: Tensor, options: AttentionOptions, out: Tensor
) -> None:
    """Write the rows of the batch's other sequences into `out`."""
    (num_heads, dim), num_kv_heads, first = q.shape[1:], tail.shape[3], batch.num_decodes
    options.check_heads(num_heads)
    config, group = CHUNKS.of(chip_of(q.device), dim, q.element_size()), num_heads // num_kv_heads
    block_m = max(config.rows, next_power_of_2(group))
    key = "kivi tiles", first, block_m // group, options.window
    if key not in batch.plans:
        tiles = chunk_tiles(batch.host_context_lens, batch.host_num_new, *key[1:])
        batch.plans[key] = sent(tiles, q.device)
    tiles = batch.plans[key]
    _kivi_prefill_kernel[(len(tiles), num_kv_heads)](
        q,
        pool,
        tail,
        slots,
        out,
        *(tiles, batch.block_tables, batch.context_lens, batch.query_starts, options.sinks),
        *q.stride()[:2],
        *pool.stride()[:3],
        *tail.stride()[:4],
        *out.stride()[:2],
        batch.block_tables.stride(0),
        *options.numbers(dim),
        GROUP=group,
        DIM=dim,
        **_flags(options),
        BLOCK_M=block_m,
        BLOCK_D=next_power_of_2(dim),
        SLOTS=config.slots,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _flags(options: AttentionOptions) -> dict[str, bool]:
    flags = options.flags(None)
    del flags["HAS_SCALES"]
    return flags


@jit
def _kivi_decode_kernel(
    q: tl.tensor,  # [T, N, DIM]
    pool: tl.tensor,  # [num_blocks, 2, K, 20 DIM] uint8
    tail: tl.tensor,  # [num_tail_blocks, 2, 32, K, DIM]
    slots: tl.tensor,  # [T] int64: of the tail; below 0 of an idle row
    out: tl.tensor,  # [T, N, DIM]
    partial: tl.tensor,  # [P, K, MAX_QUERIES * GROUP, DIM] float32: results of the splits
    sums: tl.tensor,  # [P, K, MAX_QUERIES * GROUP] float32: its log-sum-exps, to base 2
    work: tl.tensor,  # [P] int32
    starts: tl.tensor,  # [S + 1] int32
    split: tl.tensor,  # [1] int32
    block_tables: tl.tensor,  # [S, max_blocks] int32
    context_lens: tl.tensor,  # [S] int32
    query_starts: tl.tensor,  # [S + 1] int32
    sinks: tl.tensor,  # [N] float32, where HAS_SINKS
    q_token_stride: int,
    q_head_stride: int,
    pool_block_stride: int,
    pool_kv_stride: int,
    pool_head_stride: int,
    tail_block_stride: int,
    tail_kv_stride: int,
    tail_slot_stride: int,
    tail_head_stride: int,
    out_token_stride: int,
    out_head_stride: int,
    table_stride: int,
    scale: float,
    softcap: float,
    window: int,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,  # of a tile of keys
    PDL: tl.constexpr,
):
    """Grid: (P, K, ceil(MAX_QUERIES * GROUP / BLOCK_M)). Row r is query head r % GROUP of new token r // GROUP."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    follow_previous(PDL)
    seq = tl.load(work + item).to(tl.int64)
    if seq >= 0:
        first_item, is_only, query_start, num_queries, history, start, stop = find_split(
            item, seq, starts, split, context_lens, query_starts, window, HAS_WINDOW, 32
        )
        row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
        token = row // GROUP
        is_row = token < num_queries
        head = kv_head * GROUP + row % GROUP
        token_row = (query_start + token).to(tl.int64)
        query = load_queries(q, token_row, head, is_row, q_token_stride, q_head_stride, DIM, BLOCK_D)
        position = history + tl.minimum(token, num_queries - 1)
        acc = apart(tl.zeros((BLOCK_M, BLOCK_D), tl.float32), 2)
        highest, total = begin_softmax(sinks, head, is_row, item == first_item, HAS_SINKS, BLOCK_M)
        own = history // 32
        acc, total, highest = walk_blocks(
            acc, total, highest, query, position, start // 32, tl.minimum((stop + 31) // 32, own),
            block_tables + seq * table_stride, pool + kv_head * pool_head_stride,
            pool_block_stride, pool_kv_stride, scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_D, SLOTS,
        )  # fmt: skip
        if stop > own * 32:
            block = tl.maximum(tl.load(slots + query_start), 0) // 32
            acc, total, highest = attend_to_own(
                acc, total, highest, query, position, own * 32, stop,
                tail + block * tail_block_stride + kv_head * tail_head_stride,
                tail_kv_stride, tail_slot_stride, scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_D,
            )  # fmt: skip
        # A row that sees nothing of this split gives nothing, with a weight of zero.
        divisor = tl.where(total == 0.0, 1.0, total)
        if is_only:
            target = out + (token_row * out_token_stride + head * out_head_stride)[:, None]
            store_values(target, acc, divisor, is_row, DIM, BLOCK_D)
        else:
            place = (item.to(tl.int64) * tl.num_programs(1) + kv_head) * (MAX_QUERIES * GROUP) + row
            store_values(partial + place[:, None] * DIM, acc, divisor, is_row, DIM, BLOCK_D)
            log_sum = tl.where(total == 0.0, float("-inf"), highest + tl.log2(divisor))
            tl.store(sums + place, log_sum, mask=is_row)


@jit
def _kivi_prefill_kernel(
    q: tl.tensor,  # [T, N, DIM]
    pool: tl.tensor,  # [num_blocks, 2, K, 20 DIM] uint8
    tail: tl.tensor,  # [num_tail_blocks, 2, 32, K, DIM]
    slots: tl.tensor,  # [T] int64: of the tail; below 0: any
    out: tl.tensor,  # [T, N, DIM]
    tiles: tl.tensor,  # [num_tiles, 2] int32: sequence, first new token
    block_tables: tl.tensor,  # [S, max_blocks] int32
    context_lens: tl.tensor,  # [S] int32
    query_starts: tl.tensor,  # [S + 1] int32
    sinks: tl.tensor,  # [N] float32, where HAS_SINKS
    q_token_stride: int,
    q_head_stride: int,
    pool_block_stride: int,
    pool_kv_stride: int,
    pool_head_stride: int,
    tail_block_stride: int,
    tail_kv_stride: int,
    tail_slot_stride: int,
    tail_head_stride: int,
    out_token_stride: int,
    out_head_stride: int,
    table_stride: int,
    scale: float,
    softcap: float,
    window: int,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,  # of a tile of keys
):
    """Grid: (num_tiles, K). Row r of a tile is query head r % GROUP of its token r // GROUP."""
    item, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seq = tl.load(tiles + item * 2).to(tl.int64)
    first_token = tl.load(tiles + item * 2 + 1)
    query_start = tl.load(query_starts + seq)
    num_new = tl.load(query_starts + seq + 1) - query_start
    history = tl.load(context_lens + seq) - num_new
    own = (history + first_token) // 32
    end_token = tl.minimum(tl.minimum(first_token + BLOCK_M // GROUP, num_new), own * 32 + 32 - history)
    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    is_row = token < end_token
    token_row, head = (query_start + token).to(tl.int64), kv_head * GROUP + row % GROUP
    query = load_queries(q, token_row, head, is_row, q_token_stride, q_head_stride, DIM, BLOCK_D)
    position = history + tl.minimum(token, end_token - 1)
    acc = apart(tl.zeros((BLOCK_M, BLOCK_D), tl.float32), 2)
    if HAS_SINKS:
        highest = tl.load(sinks + head) * 1.4426950408889634
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        highest, total = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.minimum(tl.maximum(history + first_token - window + 1, 0) // 32, own)
    acc, total, highest = walk_blocks(
        acc, total, highest, query, position, begin, own,
        block_tables + seq * table_stride, pool + kv_head * pool_head_stride,
        pool_block_stride, pool_kv_stride, scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_D, SLOTS,
    )  # fmt: skip
    block = tl.maximum(tl.load(slots + query_start + first_token), 0) // 32
    acc, total, highest = attend_to_own(
        acc, total, highest, query, position, own * 32, history + end_token,
        tail + block * tail_block_stride + kv_head * tail_head_stride,
        tail_kv_stride, tail_slot_stride, scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_D,
    )  # fmt: skip
    target = out + (token_row * out_token_stride + head * out_head_stride)[:, None]
    store_values(target, acc, total, is_row, DIM, BLOCK_D)
