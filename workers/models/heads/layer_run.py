"""The layers of a head as run_layers takes them. Knows no head."""

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.weights import LayerWeights
from ..families.spec import ModelSpec
from ..layers.layer import Layer, layers_of


def head_layers(decoder: ModelSpec, weights: Sequence[LayerWeights], first_kv_layer: int) -> list[Layer]:
    """first_kv_layer: which layer of the cache is the first one's."""
    layers = layers_of(decoder, weights, None, {})
    return [replace(layer, kv_id=first_kv_layer + layer.kv_id) for layer in layers]
