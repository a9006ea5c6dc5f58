"""Prefill attention over latent KV (DeepSeek-V2, 2.1.2), its keys and values projected from the latents beforehand.

For many queries that is less work than the absorbed form. A head's key is its own part beside a rotated part that all
heads share, which is never copied for each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..attention.attention_tiles import HALVES, LOG2_E
from ..attention.paged_batch import LatentPromptLibrary, sent
from ..attention.prefill_attention import list_tiles
from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import ANY, Tuned, chip_of

MASK_BYTES = 16 << 20  # of the masks that torch is given at once, which it makes numbers of


@dataclass(frozen=True, slots=True)
class MlaPrefillConfig:
    rows: int  # of a tile of queries; BLOCK_M
    slots: int  # of a tile of keys; BLOCK_N
    num_warps: int
    num_stages: int


# By head_dim of the values and bytes of a number.
TUNED = Tuned[MlaPrefillConfig](
    generic=[((ANY, ANY), MlaPrefillConfig(16, 16, 4, 1))],
    sm_80=[((128, 2), MlaPrefillConfig(128, 32, 8, 2)), ((ANY, ANY), MlaPrefillConfig(16, 32, 4, 1))],
    cuda=[((128, 2), MlaPrefillConfig(128, 64, 8, 3)), ((ANY, ANY), MlaPrefillConfig(16, 32, 4, 1))],
    hip=[((128, 2), MlaPrefillConfig(128, 32, 4, 1)), ((ANY, ANY), MlaPrefillConfig(16, 32, 4, 1))],
)


@dataclass(frozen=True)
class Chunks:
    """Prompt chunks of S sequences: the last num_new[s] of context_lens[s] tokens each, both on the host."""

    num_new: Sequence[int]
    context_lens: Sequence[int]
    library: LatentPromptLibrary | None = None  # that attends, in what it takes
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def starts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """See LatentChunks. Made once a step for all layers."""
        if device not in self.plans:
            starts = ([0, *itertools.accumulate(lens)] for lens in (self.num_new, self.context_lens))
            self.plans[device] = tuple(sent(numbers, device) for numbers in starts)
        rows, slots = self.plans[device]
        return rows, slots

    def plan(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tiles as list_tiles has them, [tiles, 2] int32, made once a step for all layers; and `starts`."""
        key = tokens, device
        if key not in self.plans:
            self.plans[key] = (sent(list_tiles(self.context_lens, self.num_new, 0, tokens, window=0), device),)
        return self.plans[key][0], *self.starts(device)


def mla_prefill(q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: Chunks, scale: float) -> Tensor:
    """Softmax((q keys^T + q_rope rope_keys^T) scale) values of each new token, up to and with itself.

    q: [T, N, D + rope], the rotated part last; keys: [C, N, D]; rope_keys: [C, rope]; values: [C, N, V], of one dtype,
    last axes contiguous; C: the tokens of all contexts. Returns [T, N, V].
    """
    return kernel_for(q, mla_prefill_triton, mla_prefill_twin)(q, keys, rope_keys, values, chunks, scale)


def mla_prefill_twin(
    q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: Chunks, scale: float
) -> Tensor:
    whole = torch.cat((keys, rope_keys[:, None].expand(-1, q.shape[1], -1)), dim=2)
    out = torch.empty(*q.shape[:2], values.shape[2], dtype=q.dtype, device=q.device)
    row = slot = 0
    for num_new, context_len in zip(chunks.num_new, chunks.context_lens, strict=True):
        rows, slots = slice(row, row + num_new), slice(slot, slot + context_len)
        out[rows] = attend_in_order(q[rows], whole[slots], values[slots], scale)
        row, slot = rows.stop, slots.stop
    return out


def attend_in_order(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q: [T, N, D], of the last T of C tokens; keys: [C, N, D]; values: [C, N, V]. By torch. Returns [T, N, V]."""
    num_new, context_len, dim = len(q), len(keys), values.shape[2]
    if dim < q.shape[2]:  # torch's fused attention supports only values as wide as keys
        values = pad(values, (0, q.shape[2] - dim))
    together = num_new if num_new == context_len else max(MASK_BYTES // (4 * context_len), 1)
    out = torch.empty(*q.shape[:2], dim, dtype=q.dtype, device=q.device)
    for first in range(0, num_new, together):
        rows = slice(first, min(first + together, num_new))
        seen = slice(0, context_len - num_new + rows.stop)
        out[rows] = _attend_in_order(q[rows], keys[seen], values[seen], scale)[..., :dim]
    return out


def _attend_in_order(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute what attend_in_order does, at once, with values as wide as keys."""
    mask = None
    if len(q) < len(keys):
        mask = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).tril_(len(keys) - len(q))
    rows = (of.transpose(0, 1)[None] for of in (q, keys, values))
    return scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, scale=scale)[0].transpose(0, 1)


def mla_prefill_triton(
    q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: Chunks, scale: float
) -> Tensor:
    """Compute what mla_prefill does; D, rope and V are powers of 2 from 16 on. Returns a contiguous tensor."""
    if (library := chunks.library) is not None and library.takes_latent(q, values):
        return library.attend_latent(q, keys, rope_keys, values, chunks, scale)
    num_tokens, num_heads, _ = q.shape
    dim, rope, value_dim = keys.shape[2], rope_keys.shape[1], values.shape[2]
    assert q.shape[2] == dim + rope and keys.shape[:2] == values.shape[:2] == (len(rope_keys), num_heads)
    assert all(size >= 16 and size == next_power_of_2(size) for size in (dim, rope, value_dim))
    assert all(t.stride(-1) == 1 and t.dtype == q.dtype for t in (q, keys, rope_keys, values))
    assert q.dtype in (*HALVES, torch.float32) and scale > 0
    assert sum(chunks.num_new) == num_tokens and sum(chunks.context_lens) == len(keys)
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=q.dtype, device=q.device)
    config = TUNED.of(chip_of(q.device), value_dim, q.element_size())
    plan = chunks.plan(config.rows, q.device)
    _mla_prefill_kernel[(len(plan[0]) * num_heads,)](
        q,
        keys,
        rope_keys,
        values,
        out,
        *plan,
        *q.stride()[:2],
        *keys.stride()[:2],
        rope_keys.stride(0),
        *values.stride()[:2],
        num_heads,
        scale * LOG2_E,
        DIM=dim,
        ROPE=rope,
        VALUE_DIM=value_dim,
        BLOCK_M=config.rows,
        BLOCK_N=config.slots,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@jit
def _walk_keys(
    acc: tl.tensor,  # [M, VALUE_DIM] float32
    total: tl.tensor,  # [M] float32
    highest: tl.tensor,  # [M] float32
    query: tl.tensor,  # [M, DIM]
    rope_query: tl.tensor,  # [M, ROPE]
    position: tl.tensor,  # [M] int32
    start: int,
    stop: int,
    keys: tl.tensor,  # at the sequence's first token and the head
    rope_keys: tl.tensor,
    values: tl.tensor,
    key_stride: int,
    rope_stride: int,
    value_stride: int,
    scale: float,
    IS_MASKED: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Do what attention_tiles.walk does, over contiguous keys and values."""
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        used = (slot < stop)[:, None] if IS_MASKED else None
        row = slot.to(tl.int64)[:, None]
        key = tl.load(keys + row * key_stride + tl.arange(0, DIM)[None, :], mask=used)
        rope_key = tl.load(rope_keys + row * rope_stride + tl.arange(0, ROPE)[None, :], mask=used)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.dot(rope_query, tl.trans(rope_key), score, input_precision="ieee")
        if IS_MASKED:
            score = tl.where((slot < stop)[None, :] & (slot[None, :] <= position[:, None]), score, float("-inf"))
        # No row is without a slot that it sees: each walk begins at the first token.
        new_highest = tl.maximum(highest, tl.max(score, 1) * scale)  # pyright: ignore[reportOperatorIssue]
        weight = tl.exp2(score * scale - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weight, 1)
        value_address = values + row * value_stride + tl.arange(0, VALUE_DIM)[None, :]
        # What lies beyond may be anything, even NaN, and NaN survives a weight of zero.
        value = tl.load(value_address, mask=used, other=0.0) if IS_MASKED else tl.load(value_address)
        acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return acc, total, highest


@jit
def _mla_prefill_kernel(
    q: tl.tensor,  # [T, N, DIM + ROPE]
    keys: tl.tensor,  # [C, N, DIM]
    rope_keys: tl.tensor,  # [C, ROPE]
    values: tl.tensor,  # [C, N, VALUE_DIM]
    out: tl.tensor,  # [T, N, VALUE_DIM] contiguous
    tiles: tl.tensor,  # [num_tiles, 2] int32: sequence, first new token; the longest walk first
    query_starts: tl.tensor,  # [S + 1] int32
    key_starts: tl.tensor,  # [S + 1] int32
    q_token_stride: int,
    q_head_stride: int,
    key_token_stride: int,
    key_head_stride: int,
    rope_token_stride: int,
    value_token_stride: int,
    value_head_stride: int,
    num_heads: int,
    scale: float,  # times log2(e)
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (tiles * N,), the heads of a tile side by side."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    tile = tl.program_id(0) // num_heads
    seq = tl.load(tiles + tile * 2)
    first_token = tl.load(tiles + tile * 2 + 1)
    query_start = tl.load(query_starts + seq)
    num_new = tl.load(query_starts + seq + 1) - query_start
    key_start = tl.load(key_starts + seq).to(tl.int64)
    history = (tl.load(key_starts + seq + 1) - key_start).to(tl.int32) - num_new
    token = first_token + tl.arange(0, BLOCK_M)
    is_row = (token < num_new)[:, None]
    token_row = (query_start + token).to(tl.int64)
    q_address = q + (token_row * q_token_stride + head * q_head_stride)[:, None]
    query = tl.load(q_address + tl.arange(0, DIM)[None, :], mask=is_row, other=0.0)
    rope_query = tl.load(q_address + DIM + tl.arange(0, ROPE)[None, :], mask=is_row, other=0.0)
    last_token = tl.minimum(first_token + BLOCK_M, num_new) - 1
    position = history + tl.minimum(token, last_token)
    acc = tl.zeros((BLOCK_M, VALUE_DIM), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # Every row sees slots [0, diagonal).
    diagonal = (history + first_token + 1) // BLOCK_N * BLOCK_N
    keys += key_start * key_token_stride + head * key_head_stride
    rope_keys += key_start * rope_token_stride
    values += key_start * value_token_stride + head * value_head_stride
    acc, total, highest = _walk_keys(
        acc, total, highest, query, rope_query, position, 0, diagonal, keys, rope_keys, values,
        key_token_stride, rope_token_stride, value_token_stride, scale, False, DIM, ROPE, VALUE_DIM, BLOCK_N,
    )  # fmt: skip
    acc, total, highest = _walk_keys(
        acc, total, highest, query, rope_query, position, diagonal, history + last_token + 1, keys, rope_keys, values,
        key_token_stride, rope_token_stride, value_token_stride, scale, True, DIM, ROPE, VALUE_DIM, BLOCK_N,
    )  # fmt: skip
    target = out + ((token_row * num_heads + head) * VALUE_DIM)[:, None] + tl.arange(0, VALUE_DIM)[None, :]
    tl.store(target, (acc / total[:, None]).to(query.dtype), mask=is_row)
