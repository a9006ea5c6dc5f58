"""Types that describe a model family, and readers of config.json that families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from .json_config import JsonFields
from .rope_config import read_rope
from .spec import Activation, AttentionSpec, LayerSpec, MlpSpec, RopeSpec

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"  # words of `layer_types`


@dataclass(frozen=True, slots=True)
class Around:
    """Part of a ModelSpec that is neither in its layers nor the same for all families."""

    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    norm_offset: float = 0.0
    wide_norms: bool = False


def _plain(_: JsonFields) -> Around:
    return Around()


def around_wide_norms(_: JsonFields) -> Around:
    return Around(wide_norms=True)


@dataclass(frozen=True, slots=True)
class Family:
    layers: Callable[[JsonFields], tuple[LayerSpec, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of fields that a config.json need not name
    around: Callable[[JsonFields], Around] = _plain
    section: str | None = None  # of config.json, that describes the decoder; None: all of it


def read_attention(config: JsonFields, *, with_rope: bool = True) -> AttentionSpec:
    """Heads and, if asked for, rope; the head dimension is the hidden size over the heads where none is named."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads={num_heads}", num_kv_heads)
    if config.get("head_dim") is not None:
        head_dim = config.size("head_dim")
    else:
        if hidden_size % num_heads:
            raise config.error("hidden_size", f"must be a multiple of num_attention_heads={num_heads}", hidden_size)
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim < 4:
        raise config.error("head_dim", "must be even and at least 4 for rotary embedding", head_dim)
    rope = read_rope(config, config.size("max_position_embeddings")) if with_rope else RopeSpec()
    return AttentionSpec(num_heads, num_kv_heads, head_dim, rope, scale=head_dim**-0.5)


def read_mlp(config: JsonFields, activation: str = "hidden_act") -> MlpSpec:
    """activation: the field that names it. Where it is absent it is silu, as in every config class that has no default
    of its own; null is no name."""
    name = config.get(activation) if activation in config else "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.error(activation, f"must be one of {', '.join(ACTIVATIONS)}", name)
    return MlpSpec(config.size("intermediate_size"), ACTIVATIONS[name])


def read_windows(config: JsonFields, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Window of each layer (0: none), from `layer_types` or, where that is absent, of the layers that `slides`."""
    num_layers, types = config.size("num_hidden_layers"), config.get("layer_types")
    if types is None:
        types = [SLIDING if slides(i) else FULL for i in range(num_layers)]
    if not isinstance(types, list) or any(t not in (FULL, SLIDING) for t in cast("list[Any]", types)):
        raise config.error("layer_types", f"must be a list of {FULL} and {SLIDING}", types)
    found = cast("list[str]", types)
    if len(found) != num_layers:
        raise config.error("layer_types", f"must name num_hidden_layers={num_layers} layers", len(found))
    window = config.size("sliding_window") if SLIDING in found else 0
    return tuple(window if t == SLIDING else 0 for t in found)


def refuse_layer_types(config: JsonFields, ours: str) -> None:
    """Raise for a `layer_types` that says anything but `ours`, where transformers knows no such field."""
    types: object = config.get("layer_types") or []
    if not isinstance(types, list) or any(t != ours for t in cast("list[Any]", types)):
        raise config.error("layer_types", f"must all be {ours}", types)
