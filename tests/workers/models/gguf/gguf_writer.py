"""GGUF files of checkpoints, written as llama.cpp's converter does, with the gguf package: its names of tensors, its
writer, and its quantisation where it has one; other types from random blocks. Beside each, a plain checkpoint of the
weights that the package makes of the file's numbers."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

NAMES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
}
KEPT = ("norm", "bias", "sinks", "ffn_gate_inp", "rope_f")  # parts of names of what is never quantised
Choose = Callable[[str], Type]
QUANTISED = {Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.MXFP4}


def mixed(name: str) -> Type:
    """Types of 32 numbers a block, and floats, in turn."""
    each = [Type.Q8_0, Type.Q4_0, Type.F16, Type.Q5_1, Type.BF16, Type.MXFP4, Type.Q5_0, Type.Q4_1, Type.IQ4_NL]
    return each[sum(name.encode()) % len(each)]


def write_gguf(
    source: Path,
    folder: Path,
    choose: Choose = mixed,
    *,
    change: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    older: bool = False,
) -> tuple[Path, Path]:
    """Write the checkpoint in `source` as a GGUF file and as a plain checkpoint of what that means; return both.
    older: each expert's weights are a tensor, and what makes KV of latents is one, as in older files."""
    config = json.loads((source / "config.json").read_text())
    arch, plain = NAMES[config["architectures"][0]], folder / "plain"
    shutil.copytree(source, plain)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, arch, config, older=older)
    change(writer)
    means: dict[str, Tensor] = {}
    for name, (tensor, undo) in converted(arch, config, load_file(source / "model.safetensors"), older=older).items():
        is_kept = tensor.ndim == 1 or any(part in name for part in KEPT)
        numbers, meant = quantised(tensor, Type.F32 if is_kept else choose(name), seed=sum(name.encode()))
        if older and "_exps" in name:
            for i, of in enumerate(numbers[0]):
                writer.add_tensor(name.replace("_exps", f".{i}"), of, raw_dtype=numbers[1])
        else:
            writer.add_tensor(name, numbers[0], raw_dtype=numbers[1])
        means |= undo(meant)
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    save_file({name: tensor.contiguous() for name, tensor in means.items()}, plain / "model.safetensors")
    return path, plain


def quantised(tensor: Tensor, type_: Type, seed: int) -> tuple[tuple[np.ndarray, Type], Tensor]:
    """Return a tensor's bytes and type, and what they mean."""
    numbers = tensor.float().numpy()
    if type_ == Type.F32:
        return (numbers, type_), tensor.float()
    raw = gguf.quantize(numbers, type_) if type_ in QUANTISED else random_blocks(numbers.shape, type_, seed)
    return (raw, type_), torch.from_numpy(gguf.dequantize(raw, type_).reshape(numbers.shape).copy())


def random_blocks(shape: tuple[int, ...], type_: Type, seed: int) -> np.ndarray:
    """Random bytes, but that half-precision scales are small numbers: every other byte of a block may be anything."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), dtype=np.uint8)
    for start in SCALES[type_]:
        scales = generator.uniform(1e-4, 1e-3, raw.shape[:-1]).astype(np.float16)
        raw[..., start : start + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


SCALES: dict[Type, tuple[int, ...]] = {  # bytes of a block at which its half-precision numbers begin
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.MXFP4: (),
}


def add_metadata(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], *, older: bool) -> None:
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if arch == "deepseek2" and not older else config["num_key_value_heads"])
    if arch == "deepseek2":
        add_latent(writer, config, older=older)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if "original_max_position_embeddings" in full:
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if arch in ("gemma2", "gemma3", "gpt-oss", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if arch in ("gemma2", "gemma3"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([of == "sliding_attention" for of in config["layer_types"]])
    if arch == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(rope.get("factor", 1.0)) / math.log(original)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_eos_token_id(0)


def add_latent(writer: gguf.GGUFWriter, config: dict[str, Any], *, older: bool) -> None:
    rope_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope_dim)
    key, value = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
    writer.add_key_length(key if older else rank + rope_dim)
    writer.add_value_length(value if older else rank)
    if not older:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    is_v3 = config["architectures"] == ["DeepseekV3ForCausalLM"]
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if "mscale_all_dim" in config["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{of}.weight": rope[f"{of}_factor"] for of in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim, original = config["head_dim"], rope["original_max_position_embeddings"]
    low_factor, high_factor = rope["low_freq_factor"], rope["high_freq_factor"]
    low, high = original / low_factor, original / high_factor
    found: list[float] = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (original / wavelength - low_factor) / (high_factor - low_factor)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(1.0 if wavelength < high else rope["factor"] if wavelength > low else between)
    return {"rope_freqs.weight": found}


Undo = Callable[[Tensor], dict[str, Tensor]]


def converted(
    arch: str, config: dict[str, Any], tensors: dict[str, Tensor], *, older: bool
) -> dict[str, tuple[Tensor, Undo]]:
    """Return the converter's tensors by llama.cpp's names, each with what makes the checkpoint's of it."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found: dict[str, tuple[Tensor, Undo]] = {}
    stacked: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if ".experts." in name and arch == "gpt-oss":
            found |= gpt_oss_experts(name, tensor)
            continue
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            expert, _, part = after.partition(".")
            stacked.setdefault(f"{before}.experts.{part}", {})[int(expert)] = (name, tensor)
            continue
        if name.endswith("kv_b_proj.weight") and not older:
            found |= latent_heads(name, tensor, config)
            continue
        name_of_file = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stem, _, suffix = name_of_file.rpartition(".")
        own, change, undo = f"{names.get_name(name_of_file, ('.weight', '.bias')) or names.get_name(stem)}", same, same
        if stem.endswith("sinks") or name.endswith("sinks"):
            own, suffix = f"blk.{name.split('.')[2]}.attn_sinks", "weight"
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            change, undo = permutation(config["head_dim"])
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            change, undo = (lambda t: t + 1), (lambda t: t - 1)
        found[f"{own.removesuffix('.' + suffix)}.{suffix}"] = (change(tensor), lambda t, n=name, u=undo: {n: u(t)})
    for name, of in stacked.items():
        own = names.get_name(name.replace(".weight", ""))
        tensor = torch.stack([of[i][1] for i in range(len(of))])
        each = [of[i][0] for i in range(len(of))]
        found[f"{own}.weight"] = (tensor, lambda t, each=each: dict(zip(each, t.unbind(), strict=True)))
    return found


def same(tensor: Tensor) -> Tensor:
    return tensor


def permutation(head_dim: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """llama.cpp's `permute` of the rows of queries and keys, and its inverse."""

    def turned(tensor: Tensor, *sizes: int) -> Tensor:
        return tensor.reshape(-1, *sizes, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    half = head_dim // 2
    return (lambda t: turned(t, 2, half)), (lambda t: turned(t, half, 2))


def latent_heads(name: str, tensor: Tensor, config: dict[str, Any]) -> dict[str, tuple[Tensor, Undo]]:
    """What makes keys and values of latents, as two tensors by head; that of keys has its axes turned."""
    layer, heads = name.split(".")[2], config["num_attention_heads"]
    keys, values = tensor.unflatten(0, (heads, -1)).split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    halves: dict[str, Tensor] = {}

    def collect(part: str, meant: Tensor) -> dict[str, Tensor]:
        halves[part] = meant
        if len(halves) < 2:
            return {}
        return {name: torch.cat((halves["k"].mT, halves["v"]), dim=1).flatten(0, 1)}

    return {
        f"blk.{layer}.attn_{part}_b.weight": (of.contiguous(), lambda t, part=part: collect(part, t))
        for part, of in (("k", keys.mT), ("v", values))
    }


def gpt_oss_experts(name: str, tensor: Tensor) -> dict[str, tuple[Tensor, Undo]]:
    """Gate and up, which are one tensor with outputs in turn, are two; inputs come last."""
    layer, is_bias = name.split(".")[2], name.endswith("bias")
    suffix = "bias" if is_bias else "weight"
    outputs_first = tensor if is_bias else tensor.mT
    if "down" in name:
        undo = same if is_bias else (lambda t: t.mT)
        return {f"blk.{layer}.ffn_down_exps.{suffix}": (outputs_first.contiguous(), lambda t: {name: undo(t)})}
    halves: dict[str, Tensor] = {}

    def collect(part: str, meant: Tensor) -> dict[str, Tensor]:
        halves[part] = meant
        if len(halves) < 2:
            return {}
        both = torch.stack((halves["gate"], halves["up"]), dim=2).flatten(1, 2)
        return {name: both if is_bias else both.mT}

    return {
        f"blk.{layer}.ffn_{part}_exps.{suffix}": (
            outputs_first[:, start::2].contiguous(),
            lambda t, part=part: collect(part, t),
        )
        for start, part in enumerate(("gate", "up"))
    }
