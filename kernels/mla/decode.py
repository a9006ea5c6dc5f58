"""Decode attention over latent KV in the absorbed form (DeepSeek-V2, 2.1.2 and appendix C).

A token's KV is one vector for all heads: a latent of `rank` numbers, from which every head's keys and values would be
projected, and a rotated key of `rope` numbers. The projections are taken into the queries and the outputs, so a tile of
latents is read once, as keys and as values, for all rows. Contexts are cut and merged as in decode_attention.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..attention.attention_tiles import HALVES, LOG2_E, find_slots, find_split
from ..attention.decode_attention import merge_splits
from ..attention.decode_plan import DecodeConfig, DecodePlan, Decodes, plan_decode
from ..common.lang import jit, next_power_of_2, tl
from ..common.tuning import ANY, Tuned, chip_of

OTHER_ROWS = 64  # of a tile of a LatentLaunch

# By rank, bytes of a number and rows (heads times new tokens): rows of a tile, and the rest.
TUNED = Tuned[tuple[int, DecodeConfig]](
    generic=[((ANY, ANY, ANY), (16, DecodeConfig(16, 4, 1, 1)))],
    sm_80=[((512, 2, ANY), (32, DecodeConfig(32, 8, 2, 1))), ((ANY, ANY, ANY), (16, DecodeConfig(16, 8, 1, 1)))],
    sm_90=[
        ((512, 2, 16), (16, DecodeConfig(32, 4, 5, 2))),  # five stages: two tiles in flight, their table before them
        ((512, 2, 32), (32, DecodeConfig(32, 8, 5, 1))),
        ((512, 2, ANY), (64, DecodeConfig(64, 8, 2, 1))),
        ((ANY, ANY, ANY), (16, DecodeConfig(16, 8, 1, 1))),
    ],
    cuda=[((512, 2, ANY), (64, DecodeConfig(32, 8, 2, 1))), ((ANY, ANY, ANY), (16, DecodeConfig(16, 8, 1, 1)))],
    hip=[((512, 2, ANY), (32, DecodeConfig(32, 4, 1, 2))), ((ANY, ANY, ANY), (16, DecodeConfig(16, 4, 1, 1)))],
)


class LatentLaunch(Protocol):
    """Another kernel of the same plan, parts and arguments."""

    def launch(self, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, int]) -> None:
        """grid: tiles of OTHER_ROWS rows, and items. arguments, constants: _mla_decode_kernel's, but for sizes of
        tiles."""
        ...


def _tuned(cache: Tensor, rank: int, rows: int) -> tuple[int, DecodeConfig]:
    block_m, config = TUNED.of(chip_of(cache.device), rank, cache.element_size(), rows)
    return min(block_m, max(16, next_power_of_2(rows))), config


def plan_mla_decode(decodes: Decodes, cache: Tensor, num_heads: int, rank: int) -> DecodePlan:
    """Plan all latent layers of a step. cache: [num_blocks, block_size, rank + rope]."""
    rows = decodes.max_queries * num_heads
    block_m, config = _tuned(cache, rank, rows)
    return plan_decode(decodes, 1, config, tiles_of_rows=-(-rows // block_m))


def mla_decode_twin(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes, plan: DecodePlan, scale: float
) -> Tensor:
    """Compute what mla_decode_triton does: each sequence whole, in float32. The plan is not used."""
    rank = q_latent.shape[2]
    out = torch.zeros_like(q_latent, memory_format=torch.contiguous_format)
    block_size = cache.shape[1]
    for s, context_len in enumerate(decodes.context_lens.tolist()):
        if context_len:
            rows = slice(int(decodes.query_starts[s]), int(decodes.query_starts[s + 1]))
            blocks = decodes.block_tables[s, : -(-context_len // block_size)].long()
            kv = cache[blocks].flatten(0, 1)[:context_len].float()
            scores = torch.cat((q_latent[rows], q_rope[rows]), dim=2).float() @ kv.T * scale
            num_queries = rows.stop - rows.start
            seen = torch.ones(num_queries, context_len, dtype=torch.bool, device=q_rope.device)
            scores.masked_fill_(~seen.tril_(context_len - num_queries)[:, None], float("-inf"))
            out[rows] = (scores.softmax(2) @ kv[:, :rank]).to(out.dtype)
    return out


def mla_decode_triton(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    decodes: Decodes,
    plan: DecodePlan,
    scale: float,
    other: LatentLaunch | None = None,
) -> Tensor:
    """Weighted latents: softmax((q_latent latent^T + q_rope rope^T) scale) latent, up to and with the token itself.

    q_latent: [T, N, rank], q_rope: [T, N, rope], last axes contiguous; cache: [num_blocks, block_size, rank + rope] of
    the same dtype, a latent first, last axis contiguous; rank and rope powers of 2 from 16 on. plan: plan_mla_decode's.
    other: is launched instead of the kernel here where tiles have OTHER_ROWS rows. Returns [T, N, rank] contiguous.
    """
    num_tokens, num_heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    assert q_rope.shape[:2] == (num_tokens, num_heads) and cache.shape[2] == rank + rope
    assert all(size >= 16 and size == next_power_of_2(size) for size in (rank, rope))
    assert q_latent.stride(2) == q_rope.stride(2) == cache.stride(2) == 1
    assert q_latent.dtype == q_rope.dtype == cache.dtype and cache.dtype in (*HALVES, torch.float32)
    assert decodes.block_tables.dim() == 2 and decodes.block_tables.dtype == decodes.context_lens.dtype == torch.int32
    assert decodes.block_tables.stride(1) == decodes.context_lens.stride(0) == 1 and not plan.window and scale > 0
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    rows = decodes.max_queries * num_heads
    block_m, config = _tuned(cache, rank, rows)
    assert config.slots == plan.slots
    partial, sums = plan.parts(1, rows, rank)
    arguments = (
        q_latent,
        q_rope,
        cache,
        out,
        partial,
        sums,
        plan.work,
        plan.starts,
        plan.split,
        decodes.block_tables,
        decodes.context_lens,
        decodes.query_starts,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        cache.stride(0),
        decodes.block_tables.stride(0),
        scale * LOG2_E,
    )
    sizes = {"SLOT_STRIDE": cache.stride(1), "RANK": rank, "ROPE": rope, "BLOCK_SIZE": cache.shape[1]}
    constants = {"NUM_HEADS": num_heads, "MAX_QUERIES": decodes.max_queries, **sizes}
    grid = -(-rows // block_m), len(plan.work)
    if other is not None and block_m == OTHER_ROWS:
        other.launch(grid, arguments, constants)
    else:
        tiles = {"BLOCK_M": block_m, "BLOCK_N": config.slots}
        launching = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        _mla_decode_kernel[grid](*arguments, **constants, **tiles, **launching)
    merge_splits(partial, sums, out, decodes, plan)
    return out


@jit
def _walk_latents(
    acc: tl.tensor,  # [M, RANK] float32
    total: tl.tensor,  # [M] float32
    highest: tl.tensor,  # [M] float32
    q_latent: tl.tensor,  # [M, RANK]
    q_rope: tl.tensor,  # [M, ROPE]
    position: tl.tensor,  # [M] int32
    start: int,
    whole: int,  # slots below it are seen by every row
    stop: int,
    table: tl.tensor,
    cache: tl.tensor,
    cache_block_stride: int,
    scale: float,
    SLOT_STRIDE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Do what attention_tiles.walk does, where a tile of latents is both keys and values."""
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        used = slot < stop
        block, place = find_slots(table, first, used, True, BLOCK_SIZE, BLOCK_N)
        address = cache + (block * cache_block_stride + place * SLOT_STRIDE)[:, None]
        latent = tl.load(address + tl.arange(0, RANK)[None, :], mask=used[:, None], other=0.0)
        rope = tl.load(address + RANK + tl.arange(0, ROPE)[None, :], mask=used[:, None], other=0.0)
        # The compiler deals rows to all warps where it sees a product flow into another, and of eight warps four would
        # then repeat the others' scores of 64 rows. Scaled apart, and behind a condition, it does not see it.
        score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee") * scale
        score += tl.dot(q_rope, tl.trans(rope), input_precision="ieee") * scale
        if first + BLOCK_N > whole:
            score = tl.where(used[None, :] & (slot[None, :] <= position[:, None]), score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(score - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return acc, total, highest


@jit
def _mla_decode_kernel(
    q_latent: tl.tensor,  # [T, NUM_HEADS, RANK]
    q_rope: tl.tensor,  # [T, NUM_HEADS, ROPE]
    cache: tl.tensor,  # [num_blocks, BLOCK_SIZE, RANK + ROPE]
    out: tl.tensor,  # [T, NUM_HEADS, RANK] contiguous
    partial: tl.tensor,  # [P, MAX_QUERIES * NUM_HEADS, RANK] float32
    sums: tl.tensor,  # [P, MAX_QUERIES * NUM_HEADS] float32
    work: tl.tensor,  # [P] int32
    starts: tl.tensor,  # [S + 1] int32
    split: tl.tensor,  # [1] int32
    block_tables: tl.tensor,  # [S, max_blocks] int32
    context_lens: tl.tensor,  # [S] int32
    query_starts: tl.tensor,  # [S + 1] int32
    q_latent_token_stride: int,
    q_latent_head_stride: int,
    q_rope_token_stride: int,
    q_rope_head_stride: int,
    cache_block_stride: int,
    table_stride: int,
    scale: float,  # times log2(e)
    NUM_HEADS: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,  # of the cache: addresses of a tile are then one register and constants
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (ceil(MAX_QUERIES * NUM_HEADS / BLOCK_M), P): tiles of rows side by side, which read the same latents.

    Row r is query head r % NUM_HEADS of new token r // NUM_HEADS.
    """
    item = tl.program_id(1)
    seq = tl.load(work + item).to(tl.int64)
    if seq >= 0:
        _, is_only, query_start, num_queries, history, start, stop = find_split(
            item, seq, starts, split, context_lens, query_starts, 0, False, BLOCK_N
        )
        row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        token = row // NUM_HEADS
        head = row % NUM_HEADS
        is_row = token < num_queries
        token_row = (query_start + token).to(tl.int64)
        r = tl.arange(0, RANK)
        query_address = q_latent + (token_row * q_latent_token_stride + head * q_latent_head_stride)[:, None]
        latent_query = tl.load(query_address + r[None, :], mask=is_row[:, None], other=0.0)
        query_address = q_rope + (token_row * q_rope_token_stride + head * q_rope_head_stride)[:, None]
        rope_query = tl.load(query_address + tl.arange(0, ROPE)[None, :], mask=is_row[:, None], other=0.0)
        position = history + tl.minimum(token, num_queries - 1)
        acc = tl.zeros((BLOCK_M, RANK), tl.float32)
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        # One loop for complete and partial tiles: beside 64 x RANK sums the registers have no room for a second.
        acc, total, highest = _walk_latents(
            acc, total, highest, latent_query, rope_query, position, start, tl.minimum(stop, history + 1), stop,
            block_tables + seq * table_stride, cache, cache_block_stride, scale,
            SLOT_STRIDE, RANK, ROPE, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if is_only:
            target = out + ((token_row * NUM_HEADS + head) * RANK)[:, None] + r[None, :]
            tl.store(target, value.to(latent_query.dtype), mask=is_row[:, None])
        else:
            place = item.to(tl.int64) * (MAX_QUERIES * NUM_HEADS) + row
            tl.store(partial + place[:, None] * RANK + r[None, :], value, mask=is_row[:, None])
            log_sum = tl.where(total == 0.0, float("-inf"), highest + tl.log2(tl.where(total == 0.0, 1.0, total)))
            tl.store(sums + place, log_sum, mask=is_row)
