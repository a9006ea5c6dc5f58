"""The decoder that a ModelSpec describes. Knows tensors; knows neither sequences nor sampling.

    residual = embedding
    each layer:  residual += attention(enter(residual));  residual += feed forward(enter(residual))
                 [residual += what it is given of each token;  residual *= its scale]
    logits = head(norm(residual))

What enters a part is normed where the spec has norms before it; what it adds, where it has them after it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, tanh
from torch.nn import functional
from torch.nn.functional import embedding

from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from ....kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from ....kernels.gemm.linear import linear
from ....kernels.kv.kv_scales import KVParts
from ....kernels.kv.rope_kv_write import rope_kv_write, rotate
from ....kernels.moe.expert_counts import count_experts
from ...device.kv_cache import KVCache
from ...parallel.groups import Alone, Group
from ...sampling.pooled_rows import pieces_of_pooled
from ...sampling.prompt_scorer import pieces_of
from ..checkpoint.weights import DecoderWeights, LayerWeights
from ..families.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from ..plan.expert_placement import Placement
from ..plan.sharding import Share, vocabulary_sizes
from . import mla
from .attention import StepMeta, options_of, output, project
from .dispatch import ExpertRanks
from .hidden_states import HiddenStates
from .mlp import mlp
from .moe import moe, moe_gathered, moe_over, no_expert_tokens
from .rope import Ropes
from .row_exchange import RowExchange
from .sparse import SparseDecodes, SparseStep
from .step import Step
from .tail import TailStep
from .token_inputs import of_token, token_inputs
from .turns import InTurns, finished


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec  # of this rank's share
    weights: LayerWeights
    eps: float
    rope_id: int  # which of ModelSpec.ropes is its own
    options: AttentionOptions
    kv_id: int  # the layer of the cache that it reads, and writes unless its spec has kv_from
    expert_tokens: Tensor | None = None  # [E] int64: what goes to each expert is added
    experts: ExpertRanks | None = None  # where ranks, or workers, have some of them each, whole
    number: int = 0  # of the model's
    experts_in_gluon: tuple[bool, bool] = (False, False)  # which product of experts kernels/moe/hopper_experts.py has


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
        layers.append(Layer(of, own, spec.rms_norm_eps, rope_id, options, kv_id, counts, experts.get(i), i))
    return layers


class Decoder:
    """Decoder of one rank. All ranks call the same methods, in the same order."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        group: Group | None = None,
        experts: Mapping[int, Placement] | None = None,
        peers: Group | RowExchange | None = None,
        first_kv: int = 0,
    ) -> None:
        """spec, weights: of this rank's share. experts: Share.experts. peers: workers that have those together, each
        with tokens of its own; None: the ranks of `group` have them. first_kv: layer of the cache that is the first of
        this decoder's."""
        self.spec, self.weights = spec, weights
        self.group = Alone() if group is None else group
        # All ranks send the same tokens to the same experts: only the first counts them.
        device = weights.embed.device
        self.expert_tokens = no_expert_tokens(spec, device) if self.group.rank == 0 else None
        self.exchange = peers if isinstance(peers, RowExchange) else None
        holders, is_over = (self.group, False) if peers is None else (peers, True)
        ranks = {layer: ExpertRanks(holders, of, device, is_over=is_over) for layer, of in (experts or {}).items()}
        layers = layers_of(spec, weights.layers, self.expert_tokens, ranks)
        self.layers = [replace(layer, kv_id=first_kv + layer.kv_id) for layer in layers] if first_kv else layers
        self.rope_dims = [dim for _, dim in spec.ropes]  # found by comparing layers: not once a step
        # Layers that store KV, and those whose experts are spread, which all who hold them meet in, are for all tokens.
        for_all = [i for i, of in enumerate(self.layers) if of.spec.kv_from is None or of.experts is not None]
        self.num_for_all = for_all[-1] + 1

    def without(self, skipped: Collection[int]) -> "Decoder":
        """Return a decoder of the same weights without some of the layers; it counts no expert's tokens. Not for models
        whose layers read another one's KV, or an input of each token."""
        assert all(of.spec.kv_from is None and of.spec.token_input is None for of in self.layers)
        made = copy(self)
        kept = [of for i, of in enumerate(self.layers) if i not in skipped]
        made.layers, made.num_for_all = [replace(of, expert_tokens=None) for of in kept], len(kept)
        return made

    def compute(
        self,
        step: Step,
        cache: KVCache,
        cos_sin: Ropes,
        stored: Callable[[int], object] = lambda _: None,
        add_prompt_logits: Callable[[Tensor], object] = lambda _: None,
        add_pooled: Callable[[Tensor], object] = lambda _: None,
        taken: HiddenStates | None = None,
    ) -> Tensor | None:
        """A step whose sequences with one new token come first; stores its KV in `cache`. Returns the logits of its
        sampled rows at rank 0, None where there are none and elsewhere. `add_prompt_logits` gets those of its prompt
        rows at rank 0, `add_pooled` the final hidden states of its pooled rows at all ranks, a piece at a time. taken:
        gets hidden states of all rows.

        `stored` is told how many of the cache's layers were asked to store theirs, after each. Layers after the last of
        these compute the sampled rows alone: nobody reads what they would make of the others.
        """

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(cos_sin[0].device, non_blocking=True)

        block_size, group = cache.layout.block_size, self.group
        token_ids, sampled = tensor(step.token_ids), tensor(step.sampled)
        num = len(self.layers) if step.reads_all or taken is not None else self.num_for_all
        meta = step.meta(cos_sin, block_size, cache.bounds.num_chosen)
        residual, hidden, given = self._through(num, token_ids, cache, meta, stored, taken)
        if taken is not None and taken.is_final:
            left = None if hidden is None else hidden.clone()
            norm = self.weights.norm if taken.is_normed else None
            taken.put_final(enter(left, residual.clone(), norm, self.spec.rms_norm_eps))
        for piece in pieces_of(step.prompt_rows, self.spec.vocab_size):
            rows = tensor(piece)
            prompt_logits = self._head(residual[rows], None if hidden is None else hidden[rows])
            if prompt_logits is not None:
                add_prompt_logits(prompt_logits)
        for piece in pieces_of_pooled(step.pooled_rows):
            rows = tensor(piece)
            add_pooled(self._normed(residual[rows], None if hidden is None else hidden[rows]))
        if not len(sampled):
            return None
        residual, hidden = residual[sampled], None if hidden is None else hidden[sampled]
        if num < len(self.layers):
            residual, meta = (
                enter(hidden, residual, None, 0.0),
                step.sampled_alone(block_size).meta(cos_sin, block_size),
            )
            given = None if given is None else given[sampled, num:]
            hidden = run_layers(self.layers[num:], residual, cache, meta, group, given=given)
        return self._head(residual, hidden)

    def serve(self) -> None:
        """A step of `peers` in which there are no tokens here: theirs may come to our experts."""
        finished(self.serve_in_turns(self.layers))

    def serve_in_turns(self, layers: Sequence[Layer]) -> InTurns[None]:
        """Do what `serve` does, in some layers."""
        nothing = self.weights.embed.new_empty(0, self.weights.embed.shape[1])
        slots = torch.empty(0, dtype=torch.int64, device=nothing.device)
        for layer in layers:
            if layer.experts is not None and isinstance(spec := layer.spec.feed_forward, MoeSpec):
                yield from _mixture(spec, layer, nothing, slots, nothing)

    def forward(self, token_ids: Tensor, cache: KVCache, meta: StepMeta, taken: HiddenStates | None = None) -> Tensor:
        """token_ids: [T] int64. Stores their KV in `cache`; returns the final hidden states of all, [T, H]. taken: gets
        hidden states of all rows."""
        residual, hidden, _ = self._through(len(self.layers), token_ids, cache, meta, taken=taken)
        normed = self._normed(residual, hidden)
        if taken is not None and taken.is_final:
            taken.put_final(normed if taken.is_normed else residual)
        return normed

    def _through(
        self,
        num: int,
        token_ids: Tensor,
        cache: KVCache,
        meta: StepMeta,
        stored: Callable[[int], object] = lambda _: None,
        taken: HiddenStates | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the first `num` layers. token_ids: [T] int64. Returns the residual [T, H], what is to be added to it
        yet [T, H] and what all layers are given of each token, see `token_inputs`."""
        residual = self.embed(token_ids)
        given = self.token_inputs(token_ids, residual)
        hidden = run_layers(self.layers[:num], residual, cache, meta, self.group, stored, given, taken)
        return residual, hidden, given

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64. Returns [T, H]."""
        scale, found = self.spec.embedding_scale, self._looked_up(token_ids, self.weights.embed, self.spec.vocab_size)
        return found if scale == 1.0 else found * found.new_full((), scale)  # is rounded, as transformers does

    def token_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """token_ids: [T] int64; embedded: [T, H], what `embed` returns. What layers are given of them, [T, layers, P];
        None: nothing."""
        spec, weights = self.spec.token_input, self.weights
        if spec is None:
            return None
        assert weights.token_embed is not None
        looked_up = self._looked_up(token_ids, weights.token_embed, spec.vocab_size)
        return token_inputs(self.spec, weights, looked_up, embedded)

    def _head(self, residual: Tensor, hidden: Tensor | None) -> Tensor | None:
        """residual: [R, H], of any rows, overwritten; hidden: [R, H], what is to be added to it yet. See `logits`."""
        return self.logits(self._normed(residual, hidden))

    def _normed(self, residual: Tensor, hidden: Tensor | None) -> Tensor:
        """residual, hidden: as `_head` has them. Returns the final hidden states, [R, H]."""
        return enter(hidden, residual, self.weights.norm, self.spec.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [R, H]. Returns [R, vocab] float32 at rank 0, None on other ranks."""
        whole = self.whole_logits(hidden)
        return None if whole is None else whole.float()

    def whole_logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [R, H]. Returns [R, vocab] of hidden's dtype at rank 0, None on other ranks."""
        own, group = self.own_logits(hidden), self.group
        if group.size == 1:
            return own
        parts = group.gather(own, [(len(own), n) for n in vocabulary_sizes(self.spec.vocab_size, group.size)])
        return torch.cat(parts, dim=1) if parts else None

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H]. Returns those of this rank's part of the vocabulary, [R, n], of hidden's dtype."""
        head, cap = self.weights.lm_head, self.spec.logit_softcap
        own = functional.linear(hidden, head) if isinstance(head, Tensor) else linear(hidden, head)
        return tanh(own / cap) * cap if cap else own

    def _looked_up(self, token_ids: Tensor, table: Tensor, vocab_size: int) -> Tensor:
        """token_ids: [T]; table: [n, W], this rank's part of `vocab_size` rows. Returns [T, W]."""
        group = self.group
        if group.size == 1:
            return embedding(token_ids, table)
        local = token_ids - Share(group.rank, group.size).vocabulary(vocab_size).start
        is_others = (local < 0) | (local >= len(table))
        return group.all_reduce(embedding(local.masked_fill(is_others, 0), table).masked_fill_(is_others[:, None], 0))


def run_layers(
    layers: Sequence[Layer],
    residual: Tensor,
    cache: KVCache,
    meta: StepMeta,
    group: Group,
    stored: Callable[[int], object] = lambda _: None,
    given: Tensor | None = None,
    taken: HiddenStates | None = None,
) -> Tensor | None:
    """residual: [T, H], overwritten. Returns what is to be added to it yet, [T, H]: the same on every rank. taken: gets
    the residual before each layer, and after the last.

    layers, cache: of this rank's share. Once a layer's attention is done here, every rank has stored its KV. given: see
    Decoder.token_inputs.
    """
    hidden: Tensor | None = None
    for i, layer in enumerate(layers):
        weights, kv = layer.weights, cache.parts(layer.kv_id)
        if taken is not None:
            taken.put(i, residual if hidden is None else residual + hidden)
        hidden = enter(hidden, residual, weights.input_norm, layer.eps)
        q = queries(layer, hidden, kv, meta.cos_sin, meta.slots, group)
        attended = attend_in(layer, q, cache, meta.paged, meta.sparse, meta.tail)
        hidden = output(weights, attended, group)
        if layer.spec.kv_from is None:
            stored(layer.kv_id + 1)
        hidden = leave(hidden, weights.attention_out_norm, layer.eps)
        entering = enter(hidden, residual, weights.mlp_norm, layer.eps)
        hidden = finished(feed_forward(layer, entering, residual, meta.slots, group))
        hidden = leave(hidden, weights.mlp_out_norm, layer.eps)
        hidden = end(layer, hidden, residual, None if given is None else given[:, i])
    if taken is not None:
        taken.put(len(layers), residual if hidden is None else residual + hidden)
    return hidden


def queries(layer: Layer, hidden: Tensor, cache: KVParts, cos_sin: Ropes, slots: Tensor, group: Group) -> Tensor:
    """hidden: [T, H]. Stores the KV of the T tokens in `cache`, a layer's, unless the layer only reads it; below 0, a
    slot is none. cos_sin: as StepMeta has them. Returns what each head asks, rotated, [T, N, D]."""
    spec, weights, angles = layer.spec.attention, layer.weights, cos_sin[layer.rope_id]
    if isinstance(spec, LatentSpec):
        return mla.project(spec, weights, hidden, cache.numbers, angles, slots)
    q, k, v = project(spec, weights, hidden, layer.eps, group)
    if layer.spec.kv_from is not None:
        return rotate(q, angles)
    return rope_kv_write(q, k, v, angles, cache.numbers, slots, cache.scales)


def attend(layer: Layer, q: Tensor, cache: KVParts, paged: PagedBatch) -> Tensor:
    """q: of all the batch's tokens, whose KV is stored. Returns what each head has, [T, N, value_dim]."""
    spec = layer.spec.attention
    if isinstance(spec, LatentSpec):
        return mla.attend(spec, layer.weights, q, cache.numbers, paged)
    return paged_attention(q, cache.numbers, paged, layer.options, cache.scales)


def attend_in(
    layer: Layer,
    q: Tensor,
    cache: KVCache,
    paged: PagedBatch,
    sparse: SparseStep | SparseDecodes | None,
    tail: TailStep | None = None,
) -> Tensor:
    """Compute what `attend` does, in a step in which some sequences are sparse, or KV is in a tail."""
    if tail is not None:
        return tail.attend(q, cache, layer.kv_id, paged, layer.options, stores=layer.spec.kv_from is None)
    kv, bounds = cache.parts(layer.kv_id), None if sparse is None else cache.bounds.layers.get(layer.number)
    if sparse is None or bounds is None:
        return attend(layer, q, kv, paged)
    return sparse.attend(q, kv.numbers, bounds, layer.options)


def enter(hidden: Tensor | None, residual: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Adds what the part before left, [T, H], to `residual` [T, H]. Returns what the next part is given, [T, H]."""
    if norm is None:
        return residual if hidden is None else residual.add_(hidden)
    return rms_norm(residual, norm, eps) if hidden is None else add_rms_norm(hidden, residual, norm, eps)


def leave(hidden: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """hidden: [T, H]. Returns what a part adds, [T, H]."""
    return hidden if norm is None else rms_norm(hidden, norm, eps)


def feed_forward(layer: Layer, hidden: Tensor, residual: Tensor, slots: Tensor, group: Group) -> InTurns[Tensor]:
    """hidden: [T, H], what enters, of `residual` [T, H]; slots: [T], below 0 of tokens that are idle. Gives [T, H], the
    same on every rank."""
    spec, weights = layer.spec.feed_forward, layer.weights
    if isinstance(spec, MlpSpec):
        return group.all_reduce(_mlp(spec, weights, hidden))
    if layer.spec.beside is None:
        return group.all_reduce((yield from _mixture(spec, layer, hidden, slots)))
    assert weights.experts_norm is not None and weights.router_norm is not None
    normed, routed_by = (rms_norm(residual, norm, layer.eps) for norm in (weights.experts_norm, weights.router_norm))
    mixed = yield from _mixture(spec, layer, normed, slots, routed_by)
    both = group.all_reduce(torch.stack((_mlp(layer.spec.beside, weights, hidden), mixed)))
    norms = weights.beside_out_norm, weights.experts_out_norm
    one, other = (leave(of, norm, layer.eps) for of, norm in zip(both, norms, strict=True))
    return one + other


def _mlp(spec: MlpSpec, weights: LayerWeights, hidden: Tensor) -> Tensor:
    """hidden: [T, H]. Returns this rank's part, [T, H]."""
    assert weights.gate_up is not None and weights.down is not None
    biases = weights.gate_up_bias, weights.down_bias
    return mlp(hidden, spec.activation, weights.gate_up, weights.down, *biases)


def _mixture(
    spec: MoeSpec, layer: Layer, hidden: Tensor, slots: Tensor, routed_by: Tensor | None = None
) -> InTurns[Tensor]:
    """hidden, routed_by: see moe.py; slots: as feed_forward has them. Gives this rank's part, [T, H]."""
    weights, experts, counts = layer.weights, layer.experts, layer.expert_tokens
    count = partial(count_experts, slots=slots, counts=counts) if counts is not None else None
    if experts is not None and experts.exchange is not None:
        gathered = moe_gathered(spec, weights, hidden, experts, slots, count, routed_by, layer.experts_in_gluon)
        return (yield from gathered)
    if experts is not None and experts.is_over:
        return moe_over(spec, weights, hidden, experts, count, routed_by)
    here = None if experts is None else experts.here
    return moe(spec, weights, hidden, here, count, routed_by, layer.experts_in_gluon)


def end(layer: Layer, hidden: Tensor, residual: Tensor, given: Tensor | None) -> Tensor | None:
    """hidden: [T, H], what the layer adds to `residual` [T, H]; given: [T, P], what it is given of each token. Returns
    what is to be added yet."""
    spec, weights = layer.spec.token_input, layer.weights
    if spec is None and weights.scale is None:
        return hidden
    residual.add_(hidden)
    if spec is not None:
        assert given is not None
        residual.add_(of_token(spec, weights, residual, given, layer.eps))
    if weights.scale is not None:
        residual.mul_(weights.scale)
    return None
