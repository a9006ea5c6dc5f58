"""Gemma 2 and 3: norms before and after each part whose weights are stored less 1, windows in most layers."""

from dataclasses import replace

from .family import FULL, SLIDING, Around, read_attention, read_mlp, read_windows
from .json_config import JsonFields
from .rope_config import refuse_partial, rope_of
from .spec import AttentionSpec, LayerSpec, RopeSpec

THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}  # of Gemma 3
DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "vocab_size": 262_208,
}


def gemma2(config: JsonFields) -> tuple[LayerSpec, ...]:
    """Every second layer has a window, the first among them (Gemma 2, section 2)."""
    attention = replace(_attention(config), softcap=config.optional_number("attn_logit_softcapping", 0.0) or 0.0)
    windows = read_windows(config, lambda layer: layer % 2 == 0)
    return tuple(_layer(config, replace(attention, window=window)) for window in windows)


def gemma3(config: JsonFields) -> tuple[LayerSpec, ...]:
    """Every sixth layer has none, and a rope of its own (Gemma 3, section 2)."""
    pattern = config.size("sliding_window_pattern")
    ropes = _gemma3_ropes(config)
    attention = replace(_attention(config, with_rope=False), qk_norm="head")
    windows = read_windows(config, lambda layer: bool((layer + 1) % pattern))
    kinds = [replace(attention, window=window, rope=ropes[SLIDING if window else FULL]) for window in windows]
    return tuple(_layer(config, kind) for kind in kinds)


def around_gemma(config: JsonFields) -> Around:
    return Around(
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping", 0.0) or 0.0,
        norm_offset=1.0,
        wide_norms=True,
    )


def around_gemma_with_vision(config: JsonFields) -> Around:
    """transformers does not cap the logits here, whatever the config says."""
    return replace(around_gemma(config), logit_softcap=0.0)


def _gemma3_ropes(config: JsonFields) -> dict[str, RopeSpec]:
    """Return the RoPE of each layer type. Before transformers 5 full layers had `rope_theta` and `rope_scaling`,
    sliding ones `rope_local_base_freq`."""
    refuse_partial(config)
    nested, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    ropes: dict[str, RopeSpec] = {}
    for layer_type, older in ((FULL, "rope_theta"), (SLIDING, "rope_local_base_freq")):
        theta = config.number(older, default=THETAS[layer_type], minimum=1.0)
        fields = nested.section(layer_type) if nested is not None else None
        if layer_type == FULL and scaling is not None:
            fields = scaling if fields is None else fields.with_values(scaling.values)
        ropes[layer_type] = rope_of(config, fields, theta, config.size("max_position_embeddings"))
    return ropes


def _attention(config: JsonFields, *, with_rope: bool = True) -> AttentionSpec:
    if config.flag("use_bidirectional_attention"):
        raise config.error(
            "use_bidirectional_attention", "must be false (a decoder attends only to earlier tokens)", True
        )
    bias, scalar = config.flag("attention_bias"), config.number("query_pre_attn_scalar", minimum=0.0)
    return replace(read_attention(config, with_rope=with_rope), scale=scalar**-0.5, qkv_bias=bias, o_bias=bias)


def _layer(config: JsonFields, attention: AttentionSpec) -> LayerSpec:
    return LayerSpec(attention, read_mlp(config, "hidden_activation"), norms="both")
