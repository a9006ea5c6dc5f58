"""A mixture of experts (Shazeer et al. 2017): each token goes to the few experts that a router chooses for it.

    logits (float32) -> the experts of each token and their weights -> experts, each over its own tokens
        -> sum, in the order in which they were chosen

A row's sum does not depend on what is beside it, as far as torch's products of other rows do not.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from ....kernels.common.lang import has_kernel, launched
from ....kernels.elementwise.gate_mul import SILU_UP_FIRST
from ....kernels.gemm.linear import Weight
from ....kernels.moe.moe import moe_experts
from ....kernels.moe.moe_combine import moe_combine
from ....kernels.moe.moe_routing import Routing, moe_routing
from ..checkpoint.weights import LayerWeights
from ..families.spec import ModelSpec, MoeSpec, RoutingSpec
from .dispatch import ExpertRanks
from .mlp import ACTIVATIONS, mlp
from .turns import InTurns

# [T, top_k] int32 of experts -> the same of where they are among those that are held here; -1 for those that are not.
Here = Callable[[Tensor], Tensor]


def moe(
    spec: MoeSpec,
    weights: LayerWeights,
    hidden: Tensor,
    here: Here | None = None,
    count: Callable[[Tensor], object] | None = None,
    routed_by: Tensor | None = None,
    in_gluon: tuple[bool, bool] = (False, False),
) -> Tensor:
    """Compute the experts that are held here and the shared ones. hidden: [T, H].

    here: None where those are all. count: told which experts each token goes to, [T, top_k] int32, of all there are.
    routed_by: [T, H], what the router sees where it is not `hidden`. in_gluon: of moe_experts. Returns [T, H].
    """
    gates, experts = route(spec.routing, weights, hidden if routed_by is None else routed_by, count)
    if here is not None:
        experts = here(experts)
    return _experts(spec, weights, hidden, gates, experts, _shared(spec, weights, hidden), in_gluon)


def _experts(
    spec: MoeSpec,
    weights: LayerWeights,
    hidden: Tensor,
    gates: Tensor,
    experts: Tensor,
    shared: Tensor | None,
    in_gluon: tuple[bool, bool],
) -> Tensor:
    """hidden: [T, H], last axis contiguous; gates, experts: [T, top_k], see moe_experts, of those held here; shared:
    [T, H]. Returns [T, H]."""
    gate_up, down = weights.experts_gate_up, weights.experts_down
    assert gate_up is not None and down is not None
    library = next((of for last, of in weights.experts_libraries or () if len(hidden) <= last), None)
    if has_kernel(hidden):
        return moe_experts(
            hidden,
            gates,
            experts,
            gate_up,
            down,
            shared=shared,
            biases=(weights.experts_gate_up_bias, weights.experts_down_bias),
            activation=SILU_UP_FIRST if weights.experts_up_first else ACTIVATIONS[spec.expert.activation],
            in_gluon=in_gluon,
            library=library,
        )
    y = launched(_one_by_one, spec, weights, hidden, experts)
    return moe_combine(y, gates, experts, gate_up.shape[0], shared=shared)


def moe_over(
    spec: MoeSpec,
    weights: LayerWeights,
    hidden: Tensor,
    ranks: ExpertRanks,
    count: Callable[[Tensor], object] | None = None,
    routed_by: Tensor | None = None,
) -> Tensor:
    """Compute the same of tokens that this rank alone has, by their experts. All `ranks` call it. T may be 0."""
    gates, experts = route(spec.routing, weights, hidden if routed_by is None else routed_by, count)

    def compute(rows: Tensor, slots: Tensor) -> Tensor:
        return _one_by_one(spec, weights, rows, slots[:, None])

    return ranks.over(hidden, gates, experts, compute, _shared(spec, weights, hidden))


def moe_gathered(
    spec: MoeSpec,
    weights: LayerWeights,
    hidden: Tensor,
    ranks: ExpertRanks,
    slots: Tensor,
    count: Callable[[Tensor], object] | None = None,
    routed_by: Tensor | None = None,
    in_gluon: tuple[bool, bool] = (False, False),
) -> InTurns[Tensor]:
    """Compute the same on devices, by the experts of all workers and without waiting for any. slots: [T] int64, below
    0 of tokens that are idle: no expert computes them. All `ranks` call it with as many rows, or agree on how many
    (RowExchange.agree); then T may be 0."""
    exchange = ranks.exchange
    assert exchange is not None
    top_k = spec.routing.top_k
    gates, experts = (hidden.new_zeros(0, top_k, dtype=dtype) for dtype in (torch.float32, torch.int32))
    if len(hidden):
        gates, experts = route(spec.routing, weights, hidden if routed_by is None else routed_by, count)
        experts = experts.masked_fill(slots[:, None] < 0, -1)
    parts: list[Tensor] = []
    for start, end in exchange.pieces(len(hidden)):
        own = hidden[start:end]
        message = own, gates[start:end], experts[start:end]
        rows, their_gates, their_experts = yield from exchange.gather(*message, end - start)
        given = _experts(spec, weights, rows, their_gates, ranks.here(their_experts), None, in_gluon)
        parts.append((yield from exchange.scatter(given, len(own))))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
    shared = _shared(spec, weights, hidden) if len(hidden) else None
    return mixed if shared is None else mixed.add_(shared)


def _gate_first(up_gate: Weight) -> Tensor:
    assert isinstance(up_gate, Tensor)
    return up_gate.roll(len(up_gate) // 2, 0)


def no_expert_tokens(spec: ModelSpec, device: torch.device) -> Tensor | None:
    """[layers, experts] int64, all 0: for how many tokens have gone to each; None: there are no experts."""
    most = max(spec.num_experts, default=0)
    return torch.zeros(spec.num_layers, most, dtype=torch.int64, device=device) if most else None


def route(
    spec: RoutingSpec, weights: LayerWeights, hidden: Tensor, count: Callable[[Tensor], object] | None
) -> tuple[Tensor, Tensor]:
    """hidden: [T, H]. Returns the weights of its experts [T, top_k] float32, and which they are, [T, top_k] int32, of
    which `count` is told."""
    assert weights.router is not None
    logits = linear(hidden.float(), weights.router, weights.router_bias)
    if spec.logit_scale != 1.0:
        logits *= spec.logit_scale
    gates, experts = moe_routing(logits, routing_of(spec), weights.choice_bias)
    if weights.expert_scales is not None:
        gates = gates * weights.expert_scales[experts.long()]
    if count is not None:
        count(experts)
    return gates, experts


@cache
def routing_of(spec: RoutingSpec) -> Routing:
    return Routing(
        top_k=spec.top_k,
        sigmoid=spec.sigmoid,
        renormalise=spec.renormalise,
        scale=spec.scale,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        group_by_two=spec.group_by_two,
    )


def _one_by_one(spec: MoeSpec, weights: LayerWeights, hidden: Tensor, experts: Tensor) -> Tensor:
    """Compute one expert after another, only those that have rows. experts: [T, top_k], as they are numbered here.

    Returns [T * top_k, H]: of each choice what its expert gives; not written for those that are not held.
    """
    gate_up, down = weights.experts_gate_up, weights.experts_down
    assert gate_up is not None and down is not None
    gate_up_bias, down_bias = weights.experts_gate_up_bias, weights.experts_down_bias
    num_experts, top_k = gate_up.shape[0], experts.shape[1]
    bins = experts.view(-1)
    bins = torch.where((bins >= 0) & (bins < num_experts), bins, num_experts)
    order, counts = bins.argsort(stable=True), torch.bincount(bins, minlength=num_experts).tolist()
    y, start = hidden.new_empty(bins.numel(), hidden.shape[1]), 0
    for expert, count in enumerate(counts[:num_experts]):
        if not count:
            continue
        places = order[start : start + count]
        y[places] = mlp(
            hidden[places // top_k],
            spec.expert.activation,
            _gate_first(gate_up[expert]) if weights.experts_up_first else gate_up[expert],
            down[expert],
            None if gate_up_bias is None else gate_up_bias[expert],
            None if down_bias is None else down_bias[expert],
        )
        start += count
    return y


def _shared(spec: MoeSpec, weights: LayerWeights, hidden: Tensor) -> Tensor | None:
    if spec.shared is None:
        return None
    assert weights.shared_gate_up is not None and weights.shared_down is not None
    return mlp(hidden, spec.shared.activation, weights.shared_gate_up, weights.shared_down)
