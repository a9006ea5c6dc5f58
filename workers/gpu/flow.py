"""A forward pass over T tokens, cut at its attention: the pieces between are graphs where T is a bucket.

    tokens ─> piece 0 ─> q ─> attend 0 ─> attended ─> piece 1 ─> q ─> ... ─> piece L ─> hidden

Piece i ends layer i - 1 and begins layer i. What a graph reads and writes has to stay where it is, so that its flow is
cut out of one that stays; any other takes new memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.paged_batch import PagedBatch
from ..kv_cache import KVCache
from ..models.attention import output
from ..models.decoder import Decoder, attend, enter, feed_forward, leave, queries
from ..models.rope import Ropes


@dataclass(slots=True, eq=False)
class Flow:
    """T tokens; those beyond a batch's are idle: they are stored nowhere, and nobody reads what becomes of them."""

    tokens: Tensor  # [T] int64
    cos_sin: Tensor  # [T, A] float32: of each of ModelSpec.ropes, side by side
    slots: Tensor  # [T] int64, -1: idle
    residual: Tensor  # [T, H]
    q: Tensor  # [T, N, D]
    attended: Tensor  # [T, N, V]
    hidden: Tensor  # [T, H]: in the end
    is_static: bool

    @classmethod
    def static(cls, decoder: Decoder, num_tokens: int, device: torch.device) -> "Flow":
        """For graphs. Raises torch.OutOfMemoryError."""
        spec, embed = decoder.layers[0].spec.attention, decoder.weights.embed
        q, attended = ((num_tokens, spec.num_heads, dim) for dim in (spec.q_dim, spec.value_dim))
        hidden, num_angles = (num_tokens, embed.shape[1]), sum(decoder.rope_dims)
        return cls(
            torch.zeros(num_tokens, dtype=torch.int64, device=device),
            torch.zeros(num_tokens, num_angles, dtype=torch.float32, device=device),
            torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            *(torch.zeros(shape, dtype=embed.dtype, device=device) for shape in (hidden, q, attended, hidden)),
            is_static=True,
        )

    @classmethod
    def passing(cls, tokens: Tensor, cos_sin: Tensor, slots: Tensor) -> "Flow":
        """For one step alone."""
        none = cos_sin.new_empty(0)
        return cls(tokens, cos_sin, slots, none, none, none, none, is_static=False)

    def first(self, num_tokens: int) -> "Flow":
        """The same memory, as far as so many tokens need it."""
        parts = (self.tokens, self.cos_sin, self.slots, self.residual, self.q, self.attended, self.hidden)
        return Flow(*(part[:num_tokens] for part in parts), is_static=self.is_static)


@dataclass(frozen=True, slots=True)
class Pieces:
    decoder: Decoder
    cache: KVCache

    @property
    def num_layers(self) -> int:
        return self.decoder.spec.num_layers

    def angles(self, cos_sin: Tensor) -> Ropes:
        """Of each of ModelSpec.ropes, where they are side by side."""
        return cos_sin.split(self.decoder.rope_dims, dim=1)

    def compute(self, flow: Flow, index: int) -> None:
        """Device work, which may be captured: piece `index` of num_layers + 1."""
        decoder, added = self.decoder, None
        if index:
            added = self._end_layer(flow, index - 1)
        else:
            flow.residual = _put(flow, flow.residual, decoder.embed(flow.tokens))
        is_last = index == self.num_layers
        norm = decoder.weights.norm if is_last else decoder.layers[index].weights.input_norm
        hidden = enter(added, flow.residual, norm, decoder.spec.rms_norm_eps)
        if is_last:
            flow.hidden = _put(flow, flow.hidden, hidden)
            return
        layer, cos_sin = decoder.layers[index], self.angles(flow.cos_sin)
        q = queries(layer, hidden, self.cache.layer(layer.kv_id), cos_sin, flow.slots, decoder.group)
        flow.q = _put(flow, flow.q, q)

    def attend(self, flow: Flow, index: int, paged: PagedBatch, num_tokens: int) -> None:
        """Device work, never captured: of the tokens that are not idle."""
        layer = self.decoder.layers[index]
        attended = attend(layer, flow.q[:num_tokens], self.cache.layer(layer.kv_id), paged)
        if flow.is_static:
            flow.attended[:num_tokens].copy_(attended)
        else:
            flow.attended = attended

    def _end_layer(self, flow: Flow, index: int) -> Tensor:
        """What it adds to the residual."""
        layer, group = self.decoder.layers[index], self.decoder.group
        weights, eps = layer.weights, layer.eps
        hidden = leave(output(weights, flow.attended, group), weights.attention_out_norm, eps)
        entering = enter(hidden, flow.residual, weights.mlp_norm, eps)
        hidden = feed_forward(layer, entering, flow.residual, flow.slots, group)
        return leave(hidden, weights.mlp_out_norm, eps)


def _put(flow: Flow, place: Tensor, value: Tensor) -> Tensor:
    return place.copy_(value) if flow.is_static else value
