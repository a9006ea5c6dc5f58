"""Llama and its next of kin: RMSNorm before each part, rotary attention, a gated MLP."""

from dataclasses import replace

from .config import Fields
from .family import FULL, SLIDING, read_attention, read_mlp, read_windows, refuse_layer_types
from .rope_config import read_partial_rope
from .spec import AttentionSpec, LayerSpec, MlpSpec


def llama(config: Fields) -> tuple[LayerSpec, ...]:
    refuse_layer_types(config, FULL)
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), qkv_bias=bias, o_bias=bias)
    return _alike(config, attention, replace(read_mlp(config), bias=config.flag("mlp_bias")))


def mistral(config: Fields) -> tuple[LayerSpec, ...]:
    """Every layer has the window, where there is one (Mistral 7B, section 2)."""
    window = 0 if config.get("sliding_window") is None else config.size("sliding_window")
    refuse_layer_types(config, SLIDING if window else FULL)
    return _alike(config, replace(read_attention(config), window=window), read_mlp(config))


def qwen2(config: Fields) -> tuple[LayerSpec, ...]:
    return _with_windows(config, replace(read_attention(config), qkv_bias=True), read_mlp(config))


def qwen3(config: Fields) -> tuple[LayerSpec, ...]:
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), qkv_bias=bias, o_bias=bias, qk_norm="head")
    return _with_windows(config, attention, read_mlp(config))


def phi3(config: Fields) -> tuple[LayerSpec, ...]:
    refuse_layer_types(config, FULL)
    attention = read_attention(config, with_rope=False)
    rope = read_partial_rope(config, config.size("max_position_embeddings"), attention.head_dim)
    window = 0 if config.get("sliding_window") is None else config.size("sliding_window")
    return _alike(config, replace(attention, rope=rope, window=window), read_mlp(config))


def olmo2(config: Fields) -> tuple[LayerSpec, ...]:
    """Norms after each part, and of all queries and all keys at once (OLMo 2, section 2.1)."""
    refuse_layer_types(config, FULL)
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), qkv_bias=bias, o_bias=bias, qk_norm="whole")
    return (LayerSpec(attention, read_mlp(config), norms="after"),) * config.size("num_hidden_layers")


def _alike(config: Fields, attention: AttentionSpec, mlp: MlpSpec) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, mlp),) * config.size("num_hidden_layers")


def _with_windows(config: Fields, attention: AttentionSpec, mlp: MlpSpec) -> tuple[LayerSpec, ...]:
    """The layers that `layer_types` names or, where it is absent, those from max_window_layers on."""
    in_use = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    first = config.size("max_window_layers", minimum=0)
    windows = read_windows(config, lambda layer: in_use and layer >= first)
    if any(windows) and not in_use:
        raise config.error("use_sliding_window", "must be true where layer_types names sliding_attention", False)
    return tuple(LayerSpec(replace(attention, window=window), mlp) for window in windows)
