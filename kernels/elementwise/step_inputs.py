"""Inputs of a decode step: made on the device, from the host's inputs and the results of the step before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl


@dataclass(frozen=True)
class DecodeRows:
    """S sequences, each with one new token: the last of its context_lens. A row without a context is idle."""

    token_ids: Tensor  # [S] int32: the new token, where the host knows it
    previous_rows: Tensor  # [S] int32: otherwise the index in `yielded` of the token; -1: the host knows it
    context_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, blocks] int32
    yielded: Tensor  # [n] int64: tokens of the step before
    tails: Tensor | None = None  # [S] int32: each row's block of the KV tail, see kv/kivi.py; None: there is no tail

    def check(self) -> None:
        rows = [self.token_ids, self.previous_rows, self.context_lens]
        rows += [] if self.tails is None else [self.tails]
        assert all(t.shape == rows[0].shape and t.dtype == torch.int32 and t.is_contiguous() for t in rows)
        assert self.block_tables.shape[0] == len(rows[0]) and self.block_tables.dtype == torch.int32
        assert self.block_tables.stride(1) == 1
        assert self.yielded.dtype == torch.int64 and self.yielded.is_contiguous()


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def step_inputs(rows: DecodeRows, cos_sin: Tensor, block_size: int) -> Inputs:
    """cos_sin: [positions, D] float32 contiguous.

    Returns (token ids [S] int64; cos_sin of each one's position [S, D]; slots [S] int64: where its KV goes, as
    rope_kv_write takes them, -1 for an idle row; pairs [S, 2] int64, where there is a tail: the blocks that each row
    fills, as round_blocks takes them).
    """
    return kernel_for(rows.token_ids, step_inputs_triton, step_inputs_twin)(rows, cos_sin, block_size)


def step_inputs_twin(rows: DecodeRows, cos_sin: Tensor, block_size: int) -> Inputs:
    rows.check()
    position = (rows.context_lens.long() - 1).clamp_min(0)
    from_previous = rows.yielded[rows.previous_rows.long().clamp_min(0)]
    tokens = torch.where(rows.previous_rows >= 0, from_previous, rows.token_ids.long())
    block = rows.block_tables.gather(1, (position // block_size)[:, None])[:, 0].long()
    place, is_row, pairs = position % block_size, rows.context_lens > 0, None
    stored = block
    if rows.tails is not None:
        stored, fills = rows.tails.long(), is_row & (place == block_size - 1)
        pairs = torch.where(fills[:, None], torch.stack((stored, block), dim=1), -1)
    return tokens, cos_sin[position], torch.where(is_row, stored * block_size + place, -1), pairs


def step_inputs_triton(rows: DecodeRows, cos_sin: Tensor, block_size: int) -> Inputs:
    rows.check()
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    num_rows, dim, device = len(rows.token_ids), cos_sin.shape[1], cos_sin.device
    tokens, slots = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    angles = torch.empty(num_rows, dim, dtype=torch.float32, device=device)
    pairs = None if rows.tails is None else torch.empty(num_rows, 2, dtype=torch.int64, device=device)
    _step_inputs_kernel[(num_rows,)](
        rows.token_ids,
        rows.previous_rows,
        rows.context_lens,
        rows.block_tables,
        rows.yielded,
        rows.tails,
        cos_sin,
        tokens,
        angles,
        slots,
        pairs,
        rows.block_tables.stride(0),
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_D=next_power_of_2(dim),
        num_warps=1,
    )
    return tokens, angles, slots, pairs


@jit
def _step_inputs_kernel(
    token_ids: tl.tensor,  # [S] int32
    previous_rows: tl.tensor,  # [S] int32
    context_lens: tl.tensor,  # [S] int32
    block_tables: tl.tensor,  # [S, blocks] int32
    yielded: tl.tensor,  # [n] int64
    tails: tl.tensor | None,  # [S] int32
    cos_sin: tl.tensor,  # [positions, DIM] float32
    tokens: tl.tensor,  # [S] int64
    angles: tl.tensor,  # [S, DIM] float32
    slots: tl.tensor,  # [S] int64
    pairs: tl.tensor | None,  # [S, 2] int64
    table_stride: int,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (S,)."""
    row = tl.program_id(0).to(tl.int64)
    context_len = tl.load(context_lens + row)
    position = tl.maximum(context_len - 1, 0).to(tl.int64)
    previous_row = tl.load(previous_rows + row)
    previous_token = tl.load(yielded + tl.maximum(previous_row, 0))
    token = tl.load(token_ids + row).to(tl.int64)
    tl.store(tokens + row, tl.where(previous_row >= 0, previous_token, token))
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    place = position % BLOCK_SIZE
    stored = block
    if tails is not None:
        stored = tl.load(tails + row).to(tl.int64)
        fills = (context_len > 0) & (place == BLOCK_SIZE - 1)
        tl.store(pairs + 2 * row, tl.where(fills, stored, -1))  # pyright: ignore[reportOptionalOperand]
        tl.store(pairs + 2 * row + 1, tl.where(fills, block, -1))  # pyright: ignore[reportOptionalOperand]
    tl.store(slots + row, tl.where(context_len > 0, stored * BLOCK_SIZE + place, -1))
    d = tl.arange(0, BLOCK_D)
    angle = tl.load(cos_sin + position * DIM + d, mask=d < DIM, other=0.0)
    tl.store(angles + row * DIM + d, angle, mask=d < DIM)
