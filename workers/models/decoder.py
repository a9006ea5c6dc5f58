"""The decoder that a ModelSpec describes. Knows tensors; knows neither sequences nor sampling."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import embedding, linear

from ...kernels.gate_mul import silu_mul
from ...kernels.rms_norm import add_rms_norm, rms_norm
from ..kv_cache import KVCache
from ..parallel import Alone, Group
from .attention import StepMeta, attention
from .spec import ModelSpec
from .weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Decoder:
    """All of it on the only rank of a worker; on the first of several, all but the others' shares of the layers."""

    spec: ModelSpec  # of this rank's share
    weights: DecoderWeights
    group: Group = field(default_factory=Alone)

    def forward(
        self, token_ids: Tensor, cache: KVCache, meta: StepMeta, stored: Callable[[int], object] = lambda _: None
    ) -> Tensor:
        """token_ids: [T] int64. Stores their KV in `cache`; returns the final hidden states [T, H].

        `stored` is told how many layers were asked to store theirs, after each.
        """
        residual = embedding(token_ids, self.weights.embed)
        self.group.broadcast(residual)
        hidden = run_layers(self.spec, self.weights.layers, residual, cache, meta, self.group, stored)
        return add_rms_norm(hidden, residual, self.weights.norm, self.spec.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns [R, vocab] float32."""
        return linear(hidden, self.weights.lm_head).float()


def run_layers(
    spec: ModelSpec,
    layers: list[LayerWeights],
    residual: Tensor,
    cache: KVCache,
    meta: StepMeta,
    group: Group,
    stored: Callable[[int], object] = lambda _: None,
) -> Tensor:
    """residual: [T, H], overwritten. Returns what the last layer adds to it, [T, H]: the same on every rank.

    spec, layers, cache: of this rank's share. Once a layer's attention is done here, every rank has stored its KV.
    """
    eps = spec.rms_norm_eps
    hidden = rms_norm(residual, layers[0].input_norm, eps)
    for i, layer in enumerate(layers):
        if i:
            hidden = add_rms_norm(hidden, residual, layer.input_norm, eps)
        hidden = attention(spec, layer, hidden, cache.layer(i), meta, group)
        stored(i + 1)
        hidden = feed_forward(layer, add_rms_norm(hidden, residual, layer.post_norm, eps), group)
    return hidden


def feed_forward(layer: LayerWeights, hidden: Tensor, group: Group) -> Tensor:
    """hidden: [T, H]. Returns [T, H], the same on every rank."""
    hidden = silu_mul(linear(hidden, layer.gate_up, layer.gate_up_bias))
    return group.all_reduce(linear(hidden, layer.down, layer.down_bias))
