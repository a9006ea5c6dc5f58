"""A layer of a decoder, and its parts: the same for every way in which steps are computed. Knows no step.

q = queries(enter(rows))   stores KV   ─>   attend   ─>   output, leave   ─>   enter, feed_forward, leave   ─>   end
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ....kernels.attention.paged_attention import paged_attention
from ....kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from ....kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from ....kernels.kv.kv_scales import KVParts
from ....kernels.kv.rope_kv_write import rope_kv_write, rotate
from ....kernels.moe.expert_counts import count_experts
from ...device.kv_cache import KVCache
from ...parallel.groups import Group
from ..checkpoint.weights import LayerWeights
from ..families.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from . import mla
from .attention import StepMeta, options_of, output, project
from .dispatch import ExpertRanks
from .hidden_states import HiddenStates
from .mlp import mlp
from .moe import moe, moe_gathered, moe_over
from .rope import Ropes
from .sparse import SparseDecodes, SparseStep
from .tail import TailStep
from .token_inputs import of_token
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


@dataclass(slots=True, eq=False)
class LayerRows:
    """Rows of a step on their way through layers."""

    residual: Tensor  # [T, H], overwritten
    meta: StepMeta
    given: Tensor | None = None  # [T, layers, P], see Decoder.token_inputs
    hidden: Tensor | None = None  # [T, H]: what is to be added to the residual yet, the same on every rank


@dataclass(frozen=True, slots=True, eq=False)
class RowsCut:
    """Rows that are all that is computed once one layer has stored the KV of its step."""

    layer: int  # of those that are run
    rows: Tensor  # [R] int64
    meta: StepMeta  # of them, each a sequence whose one new token it is

    def of(self, rows: LayerRows) -> LayerRows:
        """Return them, to which nothing is to be added yet."""
        return LayerRows(rows.residual[self.rows], self.meta, None if rows.given is None else rows.given[self.rows])


def run_layers(
    layers: Sequence[Layer],
    rows: LayerRows,
    cache: KVCache,
    group: Group,
    stored: Callable[[int], object] = lambda _: None,
    taken: HiddenStates | None = None,
    cut: RowsCut | None = None,
) -> LayerRows:
    """Compute layers, of this rank's share as the cache is. Returns the rows after them: of `cut` alone, if there is
    one, and without further layers where it has none. stored: is told how many of the cache's layers every rank has
    stored. taken: gets the residual before each layer, and after the last."""
    for i, layer in enumerate(layers):
        weights, kv = layer.weights, cache.parts(layer.kv_id)
        if taken is not None:
            taken.put(i, _whole(rows))
        entering = enter(rows.hidden, rows.residual, weights.input_norm, layer.eps)
        q = queries(layer, entering, kv, rows.meta.cos_sin, rows.meta.slots, group)
        if cut is not None and i == cut.layer:
            q, rows = q[cut.rows], cut.of(rows)
            if not len(q):
                group.meet()
                if layer.spec.kv_from is None:
                    stored(layer.kv_id + 1)
                return rows
        attended = attend_in(layer, q, cache, rows.meta.paged, rows.meta.sparse, rows.meta.tail)
        hidden = output(weights, attended, group)
        if layer.spec.kv_from is None:  # every rank has stored its KV: they met in the output
            stored(layer.kv_id + 1)
        hidden = leave(hidden, weights.attention_out_norm, layer.eps)
        entering = enter(hidden, rows.residual, weights.mlp_norm, layer.eps)
        hidden = finished(feed_forward(layer, entering, rows.residual, rows.meta.slots, group))
        hidden = leave(hidden, weights.mlp_out_norm, layer.eps)
        rows.hidden = end(layer, hidden, rows.residual, None if rows.given is None else rows.given[:, i])
    if taken is not None:
        taken.put(len(layers), _whole(rows))
    return rows


def _whole(rows: LayerRows) -> Tensor:
    return rows.residual if rows.hidden is None else rows.residual + rows.hidden


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
        return group.all_reduce((yield from mixture(spec, layer, hidden, slots)))
    assert weights.experts_norm is not None and weights.router_norm is not None
    normed, routed_by = (rms_norm(residual, norm, layer.eps) for norm in (weights.experts_norm, weights.router_norm))
    mixed = yield from mixture(spec, layer, normed, slots, routed_by)
    both = group.all_reduce(torch.stack((_mlp(layer.spec.beside, weights, hidden), mixed)))
    norms = weights.beside_out_norm, weights.experts_out_norm
    one, other = (leave(of, norm, layer.eps) for of, norm in zip(both, norms, strict=True))
    return one + other


def _mlp(spec: MlpSpec, weights: LayerWeights, hidden: Tensor) -> Tensor:
    """hidden: [T, H]. Returns this rank's part, [T, H]."""
    assert weights.gate_up is not None and weights.down is not None
    biases = weights.gate_up_bias, weights.down_bias
    return mlp(hidden, spec.activation, weights.gate_up, weights.down, *biases)


def mixture(
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
