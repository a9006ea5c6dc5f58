"""ModelSpec: what a Hugging Face config.json says about a decoder, checked. Knows no tensor and no other library.

A field that would change the maths and that the decoder does not handle is refused here by name, so that a checkpoint
either computes what transformers computes or does not load.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError, UnsupportedArchitecture

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_DIMENSION = 1 << 24  # no size in a real checkpoint is larger; a larger one is a damaged file


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding parameters, named as in transformers' `rope_parameters`."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of pre-norm layers: grouped-query attention with rotary embedding, then a SiLU-gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of each query and key head
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]


def load_spec(model_path: Path) -> ModelSpec:
    """The spec of the checkpoint in directory `model_path`. Raises CheckpointError or UnsupportedArchitecture."""
    if not model_path.exists():
        raise CheckpointError(f"{model_path} does not exist: give the directory of a Hugging Face checkpoint")
    path = model_path / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{model_path} holds no config.json: give the directory of a Hugging Face checkpoint")
    config = Fields(path, read_json_object(path))
    architecture = _architecture(config)
    _refuse_unhandled(config, architecture)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    vocab_size = config.size("vocab_size")
    max_position_embeddings = config.size("max_position_embeddings")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", default=num_heads),
        head_dim=_head_dim(config, architecture, hidden_size, num_heads),
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6, minimum=0.0),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(config, max_position_embeddings),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(model_path, config, vocab_size),
    )
    if spec.num_heads % spec.num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"must divide num_attention_heads={spec.num_heads}", spec.num_kv_heads
        )
    if spec.head_dim % 2 or spec.head_dim < 4:
        raise config.error("head_dim", "must be even and at least 4 for rotary embedding", spec.head_dim)
    return spec


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror}): check the file's permissions") from e
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON ({e}): fetch the checkpoint again") from e
    except RecursionError as e:
        raise CheckpointError(f"{path} is nested too deeply to be a checkpoint's: fetch the checkpoint again") from e
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, found {type(value).__name__}: fetch the checkpoint again"
        )
    return cast("dict[str, Any]", value)


class Fields:
    """Checked access to the fields of one JSON object; null counts as absent. Errors name the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self._values, self._prefix = path, values, prefix

    def error(self, name: str, need: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{name} {need}, found {found!r}")

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def size(self, name: str, default: int | None = None) -> int:
        """A count or size of at least 1."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIMENSION:
            raise self.error(name, f"must be an integer in [1, {MAX_DIMENSION}]", value)
        return value

    def number(self, name: str, default: float | None = None, minimum: float = -math.inf) -> float:
        """A finite number above `minimum`."""
        value = self._present(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= minimum:
            bound = "" if minimum == -math.inf else f" above {minimum:g}"
            raise self.error(name, f"must be a finite number{bound}", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", value)
        return value

    def section(self, name: str) -> "Fields | None":
        """The object under `name`; None where it is absent, null or empty."""
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object", value)
        return Fields(self.path, cast("dict[str, Any]", value), f"{self._prefix}{name}.")

    def _present(self, name: str, default: object) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: {self._prefix}{name} is missing")
        return value


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in cast("list[Any]", names)):
        raise config.error("architectures", f"must be a list naming one of {supported}", names)
    found = cast("list[str]", names)
    for name in found:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    raise UnsupportedArchitecture(
        f"{config.path}: architecture {', '.join(found)} is not supported; Diptych serves {supported}"
    )


def _refuse_unhandled(config: Fields, architecture: str) -> None:
    """Raise for what transformers would act on and the decoder does not."""
    if (act := config.get("hidden_act")) not in (None, "silu"):
        raise config.error("hidden_act", "must be silu", act)
    if config.get("quantization_config") is not None:
        raise config.error("quantization_config", "must be absent (quantised checkpoints are not supported)", "one")
    layer_types: object = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in cast("list[Any]", layer_types)):
        raise config.error("layer_types", "must all be full_attention (sliding windows are not supported)", layer_types)
    slides = architecture == "Qwen3ForCausalLM" and config.flag("use_sliding_window") and not layer_types
    if slides and config.size("sliding_window", default=4096):
        first = config.get("max_window_layers")
        if not isinstance(first, int) or first < config.size("num_hidden_layers"):
            raise config.error("use_sliding_window", "must be false (sliding windows are not supported)", True)


def _head_dim(config: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return config.size("head_dim")
    if architecture == "Qwen3ForCausalLM":
        return 128  # Qwen3Config's own default, whatever the hidden size
    if hidden_size % num_heads:
        raise config.error("hidden_size", f"must be a multiple of num_attention_heads={num_heads}", hidden_size)
    return hidden_size // num_heads


def _rope(config: Fields, max_position_embeddings: int) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before); the older wins, as there."""
    fields = config.section("rope_scaling") or config.section("rope_parameters")
    theta = config.number("rope_theta", default=10_000.0, minimum=1.0)
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config.error(
            "partial_rotary_factor",
            "must be 1 (partial rotation is not supported)",
            config.get("partial_rotary_factor"),
        )
    if fields is None:
        return RopeSpec(theta=theta)
    theta = fields.number("rope_theta", default=theta, minimum=1.0)
    rope_type = fields.get("rope_type") or fields.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error("rope_type", f"must be one of {', '.join(SUPPORTED_ROPE_TYPES)}", rope_type)
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error(
            "partial_rotary_factor",
            "must be 1 (partial rotation is not supported)",
            fields.get("partial_rotary_factor"),
        )
    if rope_type == "default":
        return RopeSpec(theta=theta)
    original = fields.size("original_max_position_embeddings", default=max_position_embeddings)
    original = config.size("original_max_position_embeddings", default=original)
    if rope_type == "yarn":
        return _yarn(fields, theta, original, max_position_embeddings)
    factor = fields.number("factor", minimum=0.0)
    if rope_type != "llama3":
        return RopeSpec(rope_type, theta, factor)
    low = fields.number("low_freq_factor", minimum=0.0)
    high = fields.number("high_freq_factor", minimum=low)
    return RopeSpec(rope_type, theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(fields: Fields, theta: float, original: int, max_position_embeddings: int) -> RopeSpec:
    factor = fields.optional_number("factor")
    if factor is None:
        factor = max_position_embeddings / original
    if factor <= 0.0:
        raise fields.error("factor", "must be above 0", factor)
    return RopeSpec(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fields.optional_number("beta_fast") or 32.0,
        beta_slow=fields.optional_number("beta_slow") or 1.0,
        attention_factor=fields.optional_number("attention_factor"),
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", default=True),
    )


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
