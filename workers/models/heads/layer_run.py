"""The layers of a head as run_layers takes them, and the pieces of a head's tensors. Knows no head."""

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.weights import LayerWeights
from ..families.spec import ModelSpec
from ..layers.decoder import Layer, layers_of
from ..plan.tensor_names import Piece, Pieces, layer_tensors
from .head_files import Fields


def head_layers(decoder: ModelSpec, weights: Sequence[LayerWeights], first_kv_layer: int) -> list[Layer]:
    """first_kv_layer: which layer of the cache is the first one's."""
    layers = layers_of(decoder, weights, None, {})
    return [replace(layer, kv_id=first_kv_layer + layer.kv_id) for layer in layers]


def head_fields(decoder: ModelSpec) -> list[Fields]:
    """Return the pieces of each layer."""
    return [layer_tensors(decoder, i) for i in range(decoder.num_layers)]


def norm(decoder: ModelSpec, name: str, size: int | None = None) -> Pieces:
    """Return the piece of an RMSNorm outside the layers, of `size` numbers, the hidden size if None."""
    shape = (decoder.hidden_size if size is None else size,)
    return (Piece(f"{name}.weight", shape, offset=decoder.norm_offset, is_wide=decoder.wide_norms),)


def matrix(name: str, rows: int, columns: int) -> Pieces:
    return (Piece(f"{name}.weight", (rows, columns)),)
