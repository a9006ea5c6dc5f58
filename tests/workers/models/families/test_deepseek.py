"""DeepSeek's config.json: accepted and refused values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import LatentSpec, MlpSpec, MoeSpec, RopeSpec, RoutingSpec

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "n_routed_experts": 16,
}
V2 = V3 | {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6, "q_lora_rank": None}


def write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_reads_v3(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, V3))
    assert spec.layers[0].attention == LatentSpec(8, 1536, 512, 128, 64, 128, RopeSpec(), scale=192**-0.5)
    assert [layer.feed_forward for layer in spec.layers[:3]] == [MlpSpec(160)] * 3
    routing = RoutingSpec(8, True, True, 2.5, 8, 4, group_by_two=True, choice_bias=True)
    assert spec.layers[3].feed_forward == MoeSpec(16, MlpSpec(24), routing, shared=MlpSpec(24))
    assert (spec.kv.num_heads, spec.kv.dim, spec.kv.num_vectors) == (1, 576, 1)


def test_reads_v2_with_yarn(tmp_path: Path) -> None:
    """The config of DeepSeek-V2-Lite."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    yarn |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    spec = load_spec(write(tmp_path, V2 | {"rope_scaling": yarn, "first_k_dense_replace": 1, "topk_method": "greedy"}))
    attention = spec.layers[0].attention
    assert isinstance(attention, LatentSpec) and attention.q_rank == 0
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    routing = RoutingSpec(6, renormalise=False)
    assert spec.layers[1].feed_forward == MoeSpec(16, MlpSpec(24), routing, shared=MlpSpec(48))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (V2 | {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy, found 'noaux_tc'"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob must be False, found True"),
        (V2 | {"attention_bias": True}, "attention_bias must be false where q_lora_rank is null"),
        (V2 | {"topk_method": "group_limited_greedy"}, "n_group is missing"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func must be sigmoid, found 'softmax'"),
        (V3 | {"num_key_value_heads": 2}, "num_key_value_heads must be 8, found 2"),
        (V3 | {"n_group": 3, "topk_group": 2}, "n_group must divide n_routed_experts=16 into groups"),
        (V3 | {"n_group": 2}, "topk_group must be at most n_group=2, found 4"),
        (V3 | {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the experts of topk_group groups"),
        (V3 | {"n_routed_experts": 1 << 20}, "n_routed_experts must be at most 4096"),
        (V3 | {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq must be 1, found 2"),
        (
            V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
            r"quantization_config.weight_block_size must be two sizes, found 128",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_spec(write(tmp_path, config))
