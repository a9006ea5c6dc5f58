"""Tensors of an MTP module, under all names that are published (heads/mtp.py lists them), by name and shape. No
torch."""

import re
from collections.abc import Mapping
from pathlib import Path

from ...common.errors import CheckpointError
from ..families.spec import ModelSpec
from ..plan.tensor_names import own_name as name_of_target
from .head_fields import Fields, layer_fields, matrix, norm

OUTSIDE = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
QWEN3_NEXT: Mapping[str, str] = {
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.fc": "eh_proj",
    "mtp.norm": "shared_head.norm",
}
SPECULATORS: Mapping[str, str] = {
    "mtp_layers.0.token_layernorm": "enorm",
    "mtp_layers.0.hidden_layernorm": "hnorm",
    "mtp_layers.0.input_proj": "eh_proj",
    "mtp_layers.0.final_layernorm": "shared_head.norm",
}
IN_LAYER = re.compile(r"(mtp\.layers\.0|mtp_layers\.0)\.(.+)")


def mtp_name(target: ModelSpec, stored: str) -> str | None:
    """Name a tensor of a module, its layer as a decoder's first; None for all others."""
    stem, dot, kind = stored.rpartition(".")
    if (renamed := QWEN3_NEXT.get(stem) or SPECULATORS.get(stem)) is not None:
        return f"{renamed}{dot}{kind}"
    if (found := IN_LAYER.fullmatch(stored)) is not None:
        return f"model.layers.0.{found[2]}"
    name, prefix = name_of_target(target, stored), f"model.layers.{target.num_layers}."
    if name is None or not name.startswith(prefix) or name.endswith("rotary_emb.inv_freq"):
        return None
    own = name.removeprefix(prefix)
    return own if own.startswith(OUTSIDE) else f"model.layers.0.{own}"


def no_module(folder: Path, target: ModelSpec) -> CheckpointError:
    """Error of a folder none of whose tensors is a module's eh_proj."""
    return CheckpointError(
        f"{folder} holds no MTP module: model.layers.{target.num_layers}.eh_proj.weight, mtp.fc.weight or "
        "mtp_layers.0.input_proj.weight must be in one of its files"
    )


def mtp_fields(decoder: ModelSpec) -> tuple[list[Fields], Fields]:
    """Return the pieces of the layer, and of what is outside it. decoder: the module's layer."""
    hidden, vocab = decoder.hidden_size, decoder.vocab_size
    return layer_fields(decoder), {
        "embed": matrix("embed_tokens", vocab, hidden),
        "embed_norm": norm(decoder, "enorm"),
        "hidden_norm": norm(decoder, "hnorm"),
        "joined": matrix("eh_proj", hidden, 2 * hidden),
        "norm": norm(decoder, "shared_head.norm"),
        "lm_head": matrix("shared_head.head", vocab, hidden),
    }
