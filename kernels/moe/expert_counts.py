"""Counts of tokens for each expert, added up on the device that routes them: no step waits for them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl

_BLOCK = 256


def count_experts(experts: Tensor, slots: Tensor, counts: Tensor) -> None:
    """counts[e] += how many of the choices are e.

    experts: [T, top_k] int32 contiguous; -1 is none. slots: [T] int64: where each token's KV goes; below 0 the token is
    idle, and not counted. counts: [E] int64 contiguous, of all experts there are.
    """
    kernel_for(experts, count_experts_triton, count_experts_twin)(experts, slots, counts)


def count_experts_twin(experts: Tensor, slots: Tensor, counts: Tensor) -> None:
    is_counted = (experts >= 0) & (slots >= 0)[:, None]
    counts.scatter_add_(0, experts.clamp(min=0).view(-1).long(), is_counted.view(-1).long())


def count_experts_triton(experts: Tensor, slots: Tensor, counts: Tensor) -> None:
    assert experts.dtype == torch.int32 and experts.is_contiguous()
    assert slots.shape == experts.shape[:1] and slots.dtype == torch.int64 and slots.is_contiguous()
    assert counts.dim() == 1 and counts.dtype == torch.int64 and counts.is_contiguous()
    num_pairs = experts.numel()
    if num_pairs:
        _add_choices_kernel[(-(-num_pairs // _BLOCK),)](
            experts, slots, counts, num_pairs, counts.numel(), TOP_K=experts.shape[1], BLOCK=_BLOCK
        )


@jit
def _add_choices_kernel(
    experts: tl.tensor,  # [T, TOP_K] int32
    slots: tl.tensor,  # [T] int64
    counts: tl.tensor,  # [num_experts] int64
    num_pairs: int,  # T * TOP_K
    num_experts: int,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(T * TOP_K / BLOCK),)."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    slot = tl.load(slots + pair // TOP_K, mask=pair < num_pairs, other=-1)
    is_counted = (slot >= 0) & (expert >= 0) & (expert < num_experts)
    tl.atomic_add(counts + expert, tl.full((BLOCK,), 1, tl.int64), mask=is_counted, sem="relaxed")
