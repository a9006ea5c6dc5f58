"""Adds up what a token's experts gave, by the router's weights, always in the order in which they were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl

_BLOCK = 1024


def moe_combine(
    y: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    first_expert: int = 0,
    shared: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """sum of weights[t, j] * y[t * top_k + j], in float32, and of shared[t]. Returns [T, D] contiguous, of y's dtype.

    y: [T * top_k, D] contiguous, not written (and not read) for experts beyond first_expert and the num_experts from
    it on; weights: [T, top_k] float32 and experts: [T, top_k] int32, contiguous; shared: [T, D], last axis contiguous.
    rows: [T * top_k] int32 contiguous: which of y's rows, which may be any number, each choice has, -1 for experts that
    are not here.
    """
    run = kernel_for(y, moe_combine_triton, moe_combine_twin)
    return run(y, weights, experts, num_experts, first_expert, shared, rows)


def moe_combine_twin(
    y: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    first_expert: int = 0,
    shared: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    is_here = (experts >= first_expert) & (experts < first_expert + num_experts)
    if rows is not None:
        is_here, y = (rows >= 0).view(experts.shape), y[rows.clamp(min=0).long()]
    parts = y.float().unflatten(0, tuple(experts.shape)).masked_fill(~is_here[..., None], 0)
    out = (parts * weights[..., None]).sum(dim=1)
    return (out if shared is None else out + shared.float()).to(y.dtype)


def moe_combine_triton(
    y: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    first_expert: int = 0,
    shared: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    (num_tokens, top_k), dim = experts.shape, y.shape[1]
    assert weights.shape == experts.shape and (rows is not None or y.shape[0] == experts.numel())
    assert rows is None or (rows.numel() == experts.numel() and rows.dtype == torch.int32 and rows.is_contiguous())
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    assert y.is_contiguous() and weights.is_contiguous() and experts.is_contiguous()
    assert shared is None or (shared.shape == (num_tokens, dim) and shared.stride(1) == 1)
    out = torch.empty(num_tokens, dim, dtype=y.dtype, device=y.device)
    if num_tokens:
        _moe_combine_kernel[(num_tokens, -(-dim // _BLOCK))](
            y,
            weights,
            experts,
            y if shared is None else shared,
            experts if rows is None else rows,
            out,
            dim,
            0 if shared is None else shared.stride(0),
            first_expert,
            num_experts,
            HAS_SHARED=shared is not None,
            HAS_ROWS=rows is not None,
            TOP_K=top_k,
            BLOCK=_BLOCK,
        )
    return out


@jit
def _moe_combine_kernel(
    y: tl.tensor,  # [T * TOP_K, dim] contiguous; [any, dim] where HAS_ROWS
    weights: tl.tensor,  # [T, TOP_K] float32
    experts: tl.tensor,  # [T, TOP_K] int32
    shared: tl.tensor,  # [T, dim], where HAS_SHARED
    rows: tl.tensor,  # [T, TOP_K] int32, where HAS_ROWS
    out: tl.tensor,  # [T, dim] contiguous
    dim: int,
    shared_stride: int,
    first_expert: int,
    num_experts: int,
    HAS_SHARED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (T, ceil(dim / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < dim
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = token * TOP_K + j
        if HAS_ROWS:
            at = tl.load(rows + at).to(tl.int64)
            end = tl.where(at >= 0, dim, 0)
        else:
            expert = tl.load(experts + at) - first_expert
            end = tl.where((expert >= 0) & (expert < num_experts), dim, 0)
        row = tl.load(y + at * dim + i, mask=i < end, other=0.0).to(tl.float32)
        acc += row * tl.load(weights + token * TOP_K + j)
    if HAS_SHARED:
        acc += tl.load(shared + token * shared_stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * dim + i, acc, mask=inside)
