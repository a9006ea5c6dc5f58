"""Random draft heads, as SpecForge, speculators and checkpoints with MTP layers have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
# For the llama of tests/support/checkpoints.py: hidden size 64, 500 tokens, 3 layers.
LLAMA_LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20_000.0,
}
SPECFORGE, SPECULATORS = "specforge", "speculators"
# Names of an MTP module's tensors: of those that have other ones than in DeepSeek-V3, and the prefix of the rest.
MTP_NAMES: dict[str, tuple[dict[str, str], str]] = {
    "deepseek": ({}, "model.layers.{}."),
    "qwen3-next": (
        {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "shared_head.norm": "mtp.norm",
        },
        "mtp.layers.0.",
    ),
    SPECULATORS: (
        {
            "enorm": "mtp_layers.0.token_layernorm",
            "hnorm": "mtp_layers.0.hidden_layernorm",
            "eh_proj": "mtp_layers.0.input_proj",
            "shared_head.norm": "mtp_layers.0.final_layernorm",
        },
        "mtp_layers.0.",
    ),
}


def eagle3_config(form: str, *, layer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head in one of the two formats. layer: instead of fields of LLAMA_LAYER."""
    inner, ids = LLAMA_LAYER | (layer or {}), fields.pop("ids", [1, 2, 3])
    draft = {"draft_vocab_size": 120} | fields
    if form == SPECULATORS:
        kind = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        return kind | {"transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": ids} | draft
    own = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids], "use_aux_hidden_state": True}
    return inner | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": own} | draft


def make_eagle3(folder: Path, config: dict[str, Any], seed: int, *, own_embed: bool = True) -> Path:
    """Save a random float32 EAGLE-3 head of `config` in `folder`; returns it."""
    inner: dict[str, Any] = config.get("transformer_layer_config", config)
    hidden, vocab, draft = inner["hidden_size"], inner["vocab_size"], config["draft_vocab_size"]
    target, random = config.get("target_hidden_size", hidden), _Random(seed)
    first = "layers.0." if "transformer_layer_config" in config else "midlayer."
    tensors = {"fc.weight": random.matrix(hidden, 3 * target), "norm.weight": random.norm(hidden)}
    tensors |= {"lm_head.weight": random.matrix(draft, hidden)}
    if own_embed:
        tensors["embed_tokens.weight"] = random.matrix(vocab, hidden) * 8
    for i in range(inner["num_hidden_layers"]):
        prefix = first if i == 0 else f"layers.{i}."
        tensors |= random.gqa_layer(inner, prefix, 2 * hidden if i == 0 else hidden)
    tensors[f"{first}hidden_norm.weight"] = random.norm(hidden)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(3 * target)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": random.norm(target) for i in range(3)}
    return save_head(folder, config, tensors | random.maps(draft, vocab))


def make_mtp(folder: Path, target: Path, names: str, seed: int, *, alone: bool, **fields: Any) -> Path:
    """Save a random float32 MTP module for the checkpoint `target`, its layer like the last of that; returns `folder`.
    names: a key of MTP_NAMES. alone: without the target's tensors; beside them, a module as DeepSeek's has embeddings
    and a head, too. fields: of config.json."""
    config, stored = read_head(target)
    num_layers, hidden, random = config["num_hidden_layers"], config["hidden_size"], _Random(seed)
    last = f"model.layers.{num_layers - 1}."
    own = {
        "enorm.weight": random.norm(hidden),
        "hnorm.weight": random.norm(hidden),
        "eh_proj.weight": random.matrix(hidden, 2 * hidden),
        "shared_head.norm.weight": random.norm(hidden),
    }
    own |= {n.removeprefix(last): random.like(n, t) for n, t in stored.items() if n.startswith(last)}
    if not alone and names == "deepseek":
        own["embed_tokens.weight"] = random.matrix(config["vocab_size"], hidden) * 8
        own["shared_head.head.weight"] = random.matrix(config["vocab_size"], hidden)
    outside, prefix = MTP_NAMES[names]
    prefix = prefix.format(num_layers)
    tensors = {outside.get(name.removesuffix(".weight"), prefix + name): tensor for name, tensor in own.items()}
    tensors = {n if n.endswith(("weight", "bias")) else f"{n}.weight": tensor for n, tensor in tensors.items()}
    if names == SPECULATORS:
        config = {"speculators_model_type": "mtp", "transformer_layer_config": config, "num_nextn_predict_layers": 1}
    elif names == "deepseek":
        config |= {"num_nextn_predict_layers": 1}
    return save_head(folder, config | fields, tensors if alone else tensors | stored)


def save_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read_head(folder: Path) -> tuple[dict[str, Any], Tensors]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class _Random:
    """Random tensors of a layer."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) * columns**-0.5

    def norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._generator)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, with values that suit its name."""
        if tensor.dim() == 2:
            return self.matrix(*tensor.shape)
        return self.norm(len(tensor)) - (1 if name.endswith("bias") else 0)

    def maps(self, draft: int, vocab: int) -> Tensors:
        """d2t and t2d of a random part of the vocabulary."""
        ids = torch.randperm(vocab, generator=self._generator)[:draft].sort().values
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[ids] = True
        return {"d2t": ids - torch.arange(draft), "t2d": t2d}

    def gqa_layer(self, config: dict[str, Any], prefix: str, inputs: int) -> Tensors:
        """Grouped-query attention over `inputs` numbers, and an MLP."""
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        tensors = {
            "self_attn.q_proj.weight": self.matrix(heads * dim, inputs),
            "self_attn.k_proj.weight": self.matrix(kv_heads * dim, inputs),
            "self_attn.v_proj.weight": self.matrix(kv_heads * dim, inputs),
            "self_attn.o_proj.weight": self.matrix(hidden, heads * dim),
            "mlp.gate_proj.weight": self.matrix(inner, hidden),
            "mlp.up_proj.weight": self.matrix(inner, hidden),
            "mlp.down_proj.weight": self.matrix(hidden, inner),
            "input_layernorm.weight": self.norm(hidden),
            "post_attention_layernorm.weight": self.norm(hidden),
        }
        if config["model_type"] == "qwen3":
            tensors |= {f"self_attn.{of}_norm.weight": self.norm(dim) for of in "qk"}
        if config.get("attention_bias"):
            sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim, "o": hidden}
            tensors |= {f"self_attn.{of}_proj.bias": self.norm(size) - 1 for of, size in sizes.items()}
        return {prefix + name: tensor for name, tensor in tensors.items()}
