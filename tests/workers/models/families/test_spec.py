"""ModelSpec from config.json: accepted values, refused values and their error messages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, GenerationConfig

from diptych.workers.common.errors import CheckpointError, UnsupportedArchitecture
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import (
    AttentionSpec,
    KVShape,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
    RoutingSpec,
)
from diptych.workers.models.plan.kv_plan import layout_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 5,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GEMMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "num_attention_heads": 4, "original_max_position_embeddings": 256}


def write(path: Path, config: object, generation: object = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_reads_llama(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, LLAMA | {"mlp_bias": True, "attention_bias": True}))
    attention = AttentionSpec(8, 2, 8, RopeSpec(), scale=8**-0.5, qkv_bias=True, o_bias=True)
    assert (spec.architecture, spec.num_layers) == ("LlamaForCausalLM", 2)
    assert set(spec.layers) == {LayerSpec(attention, MlpSpec(160, bias=True))}
    assert not spec.tie_word_embeddings


def test_reads_qwen3(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, QWEN3 | {"mlp_bias": True, "tie_word_embeddings": True}))
    attention = AttentionSpec(8, 2, 32, RopeSpec(), scale=32**-0.5, qk_norm="head")
    assert set(spec.layers) == {LayerSpec(attention, MlpSpec(160))}
    assert spec.tie_word_embeddings


def test_reads_mixtral(tmp_path: Path) -> None:
    config = {name: value for name, value in MIXTRAL.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
    spec = load_spec(write(tmp_path, config | {"sliding_window": 40}))
    attention = AttentionSpec(8, 8, 8, RopeSpec(theta=1e6), scale=8**-0.5, window=40)
    assert spec.rms_norm_eps == 1e-5
    assert set(spec.layers) == {LayerSpec(attention, MoeSpec(8, MlpSpec(160), RoutingSpec(2)))}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"mlp_only_layers": [1, 4]}, [0, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3]),
    ],
)
def test_reads_which_layers_of_qwen3_have_experts(tmp_path: Path, changes: dict[str, Any], layers: list[int]) -> None:
    spec = load_spec(write(tmp_path, QWEN3_MOE | changes))
    experts = MoeSpec(8, MlpSpec(32), RoutingSpec(4, renormalise=False))
    assert [i for i, layer in enumerate(spec.layers) if layer.feed_forward == experts] == layers
    assert all(spec.layers[i].feed_forward == MlpSpec(160) for i in range(5) if i not in layers)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts": 1 << 20}, "num_experts must be at most 4096"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts=8"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ],
)
def test_refuses_what_no_mixture_has(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_spec(write(tmp_path, QWEN3_MOE | changes))


def test_reads_gpt_oss(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    del config["rms_norm_eps"]
    with pytest.raises(CheckpointError, match="rope_scaling must be given"):
        load_spec(write(tmp_path, config))
    config["rope_scaling"] = {"rope_type": "default"}
    spec = load_spec(write(tmp_path, config))
    assert [getattr(layer.attention, "window", None) for layer in spec.layers] == [128, 0]
    attention = AttentionSpec(8, 2, 64, RopeSpec(theta=150_000.0), scale=0.125, sinks=True, qkv_bias=True, o_bias=True)
    routing = RoutingSpec(2, router_bias=True)
    assert spec.layers[1] == LayerSpec(attention, MoeSpec(8, MlpSpec(160, "swiglu_clamped", bias=True), routing))
    assert spec.rms_norm_eps == 1e-5
    with pytest.raises(CheckpointError, match=r"swiglu_limit must be 7\.0, found 5"):
        load_spec(write(tmp_path, config | {"swiglu_limit": 5}))
    with pytest.raises(CheckpointError, match=r"quantization_config.quant_method must be one of .*found 'quark'"):
        load_spec(write(tmp_path, config | {"quantization_config": {"quant_method": "quark"}}))


def test_key_value_heads_default_to_query_heads(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, LLAMA | {"num_key_value_heads": None})).kv.num_heads == 8


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": [3, 4, 3]}, None, (3, 4)),
        ({"eos_token_id": 3}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 3}, {"eos_token_id": None}, (3,)),
        ({"eos_token_id": 0}, {}, (0,)),
    ],
)
def test_end_of_sequence_ids(tmp_path: Path, config: dict[str, Any], generation: object, expected: object) -> None:
    assert load_spec(write(tmp_path, LLAMA | config, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"hidden_size": 65}, "hidden_size must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"hidden_act": "relu"}, "hidden_act must be one of silu, gelu, gelu_pytorch_tanh, found 'relu'"),
        ({"hidden_act": None}, "hidden_act must be one of silu, gelu, gelu_pytorch_tanh, found None"),
        ({"hidden_act": ["silu"]}, "hidden_act must be one of silu, gelu, gelu_pytorch_tanh, found ['silu']"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method must be one of"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"eos_token_id": 500}, "eos_token_id must be ids in"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be ids in"),
        ({"rope_parameters": 7}, "rope_parameters must be an object"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope_scaling.rope_type must be one of"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -1}},
            "rope_scaling.factor must be a finite number above 0",
        ),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"architectures": []}, "architectures must be a list"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ],
)
def test_refuses_by_file_and_field(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        load_spec(write(tmp_path, LLAMA | changes))
    assert named in caught.value.message


def windows(tmp_path: Path, config: dict[str, Any]) -> list[int]:
    attentions = [layer.attention for layer in load_spec(write(tmp_path, config)).layers]
    return [attention.window for attention in attentions if isinstance(attention, AttentionSpec)]


def test_windows_of_mistral(tmp_path: Path) -> None:
    assert windows(tmp_path, MISTRAL | {"sliding_window": 128}) == [128, 128]
    assert windows(tmp_path, MISTRAL | {"sliding_window": None}) == [0, 0]
    assert windows(tmp_path, MISTRAL) == [4096, 4096]  # MistralConfig's own default
    with pytest.raises(CheckpointError, match="layer_types must all be sliding_attention"):
        windows(tmp_path, MISTRAL | {"layer_types": ["sliding_attention", "full_attention"]})


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_windows_of_qwen(tmp_path: Path, name: str) -> None:
    """Those of layer_types; without it, of layers from max_window_layers on."""
    config = LLAMA | {"architectures": [f"{name}ForCausalLM"], "use_sliding_window": True, "sliding_window": 128}
    assert windows(tmp_path, config | {"max_window_layers": 1}) == [0, 128]
    assert windows(tmp_path, config | {"max_window_layers": 0}) == [128, 128]
    assert windows(tmp_path, config) == [0, 0]
    assert windows(tmp_path, config | {"use_sliding_window": False, "max_window_layers": 0}) == [0, 0]
    assert windows(tmp_path, config | {"sliding_window": None, "max_window_layers": 0}) == [0, 0]
    types = ["sliding_attention", "full_attention"]
    assert windows(tmp_path, config | {"layer_types": types}) == [128, 0]
    for changes, named in (
        ({"use_sliding_window": False, "layer_types": types}, "use_sliding_window must be true"),
        ({"layer_types": types[:1]}, "layer_types must name num_hidden_layers=2 layers, found 1"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types must be a list of full_attention and sliding"),
        ({"max_window_layers": -1}, "max_window_layers must be an integer in"),
    ):
        with pytest.raises(CheckpointError, match=named):
            windows(tmp_path, config | changes)


def test_reads_gemma2(tmp_path: Path) -> None:
    """What a config.json does not name is as in Gemma2Config."""
    spec = load_spec(write(tmp_path, GEMMA | {"architectures": ["Gemma2ForCausalLM"], "num_attention_heads": 4}))
    attention = AttentionSpec(4, 4, 256, RopeSpec(), scale=1 / 16, window=4096, softcap=50.0)
    sliding = LayerSpec(attention, MlpSpec(160, "gelu_tanh"), norms="both")
    assert spec.layers[:2] == (sliding, replace(sliding, attention=replace(attention, window=0)))
    assert spec.layers[::2] == (sliding,) * 4
    assert (spec.embedding_scale, spec.logit_softcap, spec.norm_offset) == (8.0, 30.0, 1.0)
    assert spec.tie_word_embeddings


@pytest.mark.parametrize("is_text", [True, False])
def test_reads_gemma3_of_old(tmp_path: Path, is_text: bool) -> None:
    """In the form of checkpoints older than transformers 5, and in a section of a config that also has vision."""
    older = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 128}
    if is_text:
        config = older | {"architectures": ["Gemma3ForCausalLM"], "rope_local_base_freq": 20_000, "eos_token_id": 3}
    else:
        section = older | {"rope_local_base_freq": 20_000}
        config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": section, "eos_token_id": 3}
    spec = load_spec(write(tmp_path, config))
    far, near = RopeSpec("linear", 1e6, 8.0), RopeSpec(theta=20_000.0)
    attention = AttentionSpec(8, 4, 256, near, scale=1 / 16, window=128, qk_norm="head")
    sliding = LayerSpec(attention, MlpSpec(160, "gelu_tanh"), norms="both")
    full = replace(sliding, attention=replace(attention, window=0, rope=far))
    assert spec.layers == (*[sliding] * 5, full, sliding)
    assert (spec.eos_token_ids, spec.logit_softcap, spec.tie_word_embeddings) == ((3,), 0.0, True)
    assert [rope for rope, _ in spec.ropes] == [near, far]


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 1}, (1, 106)),
        ({"eos_token_id": [1, 106]}, {"eos_token_id": None}, (1, 106)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({}, {"eos_token_id": None}, ()),
        ({}, {}, ()),  # whatever Gemma3TextConfig has by default
    ],
)
def test_ends_of_sequence_around_a_decoder_win(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA | inner} | outer
    assert load_spec(write(tmp_path, config)).eos_token_ids == expected
    reference = GenerationConfig.from_model_config(config).eos_token_id  # as `from_pretrained` makes it
    assert expected == (() if reference is None else (reference,) if isinstance(reference, int) else tuple(reference))


@pytest.mark.parametrize(("outer", "is_tied"), [({}, True), ({"tie_word_embeddings": False}, False)])
@pytest.mark.parametrize("inner", [True, False])
def test_what_is_around_a_decoder_says_whether_embeddings_are_tied(
    tmp_path: Path, outer: dict[str, bool], is_tied: bool, inner: bool
) -> None:
    section = GEMMA | {"tie_word_embeddings": inner}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": section} | outer
    assert load_spec(write(tmp_path, config)).tie_word_embeddings is is_tied
    assert Gemma3Config.from_dict(config).tie_word_embeddings is is_tied


@pytest.mark.parametrize("inner", [{}, {"quantization_config": None}])
def test_quantisation_around_a_decoder_is_refused(tmp_path: Path, inner: dict[str, Any]) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA | inner}
    with pytest.raises(CheckpointError, match=r"json: quantization_config.quant_method must be one of .*found 'hqq'"):
        load_spec(write(tmp_path, config | {"quantization_config": {"quant_method": "hqq"}}))


@pytest.mark.parametrize(("outer", "inner", "named"), [(-1, 1, "eos_token_id"), (None, -1, "text_config.eos_token_id")])
def test_an_end_of_sequence_that_is_no_token_is_named(
    tmp_path: Path, outer: int | None, inner: int, named: str
) -> None:
    section = GEMMA | {"eos_token_id": inner}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": section, "eos_token_id": outer}
    with pytest.raises(CheckpointError, match=rf"json: {named} must be ids in .*found -1"):
        load_spec(write(tmp_path, config))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Gemma3", "Gemma4", "Gemma4Unified"])
def test_an_end_of_sequence_that_nothing_names_is_none(tmp_path: Path, name: str) -> None:
    """Whatever the config class has by default: transformers reads the file where it makes a GenerationConfig."""
    config = GEMMA | {"architectures": [f"{name}ForCausalLM"], "num_attention_heads": 8}
    assert load_spec(write(tmp_path, config)).eos_token_ids == ()
    assert GenerationConfig.from_pretrained(tmp_path, "config.json", _from_model_config=True).eos_token_id is None


def test_gemma_is_refused_where_it_is_none(tmp_path: Path) -> None:
    config = GEMMA | {"architectures": ["Gemma3ForCausalLM"]}
    for changes, named in (
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a finite number above 0"),
        ({"hidden_activation": "relu"}, "hidden_activation must be one of"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config must be an object"),
    ):
        with pytest.raises(CheckpointError, match=named):
            load_spec(write(tmp_path, config | changes))


def test_refuses_what_longrope_cannot_be(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    config = PHI3 | {"partial_rotary_factor": 0.5}
    assert load_spec(write(tmp_path, config | {"rope_scaling": scaling})).ropes[0][0].partial == 0.5
    for changes, named in (
        ({"short_factor": [1.0] * 3}, "short_factor of longrope must have 4 numbers, found 3"),
        ({"long_factor": 1.0}, "rope_scaling.long_factor must be a list of numbers"),
        ({"long_factor": [1.0, 2.0, -1.0, 3.0]}, r"rope_scaling.long_factor\[2\] must be a finite number above 0"),
    ):
        with pytest.raises(CheckpointError, match=named):
            load_spec(write(tmp_path, config | {"rope_scaling": scaling | changes}))
    for partial in (0.1, 0.0, 1.5):
        with pytest.raises(CheckpointError, match="partial_rotary_factor must"):
            load_spec(write(tmp_path, config | {"partial_rotary_factor": partial}))


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"MambaForCausalLM is not supported.*LlamaForCausalLM, .*Qwen3"):
        load_spec(write(tmp_path, LLAMA | {"architectures": ["MambaForCausalLM"]}))


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_spec(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\x00", '"text"', "[" * 100_000])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_spec(tmp_path)


def test_a_number_beyond_all_floats_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rms_norm_eps must be a finite number above 0, found 1000"):
        load_spec(write(tmp_path, LLAMA | {"rms_norm_eps": 10**400}))


def test_nothing_is_made_of_millions_of_layers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers must be at most 1024, found 16777216"):
        load_spec(write(tmp_path, LLAMA | {"num_hidden_layers": 1 << 24}))


def test_layers_keep_kv_of_their_own_sizes_or_read_an_earlier_ones(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, LLAMA))
    layer = spec.layers[0]
    attention = layer.attention
    assert isinstance(attention, AttentionSpec)

    def of(**changes: int) -> LayerSpec:
        return replace(layer, attention=replace(attention, **changes))

    alike = replace(spec, layers=(of(), of(), of(kv_from=0), of()))
    assert alike.kv_ids == (0, 1, 0, 2) and (alike.kv.num_layers, alike.kv.layer_shapes) == (3, ())
    wide = {"num_kv_heads": 1, "head_dim": 64}
    layers = of(), of(**wide), of(kv_from=0), of(), of(kv_from=1, **wide), of(kv_from=4, **wide)
    unlike = replace(spec, layers=layers)
    own = (attention.num_kv_heads, attention.head_dim)
    assert unlike.kv_ids == (0, 1, 0, 2, 1, 1)
    assert unlike.kv == KVShape(3, *own, layer_shapes=(own, (1, 64), own))
    layout = layout_of(unlike, "bfloat16", 16, tensor_parallel=2)
    assert layout.layer_shapes == unlike.kv.layer_shapes and not layout.can_be_dot
    each = [2 * 16 * max(heads // 2, 1) * dim * 2 for heads, dim in unlike.kv.layer_shapes]
    assert layout.rank_block_bytes == sum(each)
