"""The decoder that a ModelSpec describes. Knows tensors; knows neither sequences nor sampling.

    residual = embedding
    each layer:  residual += attention(enter(residual));  residual += feed forward(enter(residual))
    logits = head(norm(residual))

What enters a part is normed where the spec has norms before it; what it adds, where it has them after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, tanh
from torch.nn.functional import embedding, linear

from ...kernels.paged_attention import paged_attention
from ...kernels.paged_batch import NO_OPTIONS, AttentionOptions
from ...kernels.rms_norm import add_rms_norm, rms_norm
from ...kernels.rope_kv_write import rope_kv_write
from ..kv_cache import KVCache
from ..parallel import Alone, Group
from ..step import Step
from .attention import StepMeta, options_of, output, project
from .dispatch import ExpertRanks
from .expert_placement import Placement
from .mla import latent_attention
from .mlp import mlp
from .moe import moe, no_expert_tokens
from .rope import Ropes
from .sharding import Share, vocabulary_sizes
from .spec import AttentionSpec, LatentSpec, LayerSpec, ModelSpec, MoeSpec
from .weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec  # of this rank's share
    weights: LayerWeights
    eps: float
    rope_id: int  # which of ModelSpec.ropes is its own
    options: AttentionOptions
    kv_id: int  # which of the cache's layers it reads, and stores into unless its spec says kv_from
    expert_tokens: Tensor | None = None  # [E] int64: what goes to each expert is added
    experts: ExpertRanks | None = None  # where this rank has some of them, whole

    @property
    def attention(self) -> AttentionSpec:
        assert isinstance(self.spec.attention, AttentionSpec)
        return self.spec.attention


def layers_of(
    spec: ModelSpec, weights: Sequence[LayerWeights], expert_tokens: Tensor | None, experts: Mapping[int, ExpertRanks]
) -> list[Layer]:
    """spec, weights: of this rank's share. expert_tokens: as moe.py's `no_expert_tokens` makes it; None: nobody
    counts. experts: by layer, of those that ranks hold whole."""
    layers: list[Layer] = []
    ids = zip(spec.rope_ids, spec.kv_ids, strict=True)
    for i, (of, own, (rope_id, kv_id)) in enumerate(zip(spec.layers, weights, ids, strict=True)):
        options = options_of(of.attention, own) if isinstance(of.attention, AttentionSpec) else NO_OPTIONS
        counts = None
        if expert_tokens is not None and isinstance(of.feed_forward, MoeSpec):
            counts = expert_tokens[i, : of.feed_forward.num_experts]
        layers.append(Layer(of, own, spec.rms_norm_eps, rope_id, options, kv_id, counts, experts.get(i)))
    return layers


class Decoder:
    """Of one rank. All ranks call the same, in the same order."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        group: Group | None = None,
        experts: Mapping[int, Placement] | None = None,
    ) -> None:
        """spec, weights: of this rank's share. experts: Share.experts."""
        self.spec, self.weights = spec, weights
        self.group = Alone() if group is None else group
        # All ranks send the same tokens to the same experts: the first alone counts.
        is_counted = self.group.rank == 0 and weights.embed.is_cpu  # who asks a GPU for counts holds it up
        self.expert_tokens = no_expert_tokens(spec, weights.embed.device) if is_counted else None
        ranks = {layer: ExpertRanks(self.group, placement) for layer, placement in (experts or {}).items()}
        self.layers = layers_of(spec, weights.layers, self.expert_tokens, ranks)

    def compute(
        self, step: Step, cache: KVCache, cos_sin: Ropes, stored: Callable[[int], object] = lambda _: None
    ) -> Tensor | None:
        """A step whose sequences with one new token come first. Returns the logits of its sampled rows, None where
        there are none. stored: see `forward`."""

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(cos_sin[0].device, non_blocking=True)

        meta = step.meta(cos_sin, cache.layout.block_size)
        hidden = self.forward(tensor(step.token_ids), cache, meta, stored)
        return self.logits(hidden[tensor(step.sampled)]) if len(step.sampled) else None

    def forward(
        self, token_ids: Tensor, cache: KVCache, meta: StepMeta, stored: Callable[[int], object] = lambda _: None
    ) -> Tensor:
        """token_ids: [T] int64. Stores their KV in `cache`; returns the final hidden states [T, H].

        `stored` is told how many of the cache's layers were asked to store theirs, after each.
        """
        residual = self.embed(token_ids)
        hidden = run_layers(self.layers, residual, cache, meta, self.group, stored)
        return add_rms_norm(hidden, residual, self.weights.norm, self.spec.rms_norm_eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64. Returns [T, H]."""
        group, scale = self.group, self.spec.embedding_scale
        is_whole = group.size == 1
        found = embedding(token_ids, self.weights.embed) if is_whole else group.all_reduce(self._embed_ours(token_ids))
        return found if scale == 1.0 else found * found.new_tensor(scale)  # the scale is rounded, as transformers does

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns [R, vocab] float32; what is returned on other ranks is nobody's."""
        own, group = self.own_logits(hidden).float(), self.group
        if group.size == 1:
            return own
        parts = group.gather(own, [(len(own), n) for n in vocabulary_sizes(self.spec.vocab_size, group.size)])
        return torch.cat(parts, dim=1) if parts else own

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns those of this rank's part of the vocabulary, [R, n], of hidden's dtype."""
        own, cap = linear(hidden, self.weights.lm_head), self.spec.logit_softcap
        return tanh(own / cap) * cap if cap else own

    def _embed_ours(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H]: zeros for tokens of which other ranks have the embedding."""
        table, group = self.weights.embed, self.group
        local = token_ids - Share(group.rank, group.size).vocabulary(self.spec.vocab_size).start
        is_others = (local < 0) | (local >= len(table))
        return embedding(local.masked_fill(is_others, 0), table).masked_fill_(is_others[:, None], 0)


def run_layers(
    layers: Sequence[Layer],
    residual: Tensor,
    cache: KVCache,
    meta: StepMeta,
    group: Group,
    stored: Callable[[int], object] = lambda _: None,
) -> Tensor:
    """residual: [T, H], overwritten. Returns what the last layer adds to it, [T, H]: the same on every rank.

    layers, cache: of this rank's share. Once a layer's attention is done here, every rank has stored its KV.
    """
    hidden: Tensor | None = None
    for layer in layers:
        weights, kv = layer.weights, cache.layer(layer.kv_id)
        hidden = enter(hidden, residual, weights.input_norm, layer.eps)
        hidden = output(weights, attend(layer, hidden, kv, meta, group), group)
        if layer.spec.kv_from is None:
            stored(layer.kv_id + 1)
        hidden = leave(hidden, weights.attention_out_norm, layer.eps)
        hidden = feed_forward(layer, enter(hidden, residual, weights.mlp_norm, layer.eps), group)
        hidden = leave(hidden, weights.mlp_out_norm, layer.eps)
    assert hidden is not None
    return hidden


def attend(layer: Layer, hidden: Tensor, cache: Tensor, meta: StepMeta, group: Group) -> Tensor:
    """hidden: [T, H]. Stores the KV of the T tokens in `cache`, a layer's. Returns what each head has, [T, N, D]."""
    weights, cos_sin = layer.weights, meta.cos_sin[layer.rope_id]
    if isinstance(layer.spec.attention, LatentSpec):
        return latent_attention(layer.spec.attention, weights, hidden, cache, cos_sin, meta.slots, meta.paged)
    q, k, v = project(layer.attention, weights, hidden, layer.eps, group)
    q = rope_kv_write(q, k, v, cos_sin, cache, meta.slots)
    return paged_attention(q, cache, meta.paged, layer.options)


def enter(hidden: Tensor | None, residual: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Adds what the part before left, [T, H], to `residual` [T, H]. Returns what the next part is given, [T, H]."""
    if norm is None:
        return residual if hidden is None else residual.add_(hidden)
    return rms_norm(residual, norm, eps) if hidden is None else add_rms_norm(hidden, residual, norm, eps)


def leave(hidden: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """hidden: [T, H]. Returns what a part adds, [T, H]."""
    return hidden if norm is None else rms_norm(hidden, norm, eps)


def feed_forward(layer: Layer, hidden: Tensor, group: Group) -> Tensor:
    """hidden: [T, H]. Returns [T, H], the same on every rank."""
    spec, weights = layer.spec.feed_forward, layer.weights
    if isinstance(spec, MoeSpec):
        here = layer.experts.here if layer.experts is not None else None
        return group.all_reduce(moe(spec, weights, hidden, here, layer.expert_tokens))
    gate_up, down = weights.gate_up, weights.down
    assert gate_up is not None and down is not None
    return group.all_reduce(mlp(hidden, spec.activation, gate_up, down, weights.gate_up_bias, weights.down_bias))
