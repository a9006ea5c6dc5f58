"""RMSNorm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from .lang import jit, next_power_of_2, tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in float32.

    x: [T, D] or [T, heads, D], last axis contiguous; weight: [D], of one dtype. Returns a new contiguous tensor.
    """
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_twin(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual).

    x, residual: [T, D], last axis contiguous; weight: [D], of one dtype. Returns [T, D] contiguous.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_twin(x, residual, weight, eps)


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    # The product with the weight is taken in x's own dtype, as transformers does.
    return torch.nn.functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype).mul_(weight)


def add_rms_norm_twin(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_twin(residual, weight, eps)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """out: [rows..., D] contiguous, every element written."""
    dim = x.shape[-1]
    num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    assert x.stride(-1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.stride(-1) == 1)
    if x.numel():
        _rms_norm_kernel[(x.shape[0] * num_heads,)](
            x,
            residual if residual is not None else x,
            weight,
            out,
            x.stride(0),
            head_stride,
            residual.stride(0) if residual is not None else 0,
            num_heads,
            dim,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=next_power_of_2(dim),
        )


@jit
def _rms_norm_kernel(
    x: tl.tensor,  # [T, num_heads, dim]
    residual: tl.tensor,  # [T, dim], read and written where HAS_RESIDUAL
    weight: tl.tensor,  # [dim]
    out: tl.tensor,  # [T, num_heads, dim] contiguous
    x_token_stride: int,
    x_head_stride: int,
    residual_stride: int,
    num_heads: int,
    dim: int,
    eps: float,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (T * num_heads,), one program a row."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    d = tl.arange(0, BLOCK)
    inside = d < dim
    value = tl.load(x + token * x_token_stride + head * x_head_stride + d, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        target = residual + token * residual_stride + d
        value = (value.to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(target, value, mask=inside)
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / dim  # pyright: ignore[reportOperatorIssue]
    scale = 1.0 / tl.sqrt(mean_square + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, scaled.to(value.dtype), mask=inside)
