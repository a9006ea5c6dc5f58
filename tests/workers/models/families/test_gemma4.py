"""Gemma 4's config.json: both forms of full layers' settings, which layer's KV a layer reads, refused values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.workers.common.errors import CheckpointError
from diptych.workers.execution.gpu.gpu_loader import check_known
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec, RoutingSpec
from diptych.workers.models.plan.compiled_limits import why_not

from ....support.checkpoints import make_checkpoint
from .test_spec import write

OLDER: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 12,
    "vocab_size": 500,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
}
NEWER = {name: value for name, value in OLDER.items() if "global" not in name}
NEAR, FAR = RopeSpec(), RopeSpec("proportional", 1e6, turning=0.25)


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]


def test_reads_both_forms_of_what_full_layers_have(tmp_path: Path) -> None:
    """What a config.json does not name is as in Gemma4TextConfig."""
    older = load_spec(write(tmp_path, OLDER | {"attention_k_eq_v": True}))
    of_layer = {"head_dim": 32, "num_key_value_heads": 2}
    named = {"per_layer_config": {"05": of_layer, "11": of_layer}, "attention_k_eq_v": True}
    assert load_spec(write(tmp_path, NEWER | named)) == older
    near = AttentionSpec(8, 4, 16, NEAR, scale=1.0, window=512, qk_norm="head", v_norm=True)
    far = AttentionSpec(8, 2, 32, FAR, scale=1.0, qk_norm="head", v_norm=True, keys_are_values=True)
    assert attentions(older) == [*[near] * 5, far] * 2
    assert (older.embedding_scale, older.logit_softcap, older.norm_offset, older.wide_norms) == (8.0, 0.0, 0.0, True)
    assert older.token_input is not None and older.token_input.dim == 256


def test_heads_of_full_layers_are_as_many_where_their_keys_are_not_values(tmp_path: Path) -> None:
    assert {of.num_kv_heads for of in attentions(load_spec(write(tmp_path, OLDER)))} == {4}
    alike = load_spec(write(tmp_path, NEWER | {"per_layer_config": {}}))
    assert {(of.num_kv_heads, of.head_dim) for of in attentions(alike)} == {(4, 16)}


def test_the_last_layer_is_a_full_one(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, OLDER | {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3}))
    assert [(of.window, of.head_dim) for of in attentions(spec)] == [(512, 16), (512, 16), (0, 32)]


def test_layers_read_the_kv_of_the_last_one_of_their_type(tmp_path: Path) -> None:
    shared = OLDER | {"num_kv_shared_layers": 5, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 0}
    spec = load_spec(write(tmp_path, shared))
    assert [of.kv_from for of in attentions(spec)] == [None] * 7 + [6, 6, 6, 6, 5]
    assert [of.mlps[0].intermediate_size for of in spec.layers] == [160] * 7 + [320] * 5
    assert spec.token_input is None


def test_reads_mixtures_within_a_multimodal_config(tmp_path: Path) -> None:
    mixture = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    section = OLDER | mixture | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": section, "eos_token_id": [1, 106]}
    spec = load_spec(write(tmp_path, outer))
    routing = RoutingSpec(2, router_norm=True, logit_scale=1 / 8, expert_scales=True)
    mlp = MlpSpec(160, "gelu_tanh")
    assert spec.layers[0].feed_forward == MoeSpec(8, MlpSpec(32, "gelu_tanh"), routing)
    assert spec.layers[0].beside == mlp
    assert (spec.logit_softcap, spec.eos_token_ids) == (30.0, (1, 106))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be null or vision"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers must leave a layer of each type"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers must leave a layer of each type"),
        ({"per_layer_config": {"12": {}}}, "per_layer_config.12 must be a layer, 0 to 11"),
        ({"per_layer_config": {"1": {"intermediate_size": 4}}}, "per_layer_config.1.intermediate_size must be absent"),
        ({"per_layer_config": {"11": {"head_dim": 32}}, "num_kv_shared_layers": 1}, "that read the KV of layer 5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.sliding_attention must be"),
        ({"vocab_size_per_layer_input": 499}, "vocab_size_per_layer_input must be at least vocab_size=500"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts must be at most"),
        ({"hidden_activation": "relu"}, "hidden_activation must be one of"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_spec(write(tmp_path, OLDER | changes))


def test_a_unified_one_has_neither_mixtures_nor_inputs_of_each_token(tmp_path: Path) -> None:
    config = OLDER | {"architectures": ["Gemma4UnifiedForCausalLM"]}
    unused = {"enable_moe_block": False, "num_experts": None, "hidden_size_per_layer_input": 0}
    assert load_spec(write(tmp_path, config | unused)) == load_spec(write(tmp_path, config))
    for changes in ({"enable_moe_block": True}, {"hidden_size_per_layer_input": 256}):
        with pytest.raises(CheckpointError, match=f"{next(iter(changes))} must be absent, false or 0 in a Gemma4Un"):
            load_spec(write(tmp_path, config | changes))


def test_a_turning_part_beyond_a_head_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.5}
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="partial_rotary_factor must be at most 1"):
        load_spec(write(tmp_path, OLDER | {"rope_parameters": ropes}))


def test_what_would_make_the_kv_of_a_layer_that_reads_anothers_is_left_out(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "gemma4", "gemma4", 4)
    spec, file = load_spec(path), path / "model.safetensors"
    stored = load_file(file)
    unused = {f"model.layers.5.self_attn.{name}.weight": torch.ones(2) for name in ("k_proj", "v_proj", "k_norm")}
    assert not unused.keys() & stored.keys()
    save_file(stored | unused, file)
    with Checkpoint(path, spec) as checkpoint:
        assert checkpoint.num_bytes == sum(t.nbytes for t in stored.values())
    save_file(stored | {"model.layers.5.self_attn.o_norm.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"o_norm\.weight is unexpected"), Checkpoint(path, spec):
        pass


def test_the_cuda_engine_computes_it_and_on_cpus_torch(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, OLDER | {"per_layer_config": {}}))
    assert why_not(spec) == "a norm of values"
    check_known(spec)
