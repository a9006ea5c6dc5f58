"""Random Hugging Face checkpoints small enough to compute at once, and what transformers makes of them. It is imported
where it is used: processes that tests start have the other helpers, and mostly no use for it."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

WINDOW = 24  # prompts of tests are longer
LONG = 256  # tokens: transformers computes longer prompts apart from the others
EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
YARN_32 = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {"sliding_window": WINDOW, "query_pre_attn_scalar": 10, "tie_word_embeddings": True}
GEMMA3: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
GEMMA4: dict[str, Any] = {
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 6.0,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
# Two layers of each type keep KV, two read that of the last of their type.
GEMMA4_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 500,
}
GEMMA4_MOE: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
PHI3: dict[str, Any] = {"num_attention_heads": 4}  # it derives the head dimension: 16
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 1.5, 4.0, 5.0, 8.0],
}
# Of models whose decoder is a part, the other ones.
VISION: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
HEARING: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "output_proj_dims": 16}
OTHER_PARTS: dict[str, dict[str, Any]] = {
    "Gemma3": {"vision_config": VISION | {"image_size": 28, "patch_size": 14}},
    "Gemma4": {
        "vision_config": VISION
        | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        "audio_config": HEARING | {"subsampling_conv_channels": [4, 4]},
    },
    "Gemma4Unified": {
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4, "patch_size": 4},
        "audio_config": {"audio_embed_dim": 16},
    },
}
# For each: transformers' name, and its config values in addition to DEFAULTS.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mixtral": ("Mixtral", {"intermediate_size": 64, "sliding_window": WINDOW} | EXPERTS),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "qwen3moe": (
        "Qwen3Moe",
        {"num_hidden_layers": 4, "mlp_only_layers": [2], "moe_intermediate_size": 32} | EXPERTS,
    ),
    "qwen3-windows": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "v_head_dim": 12, "rope_parameters": YARN, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | {"q_lora_rank": 24, "v_head_dim": 32}),
    "gptoss": (
        "GptOss",
        {"intermediate_size": 64, "sliding_window": WINDOW, "rope_parameters": YARN_32} | EXPERTS,
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}),
    "gemma3": ("Gemma3", GEMMA | GEMMA3),
    "olmo2": ("Olmo2", {}),
    "phi3": (
        "Phi3",
        PHI3
        | {"sliding_window": WINDOW, "max_position_embeddings": 1100, "original_max_position_embeddings": 1100}
        | {"rope_parameters": LONGROPE},
    ),
    # All that tests generate is beyond its first length.
    "phi3-long": ("Phi3", PHI3 | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "gemma3-vision": ("Gemma3ForConditionalGeneration", GEMMA | GEMMA3),
    "gemma4": ("Gemma4", GEMMA4 | GEMMA4_SHARED),
    "gemma4-moe": ("Gemma4", GEMMA4 | GEMMA4_MOE),
    "gemma4-vision": (
        "Gemma4ForConditionalGeneration",
        GEMMA4
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "pad_token_id": 0,
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
        | {"layer_types": ["full_attention"] * 2 + ["sliding_attention", "full_attention"], "num_hidden_layers": 4}
        | {"attention_k_eq_v": True, "num_kv_shared_layers": 1, "pad_token_id": 0},
    ),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    # Large enough that attention and position change the argmax: with the usual 0.02 a random model repeats itself.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def make_checkpoint(path: Path, arch: str, seed: int, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Save a random float32 checkpoint of `arch`, a key of ARCHITECTURES, in directory `path`; returns it."""
    name, settings = ARCHITECTURES[arch]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _model(name, DEFAULTS | settings | overrides).eval()
        # Norms, scales and biases start at 1 and 0, where a mistake in applying them would not show.
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("bias", "sinks", "layer_scalar", "router.scale", "per_expert_scale")):
                tensor.data.add_(torch.randn_like(tensor) * 0.2)
        model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def _model(name: str, settings: dict[str, Any]) -> Any:
    import transformers

    if (family := name.removesuffix("ForConditionalGeneration")) != name:
        config = getattr(transformers, f"{family}Config")(text_config=settings, **OTHER_PARTS[family])
        return getattr(transformers, name)(config)
    config_class = getattr(transformers, f"{name}TextConfig" if name in ("Gemma3", "Gemma4") else f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**settings))


def reference_model(path: Path) -> Any:
    """transformers' own model of the checkpoint, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_greedy(path: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[list[int], float]]:
    """Return, for each prompt, the `max_tokens` tokens of transformers' greedy `generate`, end-of-sequence ignored, and
    the smallest gap between the two largest logits met on the way: a tie within rounding shows as a tiny gap."""
    return _greedy(reference_model(path), prompts, max_tokens)


def _greedy(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[list[int], float]]:
    """Prompts of nearly one length are generated from together, padded at their start, which costs little more than one
    alone; but not where positions are turned by angles that depend on the longest of them."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        groups = [[i] for i in range(len(prompts))]
    else:
        groups = [[i for i, of in enumerate(prompts) if (len(of) > LONG) is is_long] for is_long in (False, True)]
    found: dict[int, tuple[list[int], float]] = {}
    for group in filter(None, groups):
        found |= zip(group, _generate(model, [prompts[i] for i in group], max_tokens), strict=True)
    return [found[i] for i in range(len(prompts))]


def _generate(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[list[int], float]]:
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    with torch.inference_mode(), one_thread():
        out = model.generate(
            torch.tensor([[0] * num + list(prompt) for num, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * num + [1] * (width - num) for num in padding]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack(out.logits).topk(2, dim=-1).values
    gaps = (top[..., 0] - top[..., 1]).amin(dim=0)
    return list(zip(out.sequences[:, width:].tolist(), gaps.tolist(), strict=True))


@contextmanager
def one_thread() -> Generator[None]:
    """Two need many times as long for so small a model where other processes compute, too: each waits for the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_prompts(seed: int, lengths: Sequence[int], vocab_size: int = 500) -> list[list[int]]:
    """Return a prompt of each length, never holding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def untied_prompts(
    path: Path, seed: int, lengths: Sequence[int], max_tokens: int, gap: float = 1e-4
) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy reference) of each length, by the first seed from `seed` on whose smallest top-two gap exceeds
    `gap`: ties are excluded exactly, and the comparison may be strict."""
    model = reference_model(path)
    found: dict[int, tuple[list[int], list[int]]] = {}
    for attempt in range(50):
        prompts = {
            i: random_prompts(seed + 1000 * i + attempt, [length])[0]
            for i, length in enumerate(lengths)
            if i not in found
        }
        answers = _greedy(model, list(prompts.values()), max_tokens)
        for (i, prompt), (tokens, smallest) in zip(prompts.items(), answers, strict=True):
            if smallest > gap:
                found[i] = prompt, tokens
        if len(found) == len(lengths):
            return [found[i] for i in range(len(lengths))]
    raise AssertionError(f"no prompts without a tie of {[n for i, n in enumerate(lengths) if i not in found]} tokens")
