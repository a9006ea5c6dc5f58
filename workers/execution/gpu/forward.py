"""A forward pass over T tokens, cut at its attention: the pieces between are graphs where T is a bucket.

    tokens ─> piece 0 ─> q ─> attend 0 ─> attended ─> piece 1 ─> q ─> ... ─> piece L ─> hidden

Piece i ends layer i - 1 and begins layer i. What a graph reads and writes has to stay where it is, so that
the buffers of a graph are views of buffers that stay; others are new memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.attention.paged_batch import PagedBatch
from ...device.kv_cache import KVCache
from ...models.families.spec import AttentionSpec, LatentSpec
from ...models.layers.attention import output
from ...models.layers.decoder import Decoder
from ...models.layers.hidden_states import HiddenStates
from ...models.layers.layer import attend_in, end, enter, feed_forward, leave, queries
from ...models.layers.rope import Ropes
from ...models.layers.sparse import SparseDecodes
from ...models.layers.tail import TailStep
from ...models.layers.turns import InTurns, finished


@dataclass(slots=True, eq=False)
class ForwardBuffers:
    """T tokens; those beyond a batch's are idle: they are stored nowhere, and nobody reads what becomes of them."""

    tokens: Tensor  # [T] int64
    cos_sin: Tensor  # [T, A] float32: of each of ModelSpec.ropes, side by side
    slots: Tensor  # [T] int64, -1: idle
    residual: Tensor  # [T, H]
    q: Tensor  # [T, N, D]; if static: [T, the most numbers of any layer]
    attended: Tensor  # [T, N, V]; the same
    hidden: Tensor  # [T, H]: in the end
    given: Tensor | None  # [T, layers, P]: see Decoder.token_inputs
    is_static: bool
    taken: Tensor | None = None  # [T, A]: what a draft head is given, see hidden_states.py

    @classmethod
    def static(cls, decoder: Decoder, num_tokens: int, device: torch.device) -> "ForwardBuffers":
        """Make buffers for graphs. Raises torch.OutOfMemoryError."""
        specs, embed = [layer.spec.attention for layer in decoder.layers], decoder.weights.embed
        widths = zip(*((of.num_heads * of.q_dim, of.num_heads * of.value_dim) for of in specs), strict=True)
        q, attended = ((num_tokens, max(width)) for width in widths)
        hidden, num_angles = (num_tokens, embed.shape[1]), sum(decoder.rope_dims)
        own = decoder.spec.token_input
        given = None if own is None else embed.new_zeros(num_tokens, decoder.spec.num_layers, own.dim)
        return cls(
            torch.zeros(num_tokens, dtype=torch.int64, device=device),
            torch.zeros(num_tokens, num_angles, dtype=torch.float32, device=device),
            torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            *(torch.zeros(shape, dtype=embed.dtype, device=device) for shape in (hidden, q, attended, hidden)),
            given=given,
            is_static=True,
        )

    @classmethod
    def passing(cls, tokens: Tensor, cos_sin: Tensor, slots: Tensor) -> "ForwardBuffers":
        """Make buffers for one step alone."""
        none = cos_sin.new_empty(0)
        return cls(tokens, cos_sin, slots, none, none, none, none, None, is_static=False)

    def first(self, num_tokens: int) -> "ForwardBuffers":
        """Return the part of this memory that so many tokens need."""
        parts = (self.tokens, self.cos_sin, self.slots, self.residual, self.q, self.attended, self.hidden)
        given, taken = (None if part is None else part[:num_tokens] for part in (self.given, self.taken))
        firsts = (part[:num_tokens] for part in parts)
        return ForwardBuffers(*firsts, given=given, is_static=self.is_static, taken=taken)

    def go_on_with(self, rows: Tensor, of: "ForwardBuffers") -> None:
        """Take over the remaining work on some tokens of other buffers that are not static, from a layer's attention
        on; this object was made for them. rows: [n] int32 or int64."""
        self.residual, self.q = (part.index_select(0, rows) for part in (of.residual, of.q))
        self.given = None if of.given is None else of.given.index_select(0, rows)

    def queries(self, of: AttentionSpec | LatentSpec) -> Tensor:
        """A layer's, [T, N, D]."""
        return self._in_heads(self.q, of.num_heads, of.q_dim)

    def outputs(self, of: AttentionSpec | LatentSpec) -> Tensor:
        """Outputs of a layer's attention, [T, N, V]."""
        return self._in_heads(self.attended, of.num_heads, of.value_dim)

    def _in_heads(self, numbers: Tensor, num_heads: int, dim: int) -> Tensor:
        """Contiguous, whatever other layers need."""
        if not self.is_static:
            return numbers
        return numbers.view(-1)[: len(numbers) * num_heads * dim].view(len(numbers), num_heads, dim)


@dataclass(frozen=True, slots=True)
class ForwardPieces:
    decoder: Decoder
    cache: KVCache
    taken: HiddenStates | None = None  # what a draft head is given of each token

    def new_taken(self, num_tokens: int) -> Tensor | None:
        """Make memory for what is taken of so many tokens, [T, A]."""
        if self.taken is None:
            return None
        embed = self.decoder.weights.embed
        return embed.new_zeros(num_tokens, self.taken.num_parts * self.decoder.spec.hidden_size)

    @property
    def num_layers(self) -> int:
        return self.decoder.spec.num_layers

    def through(self, num_stored: int) -> int:
        """The layers through which so many of the cache's are stored."""
        storing = [i for i, layer in enumerate(self.decoder.layers) if layer.spec.kv_from is None]
        return storing[num_stored - 1] + 1

    def angles(self, cos_sin: Tensor) -> Ropes:
        """Split the columns of `cos_sin` by rope, in the order of ModelSpec.ropes."""
        return cos_sin.split(self.decoder.rope_dims, dim=1)

    def compute(self, buffers: ForwardBuffers, index: int) -> None:
        """Device work, which may be captured: piece `index` of num_layers + 1."""
        finished(self.compute_in_turns(buffers, index))

    def compute_in_turns(self, buffers: ForwardBuffers, index: int) -> InTurns[None]:
        """Do what `compute` does."""
        decoder, added = self.decoder, None
        if index:
            added = yield from self._end_layer(buffers, index - 1)
        else:
            self._begin(buffers)
        is_last = index == self.num_layers
        norm = decoder.weights.norm if is_last else decoder.layers[index].weights.input_norm
        hidden = enter(added, buffers.residual, norm, decoder.spec.rms_norm_eps)
        if self.taken is not None and buffers.taken is not None:
            self.taken.copy(index, buffers.residual, hidden if is_last else None, buffers.taken)
        if is_last:
            buffers.hidden = _put(buffers, buffers.hidden, hidden)
            return
        layer, cos_sin = decoder.layers[index], self.angles(buffers.cos_sin)
        q = queries(layer, hidden, self.cache.parts(layer.kv_id), cos_sin, buffers.slots, decoder.group)
        if buffers.is_static:
            buffers.queries(layer.spec.attention).copy_(q)
        else:
            buffers.q = q

    def attend(
        self,
        buffers: ForwardBuffers,
        index: int,
        paged: PagedBatch,
        num_tokens: int,
        sparse: SparseDecodes | None = None,
        tail: TailStep | None = None,
    ) -> None:
        """Device work, never captured: of the tokens that are not idle."""
        layer = self.decoder.layers[index]
        spec = layer.spec.attention
        attended = attend_in(layer, buffers.queries(spec)[:num_tokens], self.cache, paged, sparse, tail)
        if buffers.is_static:
            buffers.outputs(spec)[:num_tokens].copy_(attended)
        else:
            buffers.attended = attended

    def _begin(self, buffers: ForwardBuffers) -> None:
        embedded = self.decoder.embed(buffers.tokens)
        given = self.decoder.token_inputs(buffers.tokens, embedded)
        buffers.given = None if given is None else _put(buffers, buffers.given, given)
        buffers.residual = _put(buffers, buffers.residual, embedded)

    def _end_layer(self, buffers: ForwardBuffers, index: int) -> InTurns[Tensor | None]:
        """Compute the end of a layer; give what is still to be added to the residual."""
        layer, group = self.decoder.layers[index], self.decoder.group
        weights, eps = layer.weights, layer.eps
        hidden = output(weights, buffers.outputs(layer.spec.attention), group)
        hidden = leave(hidden, weights.attention_out_norm, eps)
        entering = enter(hidden, buffers.residual, weights.mlp_norm, eps)
        hidden = yield from feed_forward(layer, entering, buffers.residual, buffers.slots, group)
        hidden = leave(hidden, weights.mlp_out_norm, eps)
        return end(layer, hidden, buffers.residual, None if buffers.given is None else buffers.given[:, index])


def _put(buffers: ForwardBuffers, place: Tensor | None, value: Tensor) -> Tensor:
    if not buffers.is_static:
        return value
    assert place is not None
    return place.copy_(value)
