"""Families with mixtures of experts."""

from dataclasses import replace
from typing import Any, cast

from .family import FULL, SLIDING, read_attention, read_mlp, read_windows, refuse_layer_types
from .json_config import JsonFields
from .spec import LayerSpec, MlpSpec, MoeSpec, RoutingSpec

MAX_EXPERTS = 4096  # no real mixture has more; more are a damaged file


def mixtral(config: JsonFields) -> tuple[LayerSpec, ...]:
    window = 0 if config.get("sliding_window") is None else config.size("sliding_window")
    refuse_layer_types(config, SLIDING if window else FULL)
    attention = replace(read_attention(config), window=window)
    return (LayerSpec(attention, _moe(config, read_mlp(config))),) * config.size("num_hidden_layers")


def qwen3_moe(config: JsonFields) -> tuple[LayerSpec, ...]:
    """transformers gives every layer the window, where it is in use."""
    in_use = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    window = config.size("sliding_window") if in_use else 0
    refuse_layer_types(config, SLIDING if window else FULL)
    bias = config.flag("attention_bias")
    attention = replace(read_attention(config), window=window, qkv_bias=bias, o_bias=bias, qk_norm="head")
    num_layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in cast("list[Any]", dense)):
        raise config.error("mlp_only_layers", "must be a list of layers", dense)
    has_experts = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    mlp = read_mlp(config)
    expert = replace(mlp, intermediate_size=config.size("moe_intermediate_size"))
    moe = _moe(config, expert, renormalise=config.flag("norm_topk_prob"))
    return tuple(LayerSpec(attention, moe if has else mlp) for has in has_experts)


# What transformers' config classes take where a config.json names nothing.
MIXTRAL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
GPT_OSS_DEFAULTS = {"sliding_window": 128, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0}


def gpt_oss(config: JsonFields) -> tuple[LayerSpec, ...]:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise config.error("rope_scaling", "must be given (yarn)", None)
    for name, ours in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.number(name, default=ours) != ours:
            raise config.error(name, f"must be {ours}", config.get(name))
    bias = config.flag("attention_bias", default=True)
    attention = replace(read_attention(config), sinks=True, qkv_bias=bias, o_bias=bias)
    moe = _moe(config, MlpSpec(config.size("intermediate_size"), "swiglu_clamped", bias=True))
    moe = replace(moe, routing=replace(moe.routing, router_bias=True))
    windows = read_windows(config, lambda i: i % 2 == 0)
    return tuple(LayerSpec(replace(attention, window=window), moe) for window in windows)


def read_num_experts(config: JsonFields, name: str) -> int:
    """name: the field that says it."""
    num_experts = config.size(name)
    if num_experts > MAX_EXPERTS:
        raise config.error(name, f"must be at most {MAX_EXPERTS}", num_experts)
    return num_experts


def _moe(config: JsonFields, expert: MlpSpec, *, renormalise: bool = True) -> MoeSpec:
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts, top_k = read_num_experts(config, name), config.size("num_experts_per_tok")
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"must be at most {name}={num_experts}", top_k)
    return MoeSpec(num_experts, expert, RoutingSpec(top_k, renormalise=renormalise))
