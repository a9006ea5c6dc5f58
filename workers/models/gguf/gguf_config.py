"""Makes of a GGUF model's metadata the config.json that transformers has for it. No torch.

What metadata leaves out, llama.cpp knows of the architecture (src/llama-model.cpp), and so does this file. Frequencies
that are stretched come as a tensor of factors (`rope_freqs`, `rope_factors_long`): small enough to be read here.
"""

import struct
from collections.abc import Callable
from typing import Any

from ...common.errors import CheckpointError, UnsupportedArchitecture
from .gguf_fields import GgufFields
from .gguf_files import GgufModel
from .gguf_tokens import end_token_ids

Config = dict[str, Any]

EMBED, HEAD = "token_embd.weight", "output.weight"
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
MAX_FACTORS = 4096
# Numbers of layers of the largest Gemma 2 and 3, which alone scale scores by hidden size and heads.
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


def architecture_of(model: GgufModel) -> str:
    """llama.cpp's name of a model's architecture. Raises UnsupportedArchitecture."""
    found = model.metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{model.path}: general.architecture is {found!r}; of GGUF files Diptych serves {', '.join(ARCHITECTURES)}"
        )
    return str(found)


def config_of(model: GgufModel) -> Config:
    """Return what a config.json would say. Raises CheckpointError naming the key or tensor, and
    UnsupportedArchitecture."""
    architecture = architecture_of(model)
    fields = GgufFields(model, architecture)
    _refuse_others(fields, architecture)
    heads = _latent_heads(fields) if architecture in LATENT else _heads(fields)
    return _shared(fields) | heads | ARCHITECTURES[architecture](fields)


def _shared(of: GgufFields) -> Config:
    embed = of.model.tensors.get(EMBED)
    if embed is None:
        raise CheckpointError(f"{of.model.path}: tensor {EMBED} is missing: fetch the file again")
    num_layers = of.size("block_count")
    if num_layers > len(of.model.tensors):
        of.fail("block_count", f"must be at most the number of tensors, {len(of.model.tensors)}", num_layers)
    return {
        "vocab_size": embed.shape[0],
        "hidden_size": of.size("embedding_length"),
        "num_hidden_layers": num_layers,
        "intermediate_size": of.size("feed_forward_length"),
        "num_attention_heads": of.size("attention.head_count"),
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": of.size("context_length"),
        "rope_theta": of.number("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(of),
        "tie_word_embeddings": not of.has_tensor(HEAD),
        "eos_token_id": list(end_token_ids(of.model, embed.shape[0])) or None,
    }


def _heads(of: GgufFields) -> Config:
    """Heads of grouped-query attention."""
    heads = of.size("attention.head_count")
    head_dim = of.size("attention.key_length", of.size("embedding_length") // heads)
    if of.size("attention.value_length", head_dim) != head_dim:
        of.fail("attention.value_length", f"must be attention.key_length={head_dim}", of.get("attention.value_length"))
    return {"num_key_value_heads": of.size("attention.head_count_kv", heads), "head_dim": head_dim}


def _refuse_others(of: GgufFields, architecture: str) -> None:
    """Raise CheckpointError for what llama.cpp computes by keys of any architecture, and nothing here does."""
    if not of.flag("attention.causal", True):
        of.fail("attention.causal", "must be true: tokens attend to those before them alone", False)
    factors = ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"]
    for key in factors if architecture == "phi3" else [*factors, "rope.scaling.attn_factor"]:
        if of.number(key, 1.0) != 1.0:
            of.fail(key, "must be 1: other factors of attention are not computed", of.get(key))


def _scaling(of: GgufFields) -> Config | None:
    # As in llama.cpp, a factor is linear where nothing says otherwise, older files have it under another name, and 0 is
    # none (src/llama-model.cpp).
    factor = of.number("rope.scaling.factor", of.number("rope.scale_linear", 0.0)) or 1.0
    kind = of.text("rope.scaling.type", "linear")
    if of.has_tensor(FACTORS):
        # Factors of each frequency, as of Llama 3.1, are longrope's of one length.
        linear = factor if kind == "linear" else 1.0
        factors, original = [linear * each for each in _factors(of, FACTORS)], of.size("context_length")
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": original} | same
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found: Config = {"rope_type": kind, "factor": of.number("rope.scaling.factor")}
        if of.get("rope.scaling.original_context_length") is not None:
            found["original_max_position_embeddings"] = of.size("rope.scaling.original_context_length")
        for ours, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if of.get(f"rope.scaling.{key}") is not None:
                found[ours] = of.number(f"rope.scaling.{key}")
        return found
    if kind == "longrope":
        return None  # known by its tensors
    return of.fail("rope.scaling.type", "must be one of none, linear, yarn, longrope", kind)


def _factors(of: GgufFields, name: str) -> list[float]:
    tensor = of.model.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        raise CheckpointError(
            f"{tensor.path}: tensor {name} must be F32 of one axis, found {tensor.type.name} {list(tensor.shape)}"
        )
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
    except (OSError, struct.error) as e:
        raise CheckpointError(f"{tensor.path}: tensor {name} cannot be read ({e}): fetch the file again") from e


def _llama(of: GgufFields) -> Config:
    """Llama, Mistral, and Mixtral, which goes by the same name."""
    head_dim = of.size("attention.key_length", of.size("embedding_length") // of.size("attention.head_count"))
    if of.size("rope.dimension_count", head_dim) != head_dim:
        of.fail("rope.dimension_count", f"must be {head_dim}, a whole head", of.get("rope.dimension_count"))
    if of.size("expert_count", 0, minimum=0):
        experts = {"num_local_experts": of.size("expert_count"), "num_experts_per_tok": of.size("expert_used_count")}
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": None} | experts
    has_bias, mlp_bias = (of.has_tensor(f"blk.0.{name}.bias") for name in ("attn_q", "ffn_gate"))
    return {"architectures": ["LlamaForCausalLM"], "attention_bias": has_bias, "mlp_bias": mlp_bias}


def _plain(architecture: str) -> Callable[[GgufFields], Config]:
    return lambda _: {"architectures": [architecture]}


def _qwen3moe(of: GgufFields) -> Config:
    layers = range(of.size("block_count"))
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": of.size("expert_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
        "moe_intermediate_size": of.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [i for i in layers if not of.has_tensor(f"blk.{i}.ffn_gate_inp.weight")],
    }


def _gemma(of: GgufFields, architecture: str, name: str) -> Config:
    largest = of.size("block_count") == LARGEST_GEMMA[architecture]
    hidden, heads = of.size("embedding_length"), of.size("attention.head_count")
    return {
        "architectures": [name],
        "query_pre_attn_scalar": hidden // heads if largest else of.size("attention.key_length", hidden // heads),
        "sliding_window": of.size("attention.sliding_window"),
        "layer_types": _layer_types(of),
    }


def _layer_types(of: GgufFields) -> list[str] | None:
    """Type of each layer, of files that say it so."""
    pattern: Any = of.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return None
    if len(pattern) != of.size("block_count") or not all(type(slides) is bool for slides in pattern):
        of.fail("attention.sliding_window_pattern", "must say of each layer whether it has a window", pattern[:8])
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _gemma2(of: GgufFields) -> Config:
    caps = {
        "attn_logit_softcapping": of.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.number("final_logit_softcapping", 30.0),
    }
    return _gemma(of, "gemma2", "Gemma2ForCausalLM") | caps


def _gemma3(of: GgufFields) -> Config:
    found = _gemma(of, "gemma3", "Gemma3ForCausalLM")
    found["rope_local_base_freq"] = of.number("rope.freq_base_swa", 10_000.0)
    if type(of.get("attention.sliding_window_pattern")) is int:
        found["sliding_window_pattern"] = of.size("attention.sliding_window_pattern")
    if of.get("final_logit_softcapping") is not None:
        found["final_logit_softcapping"] = of.number("final_logit_softcapping")
    if of.get("rope.freq_base") is None:
        found["rope_theta"] = 1_000_000.0
    return found


def _phi3(of: GgufFields) -> Config:
    hidden, heads, longest = of.size("embedding_length"), of.size("attention.head_count"), of.size("context_length")
    head_dim = of.size("attention.key_length", hidden // heads)
    original = of.size("rope.scaling.original_context_length", longest)
    found: Config = {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": of.size("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": original,
        "sliding_window": of.size("attention.sliding_window", 0, minimum=0) or None,
    }
    if of.has_tensor(LONG) or of.has_tensor(SHORT):
        for name in (LONG, SHORT):
            if not of.has_tensor(name):
                raise CheckpointError(f"{of.model.path}: tensor {name} is missing: fetch the file again")
        scaling: Config = {
            "rope_type": "longrope",
            "short_factor": _factors(of, SHORT),
            "long_factor": _factors(of, LONG),
        }
        if of.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = of.number("rope.scaling.attn_factor")
        found["rope_scaling"] = scaling
    return found


def _gpt_oss(of: GgufFields) -> Config:
    scaling = _scaling(of)
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": of.size("expert_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
        "intermediate_size": of.size("expert_feed_forward_length"),
        "sliding_window": of.size("attention.sliding_window"),
        "rope_scaling": None if scaling is None else scaling | {"truncate": False},
    }


def _latent_heads(of: GgufFields) -> Config:
    """Heads of latent attention. Newer files have sizes of what the cache holds as key_length, and those of heads under
    names of their own."""
    rope_dim = of.size("rope.dimension_count")
    key = of.size("attention.key_length_mla", of.size("attention.key_length"))
    if key <= rope_dim:
        of.fail("attention.key_length", f"must be more than rope.dimension_count={rope_dim}", key)
    has_rank = of.get("attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": of.size("attention.head_count"),
        "head_dim": rope_dim,
        "q_lora_rank": of.size("attention.q_lora_rank") if has_rank else None,
        "kv_lora_rank": of.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": of.size("attention.value_length_mla", of.size("attention.value_length")),
    }


def _deepseek2(of: GgufFields) -> Config:
    """DeepSeek-V2 and V3, and models of their shape; sigmoid gates are V3's."""
    is_v3 = of.size("expert_gating_func", SOFTMAX, minimum=0) == SIGMOID
    num_experts = of.size("expert_count")
    num_groups, top_groups = DEEPSEEK_GROUPS.get(num_experts, (1, 1))
    num_groups = of.size("expert_group_count", num_groups)
    found: Config = {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "first_k_dense_replace": of.size("leading_dense_block_count", 0, minimum=0),
        "n_routed_experts": num_experts,
        "n_shared_experts": of.size("expert_shared_count"),
        "num_experts_per_tok": of.size("expert_used_count"),
        "moe_intermediate_size": of.size("expert_feed_forward_length"),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0),
        "norm_topk_prob": of.flag("expert_weights_norm", is_v3),
        "n_group": num_groups,
        "topk_group": of.size("expert_group_used_count", top_groups),
        "topk_method": "noaux_tc" if is_v3 else "greedy" if num_groups == 1 else "group_limited_greedy",
    }
    scaling = _scaling(of)
    if scaling is not None and of.get("rope.scaling.yarn_log_multiplier") is not None:
        mscale = round(10 * of.number("rope.scaling.yarn_log_multiplier"), 6)  # the file has a tenth of it
        found["rope_scaling"] = scaling | {"mscale": mscale, "mscale_all_dim": mscale}
    return found


SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func
# Groups of experts, and how many of them a token chooses from, by the number of experts: what older files leave out.
DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}
LATENT = ("deepseek2",)
ARCHITECTURES: dict[str, Callable[[GgufFields], Config]] = {
    "llama": _llama,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _plain("Olmo2ForCausalLM"),
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
