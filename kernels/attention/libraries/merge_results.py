"""Attention over two parts of a context, of the results over each and the logarithms of the sums of their weights.

weight of the second = 1 / (1 + exp(first logarithm - second logarithm))
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.lang import jit, kernel_for, next_power_of_2, tl

NUMBERS = 4096  # of a program


def merge_results(
    first: Tensor, first_logs: Tensor, second: Tensor, second_logs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """first, second: [T, N, V] of any dtypes, the heads of a token side by side; their logarithms: [N, T] float32,
    natural, the first contiguous, the second in its last axis. Returns [T, N, V] in `dtype`, computed in float32, and
    [N, T] float32."""
    return kernel_for(first, merge_results_triton, merge_results_twin)(first, first_logs, second, second_logs, dtype)


def merge_results_twin(
    first: Tensor, first_logs: Tensor, second: Tensor, second_logs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    weight = torch.sigmoid(second_logs - first_logs).t()[..., None]
    return torch.lerp(first.float(), second.float(), weight).to(dtype), torch.logaddexp(first_logs, second_logs)


def merge_results_triton(
    first: Tensor, first_logs: Tensor, second: Tensor, second_logs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, dim = first.shape
    assert second.shape == first.shape and first_logs.shape == second_logs.shape == (num_heads, num_tokens)
    assert all(of.stride()[1:] == (dim, 1) for of in (first, second))
    assert first_logs.is_contiguous() and second_logs.stride(1) == 1
    out = torch.empty(num_tokens, num_heads, dim, dtype=dtype, device=first.device)
    logs = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=first.device)
    block = next_power_of_2(dim)
    rows = max(NUMBERS // block, 1)
    _merge_results_kernel[(-(-num_tokens * num_heads // rows),)](
        first,
        first_logs,
        second,
        second_logs,
        out,
        logs,
        first.stride(0),
        second.stride(0),
        second_logs.stride(0),
        num_tokens,
        HEADS=num_heads,
        DIM=dim,
        BLOCK_D=block,
        ROWS=rows,
    )
    return out, logs


@jit
def _merge_results_kernel(
    first: tl.tensor,  # [T, HEADS, DIM]
    first_logs: tl.tensor,  # [HEADS, T] float32 contiguous
    second: tl.tensor,  # [T, HEADS, DIM]
    second_logs: tl.tensor,  # [HEADS, T] float32
    out: tl.tensor,  # [T, HEADS, DIM] contiguous
    logs: tl.tensor,  # [HEADS, T] float32 contiguous
    first_stride: int,  # of tokens
    second_stride: int,
    logs_stride: int,  # of heads, the second's
    num_tokens: int,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: (ceil(T * HEADS / ROWS),): a program has ROWS heads of tokens, side by side."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    is_row = token < num_tokens
    first_log = tl.load(first_logs + head * num_tokens + token, mask=is_row, other=0.0)
    second_log = tl.load(second_logs + head * logs_stride + token, mask=is_row, other=0.0)
    behind = tl.exp(-tl.abs(second_log - first_log))  # of the lower one's weight to the other's
    tl.store(logs + head * num_tokens + token, tl.maximum(first_log, second_log) + tl.log(1.0 + behind), mask=is_row)
    weight = tl.where(second_log > first_log, 1.0, behind) / (1.0 + behind)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = is_row[:, None] & (d < DIM)
    place = (head * DIM)[:, None] + d
    one = tl.load(first + (token * first_stride)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(second + (token * second_stride)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    merged = one + weight[:, None] * (other - one)
    tl.store(out + (row * DIM)[:, None] + d, merged, mask=inside)
