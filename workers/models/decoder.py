"""The decoder that a ModelSpec describes. Knows tensors; knows neither sequences nor sampling."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding, linear

from ...kernels.rms_norm import add_rms_norm, rms_norm
from ...kernels.silu_mul import silu_mul
from ..kv_cache import KVCache
from .attention import StepMeta, attention
from .spec import ModelSpec
from .weights import DecoderWeights


@dataclass(frozen=True, slots=True)
class Decoder:
    spec: ModelSpec
    weights: DecoderWeights

    def forward(
        self, token_ids: Tensor, cache: KVCache, meta: StepMeta, stored: Callable[[int], object] = lambda _: None
    ) -> Tensor:
        """token_ids: [T] int64. Stores their KV in `cache`; returns the final hidden states [T, H].

        `stored` is told how many layers were asked to store theirs, after each.
        """
        spec, eps = self.spec, self.spec.rms_norm_eps
        residual = embedding(token_ids, self.weights.embed)
        hidden = rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for i, layer in enumerate(self.weights.layers):
            if i:
                hidden = add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = attention(spec, layer, hidden, cache.layer(i), meta)
            stored(i + 1)
            hidden = add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = silu_mul(linear(hidden, layer.gate_up, layer.gate_up_bias))
            hidden = linear(hidden, layer.down, layer.down_bias)
        return add_rms_norm(hidden, residual, self.weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns [R, vocab] float32."""
        return linear(hidden, self.weights.lm_head).float()
