"""Quantises activations for the fp8 and int8 products: a scale a row, a scale for each 128 of a row, or a given one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.lang import has_kernel, jit, kernel_for, next_power_of_2, tl

SCALE_BLOCK = 128  # DeepSeek-V3 (2024), section 3.3
_BLOCKS = 16  # of a program, where a row has a scale for each
_MAX_ROW = 65536


def limit_of(dtype: torch.dtype) -> float:
    """The largest magnitude that is used: 448 of float8_e4m3fn, 240 of float8_e4m3fnuz, 127 of int8."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def quantise_rows(x: Tensor, dtype: torch.dtype, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """x: [M, K] floating, last axis contiguous. Returns (values [M, K] of `dtype`, contiguous; scales float32).

    x is about values * scale; scales: [M], or [M, ceil(K / 128)] with `blocks`; 0 where all they cover is 0.
    dtype: float8_e4m3fn, float8_e4m3fnuz (AMD's) or int8.
    """
    return kernel_for(x, quantise_rows_triton, quantise_rows_twin)(x, dtype, blocks)


def quantise_rows_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by one scale that is known (a checkpoint's, of calibration): [1] float32, not 0. Returns the values.

    What is beyond the largest magnitude is cut to it.
    """
    return quantise_rows_by_triton(x, scale, dtype) if has_kernel(x) else _rounded(x.float() / scale, dtype)


def quantise_rows_twin(x: Tensor, dtype: torch.dtype, blocks: bool = False) -> tuple[Tensor, Tensor]:
    num_rows, k = x.shape
    wide = x.float()
    parts = pad(wide, (0, -k % SCALE_BLOCK)).view(num_rows, -1, SCALE_BLOCK) if blocks else wide[:, None]
    scales = parts.abs().amax(dim=2, keepdim=True) / limit_of(dtype)
    values = _rounded(parts / torch.where(scales == 0, 1.0, scales), dtype)
    return values.view(num_rows, -1)[:, :k].contiguous(), scales.squeeze(2) if blocks else scales.view(num_rows)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = limit_of(dtype)
    return (x.round() if dtype == torch.int8 else x).clamp(-limit, limit).to(dtype)


def quantise_rows_triton(x: Tensor, dtype: torch.dtype, blocks: bool = False) -> tuple[Tensor, Tensor]:
    num_rows, k = x.shape
    per_row = -(-k // SCALE_BLOCK) if blocks else 1
    scales = torch.empty(num_rows, per_row, dtype=torch.float32, device=x.device)
    values = _launch(x, scales, dtype, blocks, is_given=False)
    return values, scales if blocks else scales.view(num_rows)


def quantise_rows_by_triton(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    assert scale.numel() == 1 and scale.dtype == torch.float32
    return _launch(x, scale, dtype, blocks=False, is_given=True)


def _launch(x: Tensor, scales: Tensor, dtype: torch.dtype, blocks: bool, is_given: bool) -> Tensor:
    num_rows, k = x.shape
    assert x.stride(1) == 1 and x.is_floating_point() and k <= _MAX_ROW
    values = torch.empty(num_rows, k, dtype=dtype, device=x.device)
    parts, width = (_BLOCKS, SCALE_BLOCK) if blocks else (1, next_power_of_2(k))
    if num_rows:
        _quantise_rows_kernel[(num_rows, -(-k // (parts * width)))](
            x,
            values,
            scales,
            x.stride(0),
            k,
            scales.shape[-1] if blocks else 1,
            limit_of(dtype),
            IS_GIVEN=is_given,
            IS_INT=dtype == torch.int8,
            PARTS=parts,
            WIDTH=width,
            num_warps=min(max(parts * width // 1024, 1), 16),
        )
    return values


@jit
def _quantise_rows_kernel(
    x: tl.tensor,  # [M, k]
    values: tl.tensor,  # [M, k] contiguous
    scales: tl.tensor,  # [M, per_row] float32 contiguous, written; [1], read, where IS_GIVEN
    x_stride: int,
    k: int,
    per_row: int,
    limit: float,
    IS_GIVEN: tl.constexpr,
    IS_INT: tl.constexpr,
    PARTS: tl.constexpr,  # of a program, each with a scale
    WIDTH: tl.constexpr,
):
    """Grid: (M, ceil(k / (PARTS * WIDTH)))."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    i = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = i < k
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if IS_GIVEN:
        scaled = value / tl.load(scales)
    else:
        scale = tl.max(tl.abs(value), axis=1) / limit  # pyright: ignore[reportOperatorIssue]
        tl.store(scales + row * per_row + part, scale, mask=part < per_row)
        scaled = value / tl.where(scale == 0.0, 1.0, scale)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if IS_INT:
        # 1.5 * 2^23 leaves no places after the point: rounds to the nearest, halves to even, as torch does.
        scaled = (scaled + 12582912.0) - 12582912.0
    tl.store(values + row * k + i, scaled, mask=inside)
