"""RMSNorm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.dependent_launch import dependent_launch, let_next_start, prefetch_lines, previous_done
from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import chip_of

_TILE = 2048  # numbers of a program at once, in several rows where they are short
_PER_WARP = 512  # 16 numbers per thread: two bfloat16 vectors in flight


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in float32.

    x: [T, D] or [T, heads, D], last axis contiguous; weight: [D], of x's dtype, which x / rms(x) is rounded to before
    the product with it (as Llama does), or float32: not rounded (as Gemma does); None: 1. Returns a new contiguous
    tensor.
    """
    return kernel_for(x, rms_norm_triton, rms_norm_twin)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual).

    x, residual: [T, D], last axis contiguous, of one dtype; weight: as `rms_norm` has it. Returns [T, D] contiguous.
    """
    return kernel_for(x, add_rms_norm_triton, add_rms_norm_twin)(x, residual, weight, eps)


def rms_norm_twin(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None or weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    return torch.nn.functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype).mul_(weight)


def add_rms_norm_twin(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_twin(residual, weight, eps)


def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, eps: float) -> None:
    """out: [rows..., D] contiguous, every element written."""
    dim = x.shape[-1]
    num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    assert x.dim() in (2, 3) and x.stride(-1) == 1 and out.is_contiguous()
    if weight is not None:
        assert weight.shape == (dim,) and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
    if residual is not None:
        assert x.dim() == 2 and residual.shape == x.shape and residual.stride(-1) == 1 and residual.dtype == x.dtype
    num_rows = x.shape[0] * num_heads
    if not num_rows or not dim:
        return
    block = next_power_of_2(dim)
    rows = max(_TILE // block, 1)
    num_warps = min(max(rows * block // _PER_WARP, 1), 16)
    _rms_norm_kernel[(min(-(-num_rows // rows), chip_of(x.device).resident_programs(num_warps)),)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        x.stride(0),
        head_stride,
        residual.stride(0) if residual is not None else 0,
        num_rows,
        num_heads,
        dim,
        eps,
        HAS_RESIDUAL=residual is not None,
        IS_WIDE=weight is None or weight.dtype == torch.float32,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
        **dependent_launch(x.device),
    )


@jit
def _rms_norm_kernel(
    x: tl.tensor,  # [T, num_heads, dim]
    residual: tl.tensor,  # [T, dim], read and written where HAS_RESIDUAL
    weight: tl.tensor | None,  # [dim], or None
    out: tl.tensor,  # [num_rows, dim] contiguous
    x_token_stride: int,
    x_head_stride: int,
    residual_stride: int,
    num_rows: int,  # T * num_heads
    num_heads: int,
    dim: int,
    eps: float,
    HAS_RESIDUAL: tl.constexpr,
    IS_WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (programs that are resident at once, or fewer,): a program takes every so many-th group of ROWS rows, and
    the weight once."""
    let_next_start(PDL)
    d = tl.arange(0, BLOCK)[None, :]
    scale_of = tl.full((1, BLOCK), 1.0, tl.float32)
    if weight is not None:
        scale_of = tl.load(weight + d, mask=d < dim, other=0.0).to(tl.float32)
    if PDL and HAS_RESIDUAL and BLOCK >= 64:  # which weights have pushed out of the second cache
        line = tl.minimum(tl.arange(0, BLOCK // 64) * 64, dim - 1)
        prefetch_lines(
            residual + tl.minimum(tl.program_id(0) * ROWS, num_rows - 1).to(tl.int64) * residual_stride + line
        )
    previous_done(PDL)
    for group in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        index = (group * ROWS + tl.arange(0, ROWS))[:, None]
        row = index.to(tl.int64)
        inside = (row < num_rows) & (d < dim)
        token, head = (index // num_heads).to(tl.int64), (index % num_heads).to(tl.int64)
        value = tl.load(x + token * x_token_stride + head * x_head_stride + d, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            target = residual + row * residual_stride + d
            value = (value.to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
            tl.store(target, value, mask=inside)
        wide = value.to(tl.float32)
        mean_square = tl.sum(wide * wide, axis=1) / dim  # pyright: ignore[reportOperatorIssue]
        scale = 1.0 / tl.sqrt(mean_square + eps)
        normed = wide * scale[:, None]
        if not IS_WIDE:
            normed = normed.to(value.dtype).to(tl.float32)
        tl.store(out + row * dim + d, (normed * scale_of).to(value.dtype), mask=inside)
