"""What each family's config.json means, as a ModelSpec: the only file, with tensor_names.py, that knows families.

A field that would change the maths and that the decoder does not handle is refused here by name, so that a checkpoint
either computes what transformers computes or does not load.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError, UnsupportedArchitecture
from .config import Fields, read_json_object
from .rope_config import read_rope
from .spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RoutingSpec

MAX_EXPERTS = 4096  # no real mixture has more; more are a damaged file


def load_spec(model_path: Path) -> ModelSpec:
    """The spec of the checkpoint in directory `model_path`. Raises CheckpointError or UnsupportedArchitecture."""
    if not model_path.exists():
        raise CheckpointError(f"{model_path} does not exist: give the directory of a Hugging Face checkpoint")
    path = model_path / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{model_path} holds no config.json: give the directory of a Hugging Face checkpoint")
    config = Fields(path, read_json_object(path))
    architecture = _architecture(config)
    vocab_size = config.size("vocab_size")
    layers = FAMILIES[architecture](config)
    if config.get("quantization_config") is not None:
        raise config.error("quantization_config", "must be absent (quantised checkpoints are not supported)", "one")
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=config.size("hidden_size"),
        layers=layers,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6, minimum=0.0),
        max_position_embeddings=config.size("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(model_path, config, vocab_size),
    )


def _llama(config: Fields) -> tuple[LayerSpec, ...]:
    _refuse_unhandled(config)
    sizes = _sizes(config)
    bias = config.flag("attention_bias")
    mlp = MlpSpec(config.size("intermediate_size"), bias=config.flag("mlp_bias"))
    return (LayerSpec(sizes.attention(config, bias=bias), mlp),) * config.size("num_hidden_layers")


def _qwen3(config: Fields) -> tuple[LayerSpec, ...]:
    _refuse_unhandled(config)
    slides = config.flag("use_sliding_window") and not config.get("layer_types")
    if slides and config.size("sliding_window", default=4096):
        first = config.get("max_window_layers")
        if not isinstance(first, int) or first < config.size("num_hidden_layers"):
            raise config.error("use_sliding_window", "must be false (sliding windows are not supported)", True)
    sizes = _sizes(config, head_dim=128)  # Qwen3Config's own default, whatever the hidden size
    attention = sizes.attention(config, bias=config.flag("attention_bias"), qk_norm=True)
    mlp = MlpSpec(config.size("intermediate_size"))
    return (LayerSpec(attention, mlp),) * config.size("num_hidden_layers")


def _mixtral(config: Fields) -> tuple[LayerSpec, ...]:
    _refuse_unhandled(config)
    attention = replace(_sizes(config).attention(config), window=_window(config))
    mlp = MlpSpec(config.size("intermediate_size"))
    return (LayerSpec(attention, _moe(config, mlp)),) * config.size("num_hidden_layers")


def _qwen3_moe(config: Fields) -> tuple[LayerSpec, ...]:
    _refuse_unhandled(config)
    attention = _sizes(config).attention(config, bias=config.flag("attention_bias"), qk_norm=True)
    if config.flag("use_sliding_window"):
        attention = replace(attention, window=_window(config))
    num_layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in cast("list[Any]", dense)):
        raise config.error("mlp_only_layers", "must be a list of layers", dense)
    has_experts = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    mlp, expert = MlpSpec(config.size("intermediate_size")), MlpSpec(config.size("moe_intermediate_size"))
    moe = _moe(config, expert, renormalise=config.flag("norm_topk_prob"))
    return tuple(LayerSpec(attention, moe if has else mlp) for has in has_experts)


FAMILIES: dict[str, Callable[[Fields], tuple[LayerSpec, ...]]] = {
    "LlamaForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def attention(self, config: Fields, *, bias: bool = False, qk_norm: bool = False) -> AttentionSpec:
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rope=read_rope(config, config.size("max_position_embeddings")),
            scale=self.head_dim**-0.5,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head" if qk_norm else "none",
        )


def _sizes(config: Fields, head_dim: int | None = None) -> _Sizes:
    """head_dim: where config.json names none; None: the hidden size over the heads."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads={num_heads}", num_kv_heads)
    if config.get("head_dim") is not None:
        head_dim = config.size("head_dim")
    elif head_dim is None:
        if hidden_size % num_heads:
            raise config.error("hidden_size", f"must be a multiple of num_attention_heads={num_heads}", hidden_size)
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim < 4:
        raise config.error("head_dim", "must be even and at least 4 for rotary embedding", head_dim)
    return _Sizes(num_heads, num_kv_heads, head_dim)


def _window(config: Fields) -> int:
    """Of every layer."""
    return 0 if config.get("sliding_window") is None else config.size("sliding_window")


def _moe(config: Fields, expert: MlpSpec, *, renormalise: bool = True) -> MoeSpec:
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts, top_k = config.size(name), config.size("num_experts_per_tok")
    if num_experts > MAX_EXPERTS:
        raise config.error(name, f"must be at most {MAX_EXPERTS}", num_experts)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"must be at most {name}={num_experts}", top_k)
    return MoeSpec(num_experts, expert, RoutingSpec(top_k, renormalise=renormalise))


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    supported = ", ".join(FAMILIES)
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in cast("list[Any]", names)):
        raise config.error("architectures", f"must be a list naming one of {supported}", names)
    found = cast("list[str]", names)
    for name in found:
        if name in FAMILIES:
            return name
    raise UnsupportedArchitecture(
        f"{config.path}: architecture {', '.join(found)} is not supported; Diptych serves {supported}"
    )


def _refuse_unhandled(config: Fields) -> None:
    """Raise for what transformers would act on and the decoder does not."""
    if (act := config.get("hidden_act")) not in (None, "silu"):
        raise config.error("hidden_act", "must be silu", act)
    layer_types: object = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in cast("list[Any]", layer_types)):
        raise config.error("layer_types", "must all be full_attention (sliding windows are not supported)", layer_types)


def _eos_token_ids(model_path: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json or, failing that, of config.json; there may be none."""
    path = model_path / "generation_config.json"
    fields = Fields(path, read_json_object(path)) if path.is_file() else config
    source = config if fields.get("eos_token_id") is None else fields
    value: Any = source.get("eos_token_id")
    if value is None:
        return ()
    ids = cast("list[Any]", value if isinstance(value, list) else [value])
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise source.error("eos_token_id", f"must be ids in [0, {vocab_size})", value)
    return tuple(dict.fromkeys(cast("list[int]", ids)))
