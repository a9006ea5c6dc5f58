"""Reads a config.json, or what stands for it, as a ModelSpec. This file has the table of all architectures; the files
that it imports read their layers, and with tensor_names.py those are the only ones that know families.

A field that would change the maths and that the decoder does not handle is refused by name, so that a checkpoint
either computes what transformers computes or does not load.
"""

from pathlib import Path
from typing import Any, cast

from ...common.errors import UnsupportedArchitecture
from .deepseek import V2_DEFAULTS, V3_DEFAULTS, deepseek_v2, deepseek_v3
from .family import Family, around_wide_norms
from .gemma import GEMMA2_DEFAULTS, GEMMA3_DEFAULTS, around_gemma, around_gemma_with_vision, gemma2, gemma3
from .gemma4 import GEMMA4_DEFAULTS, UNIFIED_DEFAULTS, around_gemma4, gemma4, gemma4_unified
from .json_config import JsonFields, read_json_object
from .llama import llama, mistral, olmo2, phi3, qwen2, qwen3
from .model_config import read_config
from .moe import GPT_OSS_DEFAULTS, MIXTRAL_DEFAULTS, gpt_oss, mixtral, qwen3_moe
from .quantisation import read_quantisation
from .rope_config import longest_context
from .spec import ModelSpec

MAX_LAYERS = 1024
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(deepseek_v2, V2_DEFAULTS),
    "DeepseekV3ForCausalLM": Family(deepseek_v3, V3_DEFAULTS),
    "Gemma2ForCausalLM": Family(gemma2, GEMMA2_DEFAULTS, around_gemma),
    "Gemma3ForCausalLM": Family(gemma3, GEMMA3_DEFAULTS, around_gemma),
    "Gemma3ForConditionalGeneration": Family(gemma3, GEMMA3_DEFAULTS, around_gemma_with_vision, section="text_config"),
    "Gemma4ForCausalLM": Family(gemma4, GEMMA4_DEFAULTS, around_gemma4),
    "Gemma4ForConditionalGeneration": Family(gemma4, GEMMA4_DEFAULTS, around_gemma4, section="text_config"),
    "Gemma4UnifiedForCausalLM": Family(gemma4_unified, UNIFIED_DEFAULTS, around_gemma4),
    "Gemma4UnifiedForConditionalGeneration": Family(
        gemma4_unified, UNIFIED_DEFAULTS, around_gemma4, section="text_config"
    ),
    "GptOssForCausalLM": Family(gpt_oss, GPT_OSS_DEFAULTS, around_wide_norms),
    "LlamaForCausalLM": Family(llama),
    "MistralForCausalLM": Family(mistral, {"sliding_window": 4096, "num_key_value_heads": 8}),
    "MixtralForCausalLM": Family(mixtral, MIXTRAL_DEFAULTS),
    "Olmo2ForCausalLM": Family(olmo2, {"rms_norm_eps": 1e-5}, around_wide_norms),
    "Phi3ForCausalLM": Family(phi3, {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
    "Qwen2ForCausalLM": Family(qwen2, {"sliding_window": 4096, "max_window_layers": 28}),
    "Qwen3ForCausalLM": Family(qwen3, {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(qwen3_moe, {"sliding_window": 4096}),
}


def load_spec(model_path: Path) -> ModelSpec:
    """The spec of the checkpoint in directory `model_path`, or in a GGUF file. Raises CheckpointError or
    UnsupportedArchitecture."""
    whole = read_config(model_path)
    architecture = _architecture(whole)
    family = FAMILIES[architecture]
    config = _decoder_of(whole, architecture, family.section) if family.section else whole
    read_quantisation(model_path)  # which is known before anything is opened
    config = config.with_defaults(family.defaults)
    vocab_size = config.size("vocab_size")
    _check_layers(config)
    layers, around = family.layers(config), family.around(config)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=config.size("hidden_size"),
        layers=layers,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6, minimum=0.0),
        max_position_embeddings=config.size("max_position_embeddings"),
        longest_context=longest_context(config, (layer.attention.rope for layer in layers)),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(_generation_config(model_path), whole, config, vocab_size=vocab_size),
        embedding_scale=around.embedding_scale,
        logit_softcap=around.logit_softcap,
        norm_offset=around.norm_offset,
        wide_norms=around.wide_norms,
    )


def _check_layers(config: JsonFields) -> None:
    """Raise CheckpointError for more layers than any model has: names of tensors would be made for all of them."""
    num = config.size("num_hidden_layers")
    if num > MAX_LAYERS:
        raise config.error("num_hidden_layers", f"must be at most {MAX_LAYERS}", num)


def _architecture(config: JsonFields) -> str:
    names = config.get("architectures")
    supported = ", ".join(FAMILIES)
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in cast("list[Any]", names)):
        raise config.error("architectures", f"must be a list naming one of {supported}", names)
    found = cast("list[str]", names)
    for name in found:
        own = f"{name.removesuffix('Model')}ForCausalLM" if name.endswith("Model") else name  # without its head
        if own in FAMILIES:
            return own
    raise UnsupportedArchitecture(
        f"{config.path}: architecture {', '.join(found)} is not supported; Diptych serves {supported}"
    )


def _decoder_of(config: JsonFields, architecture: str, name: str) -> JsonFields:
    """Section `name` of a multimodal config, which has the decoder, with what transformers takes from around it alone:
    whether the embeddings are tied."""
    section = config.section(name)
    if section is None:
        raise config.error(name, f"must be an object: {architecture} has its decoder there", None)
    is_tied = config.with_defaults({"tie_word_embeddings": True}).flag("tie_word_embeddings")
    return section.with_values({"tie_word_embeddings": is_tied})


def _generation_config(model_path: Path) -> JsonFields:
    path = model_path / "generation_config.json"
    return JsonFields(path, read_json_object(path) if path.is_file() else {})


def _eos_token_ids(*sources: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids of the first source that names any; there may be none. What transformers' config classes have
    by default is none either to a checkpoint that it loads."""
    source = next((of for of in sources if of.get("eos_token_id") is not None), None)
    if source is None:
        return ()
    value: Any = source.get("eos_token_id")
    ids = cast("list[Any]", value if isinstance(value, list) else [value])
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise source.error("eos_token_id", f"must be ids in [0, {vocab_size})", value)
    return tuple(dict.fromkeys(cast("list[int]", ids)))
