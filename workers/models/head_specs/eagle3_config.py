"""Eagle3Config: what the config.json of an EAGLE-3 head says (Li et al. 2025, arXiv 2503.01840), checked against its
target. Knows no tensor.

Two formats are published:

    SpecForge       flat: a Llama config, architectures [LlamaForCausalLMEagle3], draft_vocab_size, eagle_config
                    (specforge/modeling/draft/llama3_eagle.py)
    speculators     speculators_model_type "eagle3", the decoder in transformer_layer_config, of type llama or qwen3
                    (speculators/models/eagle3/config.py)

The head is given the residual after some of the target's layers. By default after 2, n / 2 and n - 3 of n, as in vLLM
(`get_eagle3_aux_hidden_state_layers`), SGLang, SpecForge and speculators. eagle_aux_hidden_state_layer_ids has two
readings: at the top level (speculators, vLLM) it counts the layers before; in eagle_config (SpecForge's
`resolve_eagle_capture_layers`, whose default is [1, n / 2 - 1, n - 4]) it names the layers whose outputs are taken, and
SGLang's `set_eagle3_layers_to_capture` adds 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ...common.errors import ConfigError, UnsupportedArchitecture
from ..families.json_config import JsonFields
from ..families.quantisation import read_quantisation
from ..families.registry import FAMILIES
from ..families.rope_config import longest_context
from ..families.spec import ModelSpec
from .head_spec import HeadSpec, HiddenState

FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Defaults of transformers' config classes, for fields that a file need not name.
_BOTH = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA = _BOTH | {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048}
QWEN3 = _BOTH | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
DECODERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", QWEN3 | {"num_key_value_heads": 32}),
}
SPECULATORS_DRAFT_VOCAB = 32_000  # its default


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    head: HeadSpec
    norm_before_residual: bool = False  # the residual begins as the normed hidden state; else as it is
    aux_norm: Literal["none", "each", "all"] = "none"  # RMSNorm of each hidden state before fc, or of all at once
    norm_output: bool = False  # fed back is the hidden state after the final norm; else before it (EAGLE-3.1)


def read_eagle3(config: JsonFields, target: ModelSpec) -> Eagle3Config:
    """config: the head's. Raises CheckpointError for what no head can be, UnsupportedArchitecture, and ConfigError for
    a head of another target."""
    read_quantisation(config.path.parent)  # which is known before anything is opened
    is_nested = "speculators_model_type" in config
    inner, architecture = nested(config) if is_nested else _flat(config)
    draft_vocab = SPECULATORS_DRAFT_VOCAB if is_nested else inner.size("vocab_size")
    decoder = decoder_of(inner, architecture)
    target_hidden_size = config.size("target_hidden_size", default=decoder.hidden_size)
    draft_vocab = config.size("draft_vocab_size", default=draft_vocab)
    _refuse(config, decoder, draft_vocab)
    head = HeadSpec(
        "eagle3",
        decoder,
        draft_vocab,
        target_hidden_size,
        HiddenState.AFTER_LAYERS,
        hidden_layers=_hidden_layers(config, target.num_layers),
    )
    check_target(config.path, head, target)
    norm_each, norm_all = config.flag("fc_norm"), config.flag("norm_before_fc")
    if norm_each and norm_all:
        raise config.error("fc_norm", "must be false where norm_before_fc is true", True)
    return Eagle3Config(
        head,
        norm_before_residual=config.flag("norm_before_residual"),
        aux_norm="each" if norm_each else "all" if norm_all else "none",
        norm_output=config.flag("norm_output"),
    )


def check_target(path: Path, head: HeadSpec, target: ModelSpec) -> None:
    """Raise ConfigError where a head is of another target."""
    for what, own, theirs in (
        ("a hidden size", head.target_hidden_size, target.hidden_size),
        ("a vocabulary", head.decoder.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise ConfigError(
                f"{path}: the head is for a target with {what} of {own}, and {target.architecture} has {theirs}: give "
                "the head that was trained for this model"
            )


def nested(config: JsonFields) -> tuple[JsonFields, str]:
    """Return the section of speculators' format that has the decoder, and the decoder's architecture."""
    inner = config.section("transformer_layer_config")
    if inner is None:
        raise config.error("transformer_layer_config", "must be an object", None)
    model_type = inner.get("model_type") or "qwen3"
    if model_type not in DECODERS:
        raise UnsupportedArchitecture(
            f"{config.path}: a head's layer of model_type {model_type!r} is not supported; use {' or '.join(DECODERS)}"
        )
    architecture, defaults = DECODERS[model_type]
    return inner.with_defaults(defaults), architecture


def _flat(config: JsonFields) -> tuple[JsonFields, str]:
    names: object = config.get("architectures")
    if not isinstance(names, list) or not any(name in FLAT for name in cast("list[object]", names)):
        raise UnsupportedArchitecture(
            f"{config.path}: architectures {names!r} is no EAGLE-3 head that is supported; it must name {FLAT[0]}"
        )
    return config.with_defaults({"num_hidden_layers": 1}).with_defaults(LLAMA), "LlamaForCausalLM"


def decoder_of(inner: JsonFields, architecture: str) -> ModelSpec:
    """The head's layers as a decoder's."""
    family = FAMILIES[architecture]
    inner = inner.with_defaults(family.defaults)
    layers = family.layers(inner)
    return ModelSpec(
        architecture,
        vocab_size=inner.size("vocab_size"),
        hidden_size=inner.size("hidden_size"),
        layers=layers,
        rms_norm_eps=inner.number("rms_norm_eps", default=1e-6, minimum=0.0),
        max_position_embeddings=inner.size("max_position_embeddings"),
        longest_context=longest_context(inner, (layer.attention.rope for layer in layers)),
        tie_word_embeddings=False,
        eos_token_ids=(),
    )


def _refuse(config: JsonFields, decoder: ModelSpec, draft_vocab: int) -> None:
    """Raise for fields that would change what is computed."""
    if draft_vocab > decoder.vocab_size:
        raise config.error("draft_vocab_size", f"must be at most vocab_size={decoder.vocab_size}", draft_vocab)
    if (scale := config.number("logit_scale", default=1.0)) != 1.0:
        raise config.error("logit_scale", "must be 1", scale)
    if config.flag("parallel_drafting"):
        raise config.error("parallel_drafting", "must be false (P-EAGLE is not supported)", True)


def _hidden_layers(config: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Return after how many of the target's `num_layers` layers the hidden states are taken."""
    name, source, offset = "eagle_aux_hidden_state_layer_ids", config, 0
    if (eagle := config.section("eagle_config")) is not None:
        if not eagle.flag("use_aux_hidden_state", default=True):
            raise eagle.error("use_aux_hidden_state", "must be true (a head of EAGLE-1 is not supported)", False)
        if config.get(name) is None and eagle.get(name) is not None:
            source, offset = eagle, 1
    ids: object = source.get(name)
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
        need = f"must name layers: the default, {ids}, does not fit a target of {num_layers} layers"
    else:
        need = f"must be distinct layers of the target, from {0 - offset} to {num_layers - offset}"
    if not isinstance(ids, list) or not ids:
        raise source.error(name, need, ids)
    found = cast("list[Any]", ids)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise source.error(name, need, found)
    after = tuple(int(i) + offset for i in found)
    if len(set(after)) < len(after) or min(after) < 0 or max(after) > num_layers:
        raise ConfigError(f"{source.path}: {name} {need}, found {found}")
    return after
