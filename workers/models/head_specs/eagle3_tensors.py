"""Tensors of an EAGLE-3 head, in both published formats, by name and shape. No torch."""

import re
from dataclasses import replace

from .eagle3_config import Eagle3Config
from .head_fields import Fields, layer_fields, matrix, norm

MAPS = ("d2t", "t2d")
# Of training alone (speculators), and tables of angles.
UNUSED = re.compile(r"verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")


def eagle3_name(stored: str) -> str | None:
    """Name a tensor of either format; layers as a decoder's."""
    if UNUSED.fullmatch(stored):
        return None
    name = stored.replace("midlayer.", "layers.0.", 1) if stored.startswith("midlayer.") else stored
    return f"model.{name}" if name.startswith("layers.") else name


def eagle3_fields(config: Eagle3Config) -> tuple[list[Fields], Fields]:
    """Return the pieces of each layer, and of what is outside the layers."""
    layers = layer_fields(config.head.decoder)
    _widen(layers[0], config.head.decoder.hidden_size)
    return layers, _outer_fields(config)


def _outer_fields(config: Eagle3Config) -> Fields:
    head, decoder = config.head, config.head.decoder
    hidden, aux = decoder.hidden_size, head.aux_size
    fields = {
        "fc": matrix("fc", hidden, aux),
        "embed": matrix("embed_tokens", decoder.vocab_size, hidden),
        "lm_head": matrix("lm_head", head.draft_vocab_size, hidden),
        "norm": norm(decoder, "norm"),
        "embed_norm": norm(decoder, "model.layers.0.input_layernorm"),
        "hidden_norm": norm(decoder, "model.layers.0.hidden_norm"),
    }
    if config.aux_norm == "all":
        fields["aux_norm"] = norm(decoder, "input_norm", aux)
    if config.aux_norm == "each":
        for i in range(len(head.hidden_layers)):
            fields[f"aux_norm{i:03}"] = norm(decoder, f"fc_norm.{i}", head.target_hidden_size)
    return fields


def _widen(first: Fields, hidden_size: int) -> None:
    """Make the first layer's projections those of an embedding and a hidden state side by side."""
    first["qkv"] = tuple(replace(piece, shape=(piece.shape[0], 2 * hidden_size)) for piece in first["qkv"])
    del first["input_norm"]
