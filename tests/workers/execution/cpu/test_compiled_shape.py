"""Which specs the compiled kernels compute, and which layers share a way to attend."""

from dataclasses import replace

import pytest
import torch

from diptych.kernels.cpu.experts import ExpertSizes
from diptych.workers.execution.cpu.compiled_shape import EXPERT_GATES, GATES, attention_ids, shape_of
from diptych.workers.models.families.spec import (
    Activation,
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    Norms,
    RopeSpec,
    RoutingSpec,
)
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.plan.compiled_limits import ACTIVATIONS, EXPERT_ACTIVATIONS, why_not, why_torch
from diptych.workers.models.plan.sharding import Share

LOCAL = AttentionSpec(4, 2, 16, RopeSpec(theta=100.0), scale=0.2, window=20)
GLOBAL = AttentionSpec(4, 2, 16, RopeSpec(), scale=0.2, sinks=True)

MIXTURE = MoeSpec(4, MlpSpec(32), RoutingSpec(2))


def spec_of(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("Some", 100, 64, layers, 1e-6, 512, 512, True, (), embedding_scale=7.03, logit_softcap=30.0)


def layer(attention: AttentionSpec | LatentSpec, activation: Activation = "silu", norms: Norms = "before") -> LayerSpec:
    return LayerSpec(attention, MlpSpec(160, activation), norms)


def test_layers_that_attend_alike_share_what_a_step_plans() -> None:
    layers = [layer(LOCAL), layer(GLOBAL), layer(LOCAL, "gelu_tanh"), layer(replace(GLOBAL, sinks=False), norms="both")]
    spec = spec_of(*layers)
    assert why_not(spec) is None
    assert attention_ids(spec) == [0, 1, 0, 1]
    tables = rope_tables(spec, 32, torch.device("cpu"))
    shape = shape_of(spec, tables, 16, torch.bfloat16)
    assert [kind.options.window for kind in shape.attentions] == [20, 0]
    assert [kind.rope for kind in shape.attentions] == list(tables)
    assert shape.leaves_halves and not shape_of(spec_of(layer(LOCAL)), tables, 16, torch.float32).leaves_halves
    assert shape.embed_scale == 7.03125, "as bfloat16 has it"
    assert (shape.inner_size, shape.logit_softcap) == (160, 30.0)
    half = shape_of(spec, tables, 16, torch.float32, Share(1, 2))
    assert (half.first_token, half.vocab_size, half.is_split, shape.is_split) == (50, 50, True, False)


def test_layers_of_experts_beside_others() -> None:
    spec = spec_of(LayerSpec(LOCAL, MIXTURE), layer(LOCAL), LayerSpec(GLOBAL, MIXTURE))
    assert why_not(spec) is None
    shape = shape_of(spec, rope_tables(spec, 32, torch.device("cpu")), 16, torch.bfloat16)
    assert shape.experts == ExpertSizes(4, 2, 64, 32, torch.bfloat16)
    assert (shape.num_experts, shape.inner_size) == (4, 160)


@pytest.mark.parametrize(
    ("layers", "num_ranks", "said"),
    [
        ([layer(LOCAL), layer(replace(GLOBAL, num_kv_heads=4))], 1, "heads of other sizes"),
        ([layer(LatentSpec(4, 0, 32, 16, 16, 16, RopeSpec(), 0.1))], 1, "latent attention"),
        ([LayerSpec(LOCAL, replace(MIXTURE, shared=MlpSpec(32)))], 1, "experts that every token has"),
        ([LayerSpec(LOCAL, replace(MIXTURE, num_experts=2048))], 1, "more than 1024 experts"),
        ([LayerSpec(LOCAL, MIXTURE), LayerSpec(LOCAL, replace(MIXTURE, num_experts=6))], 1, "mixtures of other sizes"),
        ([LayerSpec(LOCAL, replace(MIXTURE, expert=MlpSpec(32, "gelu")))], 1, "the activation gelu"),
        ([layer(LOCAL, "gelu")], 1, "the activation gelu"),
        ([layer(LOCAL, "swiglu_clamped")], 1, "the activation swiglu_clamped"),
        ([layer(replace(LOCAL, scale=0.0))], 1, "scaled"),
        ([layer(replace(LOCAL, qk_norm="whole"))], 2, "spread over ranks"),
    ],
)
def test_what_they_do_not_compute_is_said(layers: list[LayerSpec], num_ranks: int, said: str) -> None:
    assert said in (why_not(spec_of(*layers), num_ranks) or "")


@pytest.mark.parametrize(
    ("attention", "block_size", "whole_experts", "said"),
    [
        (LOCAL, 16, True, "experts that ranks hold whole"),
        (replace(LOCAL, scale=0.0), 16, False, "do not compute scores that"),
        (LOCAL, 24, False, "block_size 24 is not a multiple of 16"),
        (replace(LOCAL, head_dim=24), 16, False, "head_dim 24 is not a multiple of 16"),
        (replace(LOCAL, head_dim=2048), 16, False, "head_dim 2048 is above 1024"),
    ],
)
def test_why_torch_computes(attention: AttentionSpec, block_size: int, whole_experts: bool, said: str) -> None:
    assert said in (why_torch(spec_of(layer(attention)), block_size, whole_experts=whole_experts) or "")
    assert why_torch(spec_of(layer(LOCAL)), 16) is None
    halves = spec_of(layer(replace(LOCAL, head_dim=48)))
    assert why_torch(halves, 16, kv_dtype="int8") is None
    assert why_torch(halves, 16, kv_dtype="int4") == "head_dim 48 is not a multiple of 32"


def test_each_activation_that_they_compute_has_a_gate() -> None:
    assert (tuple(GATES), tuple(EXPERT_GATES)) == (ACTIVATIONS, EXPERT_ACTIVATIONS)


def test_a_norm_of_all_heads_is_one_ranks() -> None:
    assert why_not(spec_of(layer(replace(LOCAL, qk_norm="whole")))) is None
