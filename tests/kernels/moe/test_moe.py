"""A mixture's experts against the formula, token by token, and the router's choice against transformers'."""

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from diptych.kernels.gemm.packed_weight import pack
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.moe.moe import moe_experts
from diptych.kernels.moe.moe_combine import moe_combine
from diptych.kernels.moe.moe_routing import Routing, moe_routing

from ...support.quantised import random_codes, random_scaled

NUM_EXPERTS, DIM, INNER = 6, 64, 32


def formula(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            if 0 <= e < NUM_EXPERTS:
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                out[t] += weight * (down[e] @ (silu(gate) * up))
    return out


def routed(num_tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, DIM, generator=generator)
    return x, *moe_routing(torch.randn(num_tokens, num_experts, generator=generator), Routing(3))


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_experts(num_tokens: int) -> None:
    x, weights, experts = routed(num_tokens, NUM_EXPERTS)
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, DIM, generator=generator) / 8
    down = torch.randn(NUM_EXPERTS, DIM, INNER, generator=generator) / 6
    expected = formula(x, weights, experts, gate_up, down)
    torch.testing.assert_close(moe_experts(x, weights, experts, gate_up, down), expected, rtol=1e-4, atol=1e-5)
    shared = torch.randn(num_tokens, DIM, generator=generator)
    found = moe_experts(x, weights, experts, gate_up, down, shared=shared)
    torch.testing.assert_close(found, expected + shared, rtol=1e-4, atol=1e-5)


def test_ranks_add_up_and_padding_adds_nothing() -> None:
    x, weights, experts = routed(20, NUM_EXPERTS)
    experts[4] = -1
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, DIM, generator=generator) / 8
    down = torch.randn(NUM_EXPERTS, DIM, INNER, generator=generator) / 6
    whole = moe_experts(x, weights, experts, gate_up, down)
    assert not whole[4].any()
    parts = [moe_experts(x, weights, experts, gate_up[s], down[s], s.start) for s in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("kind", ["fp8", "fp8 of blocks", "int8", "int4"])
def test_quantised_experts_are_near_what_their_weights_stand_for(kind: str) -> None:
    x, weights, experts = routed(30, NUM_EXPERTS)

    def weight_of(n: int, k: int) -> object:
        if kind == "int4":
            parts = [random_codes(n, k, 4, 32, seed) for seed in range(NUM_EXPERTS)]
            return pack(*(torch.stack(part) for part in zip(*parts, strict=True)), 4, 32)
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        return ScaledWeight(*random_scaled((NUM_EXPERTS, n, k), dtype, kind == "fp8 of blocks"))

    gate_up, down = weight_of(2 * INNER, DIM), weight_of(DIM, INNER)
    found = moe_experts(x, weights, experts, gate_up, down)  # type: ignore[arg-type]
    expected = formula(x, weights, experts, gate_up.unpacked(), down.unpacked())  # type: ignore[attr-defined]
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-5 if kind == "int4" else 0.06)


@pytest.mark.parametrize("top_k", [2, 8])
def test_a_sum_does_not_depend_on_what_is_beside_it(top_k: int) -> None:
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(30 * top_k, DIM + 3, generator=generator)
    weights = torch.rand(30, top_k, generator=generator)
    experts = torch.zeros(30, top_k, dtype=torch.int32)
    whole = moe_combine(y, weights, experts, 1)
    for t in (0, 11, 29):
        alone = moe_combine(y[t * top_k : (t + 1) * top_k], weights[t : t + 1], experts[t : t + 1], 1)
        assert torch.equal(alone[0], whole[t])


def test_choice_of_deepseek_v3() -> None:
    config = DeepseekV3Config(hidden_size=16, n_routed_experts=32, num_experts_per_tok=4, n_group=4, topk_group=2)
    router = DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(0)
    router.weight.data.copy_(torch.randn(32, 16, generator=generator) / 4)
    router.e_score_correction_bias.copy_(torch.rand(32, generator=generator))
    logits, expected_weights, expected_experts = router(torch.randn(9, 16, generator=generator))
    routing = Routing(4, True, config.norm_topk_prob, config.routed_scaling_factor, 4, 2, True)
    weights, experts = moe_routing(logits, routing, router.e_score_correction_bias)
    rows = zip(*(part.tolist() for part in (experts, weights, expected_experts, expected_weights)), strict=True)
    for found_experts, found_weights, e, w in rows:
        assert dict(zip(found_experts, found_weights, strict=True)) == pytest.approx(dict(zip(e, w, strict=True)))
