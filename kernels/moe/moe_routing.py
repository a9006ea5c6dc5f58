"""Choice of each token's experts and their weights, from the router's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl

_LOWEST = -1.0e38  # replaces NaN: above the -inf of an expert that may not be chosen
_TINY = 1e-20


@dataclass(frozen=True)
class Routing:
    """Routing of a model: Mixtral, Qwen3 (renormalised softmax), DeepSeek-V2 (groups), V3 (sigmoid, bias, groups)."""

    top_k: int
    sigmoid: bool = False  # else softmax
    renormalise: bool = True  # the weights of a token sum to `scale`
    scale: float = 1.0
    num_groups: int = 1  # of equal numbers of adjacent experts
    top_groups: int = 1  # experts are chosen only from these
    group_by_two: bool = False  # a group counts as the sum of its best two (V3), else as its best one (V2)

    def check(self, num_experts: int) -> None:
        """Raises AssertionError where so many experts cannot be chosen from so."""
        per_group = num_experts // self.num_groups
        assert 0 < self.top_groups <= self.num_groups and per_group * self.num_groups == num_experts
        assert 0 < self.top_k <= self.top_groups * per_group and (per_group > 1 or not self.group_by_two)


def moe_routing(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits: [T, E] floating, last axis contiguous. Returns (weights [T, top_k] float32, experts [T, top_k] int32).

    bias: [E] float32, added to the scores for the choice alone, not to the weights (DeepSeek-V3, section 2.1.2).
    Experts come best first; of equal ones the lowest. A logit that is no number counts as the lowest there is.
    """
    return kernel_for(logits, moe_routing_triton, moe_routing_twin)(logits, routing, bias)


def moe_routing_twin(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = logits.float().nan_to_num(nan=_LOWEST).clamp(_LOWEST, -_LOWEST)
    scores = wide.sigmoid() if routing.sigmoid else wide.softmax(dim=1)
    choice = (scores if bias is None else scores + bias).nan_to_num(nan=_LOWEST, neginf=_LOWEST)
    if routing.top_groups < routing.num_groups:
        groups = choice.unflatten(1, (routing.num_groups, -1))
        counted = groups.topk(2, dim=2).values.sum(dim=2) if routing.group_by_two else groups.amax(dim=2)
        chosen = counted.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
        kept = torch.zeros_like(counted, dtype=torch.bool).scatter_(1, chosen, True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    experts = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _TINY)
    return weights * routing.scale, experts.int()


def moe_routing_triton(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    routing.check(num_experts)
    assert logits.stride(1) == 1
    assert bias is None or (bias.shape == (num_experts,) and bias.dtype == torch.float32 and bias.is_contiguous())
    weights = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    per_group = num_experts // routing.num_groups
    if num_tokens:
        _moe_routing_kernel[(num_tokens,)](
            logits,
            logits if bias is None else bias,
            weights,
            experts,
            logits.stride(0),
            routing.scale,
            HAS_BIAS=bias is not None,
            SIGMOID=routing.sigmoid,
            RENORMALISE=routing.renormalise,
            TOP_K=routing.top_k,
            TOP_GROUPS=routing.top_groups,
            BY_TWO=routing.group_by_two,
            NUM_GROUPS=routing.num_groups,
            PER_GROUP=per_group,
            BLOCK_G=next_power_of_2(routing.num_groups),
            BLOCK_E=next_power_of_2(per_group),
            BLOCK_K=next_power_of_2(routing.top_k),
            LOWEST=_LOWEST,
            TINY=_TINY,
            num_warps=1 if num_experts <= 512 else 4,
        )
    return weights, experts


@jit
def _moe_routing_kernel(
    logits: tl.tensor,  # [T, NUM_GROUPS * PER_GROUP]
    bias: tl.tensor,  # [NUM_GROUPS * PER_GROUP] float32, where HAS_BIAS
    weights: tl.tensor,  # [T, TOP_K] float32 contiguous
    experts: tl.tensor,  # [T, TOP_K] int32 contiguous
    logit_stride: int,
    scale: float,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOWEST: tl.constexpr,
    TINY: tl.constexpr,
):
    """Grid: (T,). The experts stand as [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    within = tl.arange(0, BLOCK_E)
    expert = group[:, None] * PER_GROUP + within[None, :]
    real = (group < NUM_GROUPS)[:, None] & (within < PER_GROUP)[None, :]
    logit = tl.load(logits + token * logit_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    logit = tl.where(real, tl.minimum(tl.where(logit > LOWEST, logit, LOWEST), -LOWEST), float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(tl.minimum(-logit, 80.0)))
    else:
        power = tl.exp(logit - tl.max(logit))
        score = power / tl.sum(power)
    choice = score + tl.load(bias + expert, mask=real, other=0.0) if HAS_BIAS else score
    choice = tl.where(choice > LOWEST, choice, LOWEST)
    choice = tl.where(real, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        highest = tl.expand_dims(tl.max(choice, axis=1), 1)
        counted = tl.max(choice, axis=1)
        if BY_TWO:
            first = tl.expand_dims(tl.min(tl.where(choice == highest, within[None, :], BLOCK_E), axis=1), 1)
            second = tl.max(tl.where(within[None, :] == first, float("-inf"), choice), axis=1)
            counted = counted + second  # pyright: ignore[reportOperatorIssue]
        left = tl.where(group < NUM_GROUPS, tl.maximum(counted, LOWEST), float("-inf"))
        for _ in tl.static_range(TOP_GROUPS):  # pyright: ignore[reportGeneralTypeIssues]
            best = tl.min(tl.where(left == tl.max(left), group, BLOCK_G))
            left = tl.where(group == best, float("-inf"), left)
        # What was chosen has no count any more.
        kept = (left == float("-inf")) & (group < NUM_GROUPS)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    slot = tl.arange(0, BLOCK_K)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    for j in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.min(tl.where(choice == tl.max(choice), expert, BLOCK_G * BLOCK_E))
        is_best = expert == best
        weight = tl.where(slot == j, tl.sum(tl.where(is_best, score, 0.0)), weight)
        chosen = tl.where(slot == j, best, chosen)
        choice = tl.where(is_best, float("-inf"), choice)
    if RENORMALISE:
        weight = weight / (tl.sum(weight) + TINY)
    tl.store(weights + token * TOP_K + slot, weight * scale, mask=slot < TOP_K)
    tl.store(experts + token * TOP_K + slot, chosen, mask=slot < TOP_K)
