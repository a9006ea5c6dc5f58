"""Mixtures of experts compared with the formula, token by token: alone, beside other rows, and divided over ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from diptych.kernels.moe import moe as moe_kernels
from diptych.kernels.moe.expert_counts import count_experts
from diptych.kernels.moe.grouped_gemm import grouped_product
from diptych.workers.models.checkpoint.weights import LayerWeights
from diptych.workers.models.families.spec import MlpSpec, MoeSpec, RoutingSpec
from diptych.workers.models.layers import moe as moe_layer
from diptych.workers.models.layers.moe import moe

HIDDEN, INNER, NUM_EXPERTS = 32, 16, 8
MIXTRAL = RoutingSpec(2)
QWEN3 = RoutingSpec(3, renormalise=False)
GPT_OSS = RoutingSpec(2, router_bias=True)
DEEPSEEK_V2 = RoutingSpec(3, renormalise=False, scale=16.0, num_groups=4, top_groups=2)
DEEPSEEK_V3 = RoutingSpec(3, sigmoid=True, scale=2.5, num_groups=2, top_groups=1, group_by_two=True, choice_bias=True)


def mixture(routing: RoutingSpec, *, shared: bool = False) -> tuple[MoeSpec, LayerWeights]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    none = torch.empty(0)
    weights = LayerWeights(
        qkv=none,
        o=none,
        router=random(NUM_EXPERTS, HIDDEN) * 2,
        router_bias=random(NUM_EXPERTS) if routing.router_bias else None,
        choice_bias=random(NUM_EXPERTS).abs() if routing.choice_bias else None,
        experts_gate_up=random(NUM_EXPERTS, 2 * INNER, HIDDEN),
        experts_down=random(NUM_EXPERTS, HIDDEN, INNER),
        shared_gate_up=random(2 * INNER, HIDDEN) if shared else None,
        shared_down=random(HIDDEN, INNER) if shared else None,
    )
    return MoeSpec(NUM_EXPERTS, MlpSpec(INNER), routing, MlpSpec(INNER) if shared else None), weights


def test_each_product_has_the_kernel_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[tuple[int, ...], bool]] = []

    def noting(x: Tensor, weight: Tensor, *arguments: Any, **named: Any) -> Tensor:
        given.append((tuple(weight.shape), bool(named.get("in_gluon", len(arguments) > 5 and arguments[5]))))
        return grouped_product(x, weight, *arguments, **named)

    monkeypatch.setattr(moe_kernels, "grouped_product", noting)
    monkeypatch.setattr(moe_layer, "has_kernel", lambda _: True)
    spec, weights = mixture(MIXTRAL)
    gate_up, down = (NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER)
    for chosen_ones in ((False, False), (True, False), (False, True)):
        found = moe(spec, weights, rows(5), in_gluon=chosen_ones)
        torch.testing.assert_close(found, formula(spec, weights, rows(5)))
        assert given[-2:] == list(zip((gate_up, down), chosen_ones, strict=True))


def rows(num: int) -> Tensor:
    return torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(4))


def chosen(spec: RoutingSpec, weights: LayerWeights, row: Tensor) -> dict[int, float]:
    """Which experts one row [H] has, and their weights: the papers' words, a number at a time."""
    logits = weights.router @ row
    if weights.router_bias is not None:
        logits = logits + weights.router_bias
    scores = (logits.sigmoid() if spec.sigmoid else logits.softmax(0)).tolist()
    bias = [0.0] * len(scores) if weights.choice_bias is None else weights.choice_bias.tolist()
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    best = 2 if spec.group_by_two else 1
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in groups[: spec.top_groups] for e in group]
    experts = sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]
    total = sum(scores[e] for e in experts) if spec.renormalise else 1.0
    return {e: spec.scale * scores[e] / total for e in experts}


def formula(spec: MoeSpec, weights: LayerWeights, hidden: Tensor) -> Tensor:
    def mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up @ row).chunk(2)
        return down @ (silu(gate) * up)

    out = torch.zeros_like(hidden)
    for t, row in enumerate(hidden):
        for e, weight in chosen(spec.routing, weights, row).items():
            out[t] += weight * mlp(row, weights.experts_gate_up[e], weights.experts_down[e])
        if spec.shared is not None:
            out[t] += mlp(row, weights.shared_gate_up, weights.shared_down)
    return out


@pytest.mark.parametrize("routing", [MIXTRAL, QWEN3, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3])
@pytest.mark.parametrize("shared", [False, True])
def test_as_the_formula(routing: RoutingSpec, shared: bool) -> None:
    spec, weights = mixture(routing, shared=shared)
    hidden = rows(40)
    torch.testing.assert_close(moe(spec, weights, hidden), formula(spec, weights, hidden), rtol=1e-4, atol=1e-5)


def test_what_is_beside_a_row_changes_nothing() -> None:
    """But the rounding of torch's products, which depends on how many rows they have."""
    spec, weights = mixture(DEEPSEEK_V3, shared=True)
    hidden = rows(33)
    together = moe(spec, weights, hidden)
    for i in (0, 7, 32):
        torch.testing.assert_close(together[i : i + 1], moe(spec, weights, hidden[i : i + 1]))


def test_tokens_of_each_expert_are_counted() -> None:
    spec, weights = mixture(MIXTRAL)
    tokens, hidden = torch.ones(NUM_EXPERTS, dtype=torch.int64), rows(20)
    slots = torch.arange(20) - 1  # the first is idle
    for _ in range(2):
        moe(spec, weights, hidden, count=partial(count_experts, slots=slots, counts=tokens))
    expected = [1] * NUM_EXPERTS
    for row in hidden[1:]:
        for e in chosen(spec.routing, weights, row):
            expected[e] += 2
    assert tokens.tolist() == expected


def test_parts_of_the_inner_dimension_add_up() -> None:
    spec, weights = mixture(DEEPSEEK_V3, shared=True)
    hidden, half = rows(12), INNER // 2
    whole, parts = moe(spec, weights, hidden), []
    for rank in range(2):
        own = slice(rank * half, (rank + 1) * half)

        def halves(of: Tensor | None, own: slice = own) -> Tensor:
            assert of is not None
            return of.unflatten(-2, (2, INNER))[..., own, :].flatten(-3, -2)

        part = replace(
            weights,
            experts_gate_up=halves(weights.experts_gate_up),
            experts_down=weights.experts_down[..., own],
            shared_gate_up=halves(weights.shared_gate_up),
            shared_down=weights.shared_down[..., own],
        )
        parts.append(moe(spec, part, hidden))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_parts_of_the_experts_add_up() -> None:
    spec, weights = mixture(MIXTRAL)
    hidden, parts = rows(12), []
    for own in (slice(0, 3), slice(3, 8)):
        part = replace(weights, experts_gate_up=weights.experts_gate_up[own], experts_down=weights.experts_down[own])

        def here(experts: Tensor, own: slice = own) -> Tensor:
            return torch.where((experts >= own.start) & (experts < own.stop), experts - own.start, -1)

        parts.append(moe(spec, part, hidden, here))
    torch.testing.assert_close(parts[0] + parts[1], moe(spec, weights, hidden))
