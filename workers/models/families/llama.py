"""Llama and its next of kin: RMSNorm before each part, rotary attention, a gated MLP."""

from dataclasses import replace

from .family import FULL, SLIDING, read_attention, read_mlp, read_windows, refuse_layer_types
from .json_config import JsonFields
from .rope_config import rope_fields, rope_of, rope_type_of
from .spec import AttentionSpec, LayerSpec, MlpSpec, RopeSpec


def llama(config: JsonFields) -> tuple[LayerSpec, ...]:
    refuse_layer_types(config, FULL)
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), qkv_bias=bias, o_bias=bias)
    return _alike(config, attention, replace(read_mlp(config), bias=config.flag("mlp_bias")))


def mistral(config: JsonFields) -> tuple[LayerSpec, ...]:
    """Every layer has the window, where there is one (Mistral 7B, section 2)."""
    window = 0 if config.get("sliding_window") is None else config.size("sliding_window")
    refuse_layer_types(config, SLIDING if window else FULL)
    return _alike(config, replace(read_attention(config), window=window), read_mlp(config))


def qwen2(config: JsonFields) -> tuple[LayerSpec, ...]:
    return _with_windows(config, replace(read_attention(config), qkv_bias=True), read_mlp(config))


def qwen3(config: JsonFields) -> tuple[LayerSpec, ...]:
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), qkv_bias=bias, o_bias=bias, qk_norm="head")
    return _with_windows(config, attention, read_mlp(config))


def phi3(config: JsonFields) -> tuple[LayerSpec, ...]:
    refuse_layer_types(config, FULL)
    attention = read_attention(config, with_rope=False)
    rope = _phi3_rope(config, attention.head_dim)
    window = 0 if config.get("sliding_window") is None else config.size("sliding_window")
    return _alike(config, replace(attention, rope=rope, window=window), read_mlp(config))


def olmo2(config: JsonFields) -> tuple[LayerSpec, ...]:
    """Norms after each part, and of all queries and all keys at once (OLMo 2, section 2.1)."""
    refuse_layer_types(config, FULL)
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), qkv_bias=bias, o_bias=bias, qk_norm="whole")
    return (LayerSpec(attention, read_mlp(config), norms="after"),) * config.size("num_hidden_layers")


def _phi3_rope(config: JsonFields, head_dim: int) -> RopeSpec:
    """Read the RoPE of Phi-3, which may rotate a part of each head; "su" and "yarn" are older names of longrope."""
    theta, fields = config.number("rope_theta", default=10_000.0, minimum=1.0), rope_fields(config)
    source = config if fields is None or fields.get("partial_rotary_factor") is None else fields
    partial = source.number("partial_rotary_factor", default=1.0, minimum=0.0)
    rotated = int(head_dim * partial)
    if partial > 1.0 or rotated % 2 or not rotated:
        raise source.error("partial_rotary_factor", f"must rotate an even part of {head_dim} numbers", partial)
    rope = RopeSpec(theta=theta)
    if fields is not None:
        renamed = "longrope" if rope_type_of(fields) in ("su", "yarn") else rope_type_of(fields)
        plain = fields.with_values({"rope_type": renamed, "partial_rotary_factor": None})
        rope = rope_of(config, plain, theta, config.size("max_position_embeddings"))
        if rope.rope_type == "proportional" and partial != 1.0:
            raise fields.error("rope_type", "must be another type if partial_rotary_factor is not 1", renamed)
    for factors, name in ((rope.short_factors, "short_factor"), (rope.long_factors, "long_factor")):
        if rope.rope_type == "longrope" and len(factors) != rotated // 2:
            raise config.error(f"{name} of longrope", f"must have {rotated // 2} numbers", len(factors))
    return replace(rope, partial=partial)


def _alike(config: JsonFields, attention: AttentionSpec, mlp: MlpSpec) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, mlp),) * config.size("num_hidden_layers")


def _with_windows(config: JsonFields, attention: AttentionSpec, mlp: MlpSpec) -> tuple[LayerSpec, ...]:
    """The layers that `layer_types` names or, where it is absent, those from max_window_layers on."""
    in_use = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    first = config.size("max_window_layers", minimum=0)
    windows = read_windows(config, lambda layer: in_use and layer >= first)
    if any(windows) and not in_use:
        raise config.error("use_sliding_window", "must be true where layer_types names sliding_attention", False)
    return tuple(LayerSpec(replace(attention, window=window), mlp) for window in windows)
