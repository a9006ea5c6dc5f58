"""Gemma 4's text model. Beside what Gemma 3 has: values are normed and scores are not scaled; full layers have heads of
sizes of their own and take keys for values, if so said, and a part of their angles stands still; the last layers read
the KV of earlier ones; every layer has an input of each token's own; an MLP may be beside a mixture."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .family import FULL, SLIDING, Around, read_attention, read_mlp, read_windows
from .json_config import JsonFields
from .moe import read_num_experts
from .rope_config import rope_of
from .spec import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec, RoutingSpec, TokenInputSpec

# As transformers has them, of fields that a config.json need not name.
GEMMA4_DEFAULTS: dict[str, Any] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}
UNIFIED_DEFAULTS = GEMMA4_DEFAULTS | {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
}
ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
OF_ONE_LAYER = {"head_dim", "num_key_value_heads"}  # what `per_layer_config` may name


def gemma4(config: JsonFields) -> tuple[LayerSpec, ...]:
    """Every sixth layer has no window, unless `layer_types` says which; and the last one, whatever that says."""
    windows = (*read_windows(config, lambda layer: bool((layer + 1) % 6))[:-1], 0)
    of_layers, ropes = _of_layers(config, windows), _ropes(config, windows)
    sources = _kv_sources(config, windows)
    layers: list[LayerSpec] = []
    for window, own, kv_from in zip(windows, of_layers, sources, strict=True):
        attention = _attention(config.with_values(own), window, ropes[SLIDING if window else FULL])
        if kv_from is not None:
            attention = _reading(config, attention, layers[kv_from].attention, kv_from)
        layers.append(_layer(config, attention))
    return tuple(layers)


def gemma4_unified(config: JsonFields) -> tuple[LayerSpec, ...]:
    """Has neither mixtures nor inputs of each token: transformers reads no field of them."""
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        if value := config.get(name):
            raise config.error(name, "must be absent, false or 0 in a Gemma4Unified architecture", value)
    return gemma4(config)


def around_gemma4(config: JsonFields) -> Around:
    return Around(
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping", 0.0) or 0.0,
        wide_norms=True,
    )


def _of_layers(config: JsonFields, windows: Sequence[int]) -> list[Mapping[str, Any]]:
    """Return, for each layer, the values of OF_ONE_LAYER that differ from the config's: `per_layer_config` or, without
    it, `global_head_dim` and `num_global_key_value_heads` of full layers."""
    if "per_layer_config" not in config:
        of_full: dict[str, Any] = {"head_dim": config.size("global_head_dim")}
        if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            of_full["num_key_value_heads"] = config.size("num_global_key_value_heads")
        return [{} if window else of_full for window in windows]
    found: list[Mapping[str, Any]] = [{} for _ in windows]
    named = config.section("per_layer_config")
    if named is None:
        return found
    for name in named.values:
        if not name.isdecimal() or int(name) >= len(found):
            raise named.error(name, f"must be a layer, 0 to {len(found) - 1}", name)
        if (own := named.section(name)) is not None:
            for unknown in own.values.keys() - OF_ONE_LAYER:
                raise own.error(unknown, "must be absent (only heads may differ)", own.get(unknown))
            found[int(name)] = own.values
    return found


def _ropes(config: JsonFields, windows: Sequence[int]) -> dict[str, RopeSpec]:
    """Return the RoPE of each layer type that occurs."""
    nested = config.section("rope_parameters") or JsonFields(config.path, ROPES)
    ropes: dict[str, RopeSpec] = {}
    for layer_type in dict.fromkeys(SLIDING if window else FULL for window in windows):
        fields = nested.section(layer_type)
        if fields is None:
            raise nested.error(layer_type, "must be given", None)
        theta = fields.number("rope_theta", minimum=1.0)
        ropes[layer_type] = rope_of(config, fields, theta, config.size("max_position_embeddings"))
    return ropes


def _kv_sources(config: JsonFields, windows: Sequence[int]) -> list[int | None]:
    """Return, for each layer without KV of its own, the layer whose KV it reads: the last one of its type that has KV;
    None for a layer that keeps its own."""
    num_shared = config.size("num_kv_shared_layers", default=0, minimum=0)
    first = len(windows) - num_shared
    with_kv = {bool(window): layer for layer, window in enumerate(windows[: max(first, 0)])}
    if num_shared and len(with_kv) < len({bool(window) for window in windows}):
        raise config.error("num_kv_shared_layers", "must leave a layer of each type that has KV", num_shared)
    return [None if layer < first else with_kv[bool(window)] for layer, window in enumerate(windows)]


def _attention(config: JsonFields, window: int, rope: RopeSpec) -> AttentionSpec:
    ahead = config.get("use_bidirectional_attention")
    if ahead not in (None, False, "vision"):  # vision: only within images
        raise config.error(
            "use_bidirectional_attention", "must be null or vision (a decoder attends only to earlier tokens)", ahead
        )
    bias = config.flag("attention_bias")
    return replace(
        read_attention(config, with_rope=False),
        rope=rope,
        scale=1.0,
        window=window,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        v_norm=True,
        keys_are_values=config.flag("attention_k_eq_v") and not window,
    )


def _reading(config: JsonFields, attention: AttentionSpec, of: object, kv_from: int) -> AttentionSpec:
    """attention: of a layer that reads the KV of layer `kv_from`, whose attention is `of`."""
    assert isinstance(of, AttentionSpec)
    if (attention.num_kv_heads, attention.head_dim) != (of.num_kv_heads, of.head_dim):
        need = f"must leave layers that read the KV of layer {kv_from} the heads that it has"
        raise config.error("per_layer_config", need, config.get("per_layer_config"))
    return replace(attention, kv_from=kv_from, v_norm=False, keys_are_values=False)


def _layer(config: JsonFields, attention: AttentionSpec) -> LayerSpec:
    mlp = read_mlp(config, "hidden_activation")
    if config.flag("use_double_wide_mlp") and attention.kv_from is not None:
        mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    moe = _moe(config, mlp) if config.flag("enable_moe_block") else None
    return LayerSpec(
        attention,
        mlp if moe is None else moe,
        norms="both",
        beside=None if moe is None else mlp,
        token_input=_token_input(config, mlp),
        is_scaled=True,
    )


def _moe(config: JsonFields, mlp: MlpSpec) -> MoeSpec:
    num_experts, top_k = read_num_experts(config, "num_experts"), config.size("top_k_experts")
    if top_k > num_experts:
        raise config.error("top_k_experts", f"must be at most num_experts={num_experts}", top_k)
    scale = config.size("hidden_size") ** -0.5
    routing = RoutingSpec(top_k, router_norm=True, logit_scale=scale, expert_scales=True)
    return MoeSpec(num_experts, replace(mlp, intermediate_size=config.size("moe_intermediate_size")), routing)


def _token_input(config: JsonFields, mlp: MlpSpec) -> TokenInputSpec | None:
    dim = config.size("hidden_size_per_layer_input", minimum=0)
    if not dim:
        return None
    vocab_size, needed = config.size("vocab_size_per_layer_input"), config.size("vocab_size")
    if vocab_size < needed:
        raise config.error("vocab_size_per_layer_input", f"must be at least vocab_size={needed}", vocab_size)
    return TokenInputSpec(dim, vocab_size, mlp.activation)
