"""Gemma 2 and 3: norms before and after each part whose weights are stored less 1, windows in most layers."""

from dataclasses import replace

from .config import Fields
from .family import FULL, SLIDING, Around, read_attention, read_mlp, read_windows
from .rope_config import read_ropes
from .spec import AttentionSpec, LayerSpec

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


def gemma2(config: Fields) -> tuple[LayerSpec, ...]:
    """Every second layer has a window, the first among them (Gemma 2, section 2)."""
    attention = replace(_attention(config), softcap=config.optional_number("attn_logit_softcapping", 0.0) or 0.0)
    windows = read_windows(config, lambda layer: layer % 2 == 0)
    return tuple(_layer(config, replace(attention, window=window)) for window in windows)


def gemma3(config: Fields) -> tuple[LayerSpec, ...]:
    """Every sixth layer has none, and a rope of its own (Gemma 3, section 2)."""
    pattern = config.size("sliding_window_pattern")
    ropes = read_ropes(config, config.size("max_position_embeddings"), THETAS)
    attention = replace(_attention(config, with_rope=False), qk_norm="head")
    windows = read_windows(config, lambda layer: bool((layer + 1) % pattern))
    kinds = [replace(attention, window=window, rope=ropes[SLIDING if window else FULL]) for window in windows]
    return tuple(_layer(config, kind) for kind in kinds)


def around_gemma(config: Fields) -> Around:
    return Around(
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping", 0.0) or 0.0,
        norm_offset=1.0,
        wide_norms=True,
    )


def around_gemma_with_vision(config: Fields) -> Around:
    """transformers does not cap the logits here, whatever the config says."""
    return replace(around_gemma(config), logit_softcap=0.0)


def _attention(config: Fields, *, with_rope: bool = True) -> AttentionSpec:
    if config.flag("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "must be false (a decoder looks back alone)", True)
    bias, scalar = config.flag("attention_bias"), config.number("query_pre_attn_scalar", minimum=0.0)
    return replace(read_attention(config, with_rope=with_rope), scale=scalar**-0.5, qkv_bias=bias, o_bias=bias)


def _layer(config: Fields, attention: AttentionSpec) -> LayerSpec:
    return LayerSpec(attention, read_mlp(config, "hidden_activation"), norms="both")
