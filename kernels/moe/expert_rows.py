"""Rows of a mixture's experts where those of each begin at a multiple of some number, as libraries multiply them.

    x by token ── pad_rows ──> rows by expert ── product ── gate_rows ──> rows of the second product ── product ──> y

What is between an expert's last row and the next expert's first is neither written nor read here. Scales of rows in fp8
are laid out as TMA reads them: those of one block of columns side by side.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..elementwise.gate_mul import ALPHA, SILU, activated, gate_mul_twin
from ..gemm.quantise_rows import SCALE_BLOCK, limit_of, quantise_rows_twin
from .moe_sort import ExpertOrder

_ROW = 8192  # bytes of a row that a program copies
_PARTS = 8  # of SCALE_BLOCK numbers each, that a program gates


@dataclass(frozen=True)
class PaddedRows:
    """R rows, more than there are: their number depends on those of pairs and experts alone, for graphs."""

    values: Tensor  # [R, K] fp8 contiguous
    scales: Tensor  # [R, K / 128] float32, of strides 1 and R
    rows: Tensor  # [P] int32: the row of each pair; -1: its expert is not here
    ends: Tensor  # [E] int32: behind the last row of each expert; the next one's first is the next multiple


def num_padded_rows(num_pairs: int, num_experts: int, alignment: int) -> int:
    """Return how many rows so many pairs need at most: each expert that has some may leave all but one empty."""
    return (num_pairs + min(num_experts, num_pairs) * (alignment - 1)) // alignment * alignment


def pad_rows(x: Tensor, x_scales: Tensor, order: ExpertOrder, alignment: int) -> PaddedRows:
    """Copy the row of every pair's token to where its expert's rows are. x: [T, K] fp8, and x_scales: [T, K / 128]
    float32, contiguous (quantise_rows makes both); order: with the same number of pairs a token."""
    return kernel_for(x, pad_rows_triton, pad_rows_twin)(x, x_scales, order, alignment)


def pad_rows_twin(x: Tensor, x_scales: Tensor, order: ExpertOrder, alignment: int) -> PaddedRows:
    padded = _empty(x, order, alignment)
    padded.rows.fill_(-1)
    first = 0
    for expert, (start, end) in enumerate(itertools.pairwise(order.starts.tolist())):
        pairs, count = order.pairs[start:end].long(), end - start
        padded.values.view(torch.uint8)[first : first + count] = x.view(torch.uint8)[pairs // order.top_k]
        padded.scales[first : first + count] = x_scales[pairs // order.top_k]
        padded.rows[pairs] = torch.arange(first, first + count, dtype=torch.int32, device=x.device)
        padded.ends[expert] = first + count
        first += -(-count // alignment) * alignment
    return padded


def pad_rows_triton(x: Tensor, x_scales: Tensor, order: ExpertOrder, alignment: int) -> PaddedRows:
    (_, k), num_pairs, num_experts = x.shape, order.pairs.numel(), order.starts.numel() - 1
    assert x.is_contiguous() and x.element_size() == 1 and k % SCALE_BLOCK == 0
    assert len(x) * order.top_k == num_pairs > 0
    assert x_scales.shape == (len(x), k // SCALE_BLOCK) and x_scales.dtype == torch.float32 and x_scales.is_contiguous()
    padded = _empty(x, order, alignment)
    block = min(next_power_of_2(k), _ROW)
    _pad_rows_kernel[(num_pairs, -(-k // block))](
        x.view(torch.uint8),
        x_scales,
        order.pairs,
        order.starts,
        padded.values.view(torch.uint8),
        padded.scales,
        padded.rows,
        padded.ends,
        len(padded.values),
        k,
        k // SCALE_BLOCK,
        num_experts,
        TOP_K=order.top_k,
        ALIGNMENT=alignment,
        BLOCK_E=next_power_of_2(num_experts),
        PARTS=next_power_of_2(k // SCALE_BLOCK),
        BLOCK=block,
    )
    return padded


def gate_rows(gate_up: Tensor, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """SiLU(gate) * up of the rows that pairs have, quantised. gate_up: [R, 2I] contiguous, gate first; rows: [P] int32,
    as PaddedRows has them; dtype: of fp8. Returns (values [R, I] contiguous; scales [R, I / 128] float32, of strides 1
    and R); other rows are not written."""
    return kernel_for(gate_up, gate_rows_triton, gate_rows_twin)(gate_up, rows, dtype)


def gate_rows_twin(gate_up: Tensor, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, scales = _gated(gate_up, dtype)
    here = rows[rows >= 0].long()
    if len(here):
        found, found_scales = quantise_rows_twin(gate_mul_twin(gate_up[here], SILU), dtype, blocks=True)
        values.view(torch.uint8)[here] = found.view(torch.uint8)
        scales[here] = found_scales
    return values, scales


def gate_rows_triton(gate_up: Tensor, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    dim = gate_up.shape[1] // 2
    assert gate_up.is_contiguous() and gate_up.shape[1] == 2 * dim and dim % SCALE_BLOCK == 0
    assert rows.dtype == torch.int32 and rows.is_contiguous()
    values, scales = _gated(gate_up, dtype)
    _gate_rows_kernel[(rows.numel(), -(-dim // (_PARTS * SCALE_BLOCK)))](
        gate_up,
        rows,
        values,
        scales,
        len(gate_up),
        dim,
        limit_of(dtype),
        ALPHA=ALPHA,
        PARTS=_PARTS,
        WIDTH=SCALE_BLOCK,
    )
    return values, scales


def _empty(x: Tensor, order: ExpertOrder, alignment: int) -> PaddedRows:
    num_pairs, num_experts, k = order.pairs.numel(), order.starts.numel() - 1, x.shape[1]
    num_rows = num_padded_rows(num_pairs, num_experts, alignment)
    return PaddedRows(
        x.new_empty(num_rows, k),
        torch.empty(k // SCALE_BLOCK, num_rows, dtype=torch.float32, device=x.device).mT,
        torch.empty(num_pairs, dtype=torch.int32, device=x.device),
        torch.empty(num_experts, dtype=torch.int32, device=x.device),
    )


def _gated(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    values = torch.empty(num_rows, dim, dtype=dtype, device=gate_up.device)
    return values, torch.empty(dim // SCALE_BLOCK, num_rows, dtype=torch.float32, device=gate_up.device).mT


@jit
def _pad_rows_kernel(
    x: tl.tensor,  # [T, k] uint8 contiguous
    x_scales: tl.tensor,  # [T, per_row] float32 contiguous
    pairs: tl.tensor,  # [P] int32
    starts: tl.tensor,  # [num_experts + 1] int32
    values: tl.tensor,  # [num_rows, k] uint8 contiguous
    scales: tl.tensor,  # [per_row, num_rows] float32 contiguous
    rows: tl.tensor,  # [P] int32
    ends: tl.tensor,  # [num_experts] int32
    num_rows: int,
    k: int,
    per_row: int,
    num_experts: int,
    TOP_K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (P, ceil(k / BLOCK)). A pair's row: where its expert's begin, and its pairs before it."""
    place = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    start = tl.load(starts + e, mask=e < num_experts, other=0)
    end = tl.load(starts + e + 1, mask=e < num_experts, other=0)
    padded = (end - start + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    is_before = end <= place  # those beyond num_experts have no rows
    is_here = place < tl.max(end)
    row = tl.sum(tl.where(is_before, padded, 0)) + place - tl.max(tl.where(is_before, end, 0))
    pair = tl.load(pairs + place)
    token = (pair // TOP_K).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.where(is_here, k, 0)
    tl.store(values + row.to(tl.int64) * k + i, tl.load(x + token * k + i, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        part = tl.arange(0, PARTS)
        its = part < tl.where(is_here, per_row, 0)
        scale = tl.load(x_scales + token * per_row + part, mask=its)
        tl.store(scales + part.to(tl.int64) * num_rows + row, scale, mask=its)
        tl.store(rows + pair, tl.where(is_here, row, -1))
        if place == 0:
            tl.store(ends + e, tl.cumsum(padded, axis=0) - padded + end - start, mask=e < num_experts)


@jit
def _gate_rows_kernel(
    gate_up: tl.tensor,  # [num_rows, 2 dim] contiguous
    rows: tl.tensor,  # [P] int32
    values: tl.tensor,  # [num_rows, dim] fp8 contiguous
    scales: tl.tensor,  # [dim / WIDTH, num_rows] float32 contiguous
    num_rows: int,
    dim: int,
    limit: float,
    ALPHA: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (P, ceil(dim / (PARTS * WIDTH)))."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
        i = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = i < dim
        source = gate_up + row * 2 * dim + i
        gate = tl.load(source, mask=inside, other=0.0)
        up = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
        rounded = activated(gate.to(tl.float32), 0, ALPHA).to(gate.dtype).to(tl.float32)
        value = (rounded * up).to(gate.dtype).to(tl.float32)
        scale = tl.max(tl.abs(value), axis=1) / limit  # pyright: ignore[reportOperatorIssue]
        tl.store(scales + part.to(tl.int64) * num_rows + row, scale, mask=part * WIDTH < dim)
        scaled = value / tl.where(scale == 0.0, 1.0, scale)[:, None]
        tl.store(values + row * dim + i, tl.minimum(tl.maximum(scaled, -limit), limit), mask=inside)
