"""Choice of what computes experts of many tokens: our kernels, or a library (kernels/moe/expert_library.py).

Made for each kind of mixture and some ranges of numbers of tokens, with the weights of the first layer of the kind, in
place. The library has up before gate: layers that it has are changed over for good, in place too, and our kernels
compute the rest of their steps from that order.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ....kernels.elementwise.gate_mul import SILU_UP_FIRST
from ....kernels.moe.expert_library import ExpertLibraries, ExpertLibrary, find_expert_library
from ....kernels.moe.moe import moe_experts
from ...device.device import Lane
from ...models.checkpoint.weights import LayerWeights
from ...models.families.spec import MoeSpec
from ...models.layers.decoder import Decoder, Layer
from .timed_choice import Contest, Work, fastest, made_on, timed_on

# Up to the first the kernels here compute: among these are all steps that are graphs, but for decodes of more rows.
RANGES = (1024, 2048, 4096)
NUM_IDLE = 3  # of the tokens that are compared, which no expert has: rows that are padding
NUM_CALLS = 4  # of a run

Inputs = tuple[Tensor, Tensor, Tensor]  # the first three of moe_experts


@dataclass(frozen=True, slots=True)
class MixtureKind:
    """A mixture, as far as a kernel's time and its code depend on it."""

    shape: torch.Size  # of gate and up, [E, 2I, H]
    num_experts: int  # with those of other ranks
    top_k: int


def choose_expert_library(lane: Lane, decoder: Decoder, max_tokens: int) -> None:
    """Choose for each kind of mixture of the decoder's. max_tokens: of a step."""
    like = decoder.weights.embed
    library = find_expert_library(like.device) if max_tokens > RANGES[0] else None
    if library is None:
        return
    chosen = dict[MixtureKind, ExpertLibraries | None]()
    for layer in decoder.layers:
        if (kind := _kind(layer, like.dtype)) is None:
            continue
        if kind not in chosen:
            chosen[kind] = _chosen(lane, library, kind, layer.weights, max_tokens)
        lane.run(partial(_arrange, layer.weights, chosen[kind]))
    lane.record().wait()


def _kind(layer: Layer, dtype: torch.dtype) -> MixtureKind | None:
    """None: no mixture, or one that no library knows, or whose tokens come from other ranks."""
    spec, weights = layer.spec.feed_forward, layer.weights
    if not isinstance(spec, MoeSpec) or (layer.experts is not None and layer.experts.is_over):
        return None
    gate_up, down = weights.experts_gate_up, weights.experts_down
    is_plain = all(isinstance(of, Tensor) and of.dtype == dtype for of in (gate_up, down))
    has_bias = weights.experts_gate_up_bias is not None or weights.experts_down_bias is not None
    if gate_up is None or not is_plain or has_bias or spec.expert.activation != "silu":
        return None
    return MixtureKind(gate_up.shape, spec.num_experts, spec.routing.top_k)


def _chosen(
    lane: Lane, library: ExpertLibrary, kind: MixtureKind, weights: LayerWeights, max_tokens: int
) -> ExpertLibraries | None:
    """Compare both on these weights, which have up first afterwards. None: the library has no range of tokens."""
    lane.run(partial(_arrange, weights, ()))
    lasts = (*(last for last in RANGES if last < max_tokens), max_tokens)
    found: list[tuple[int, ExpertLibrary | None]] = [(lasts[0], None)]
    for last in lasts[1:]:  # of so many tokens, for which there then was memory
        found.append((last, _faster(lane, library, weights, made_on(lane, partial(_inputs, kind, weights, last)))))
    return tuple(found) if any(of is not None for _, of in found) else None


def _faster(lane: Lane, library: ExpertLibrary, weights: LayerWeights, inputs: Inputs) -> ExpertLibrary | None:
    gate_up, down = weights.experts_gate_up, weights.experts_down
    assert gate_up is not None and down is not None
    if not library.takes(*inputs, gate_up, down, SILU_UP_FIRST):
        return None
    own: Work = partial(moe_experts, *inputs, gate_up, down, activation=SILU_UP_FIRST)
    by: Work = partial(library.compute, *inputs, gate_up, down)
    contest = Contest(f"experts {list(gate_up.shape)}", "computed", len(inputs[0]), is_relative=True)
    return fastest(contest, own, [(library, by)], timed_on(lane, NUM_CALLS))


def _inputs(kind: MixtureKind, weights: LayerWeights, num_tokens: int) -> Inputs:
    """Random tokens and their experts: -1 for those of other ranks, and of tokens that are idle."""
    num_here, _, dim = kind.shape
    gate_up = weights.experts_gate_up
    assert isinstance(gate_up, Tensor)
    scores = torch.rand(num_tokens, kind.num_experts, dtype=torch.float32, device=gate_up.device)
    gates, experts = scores.topk(kind.top_k)
    experts = torch.where(experts < num_here, experts, -1).int()
    experts[-NUM_IDLE:] = -1
    return gate_up.new_empty(num_tokens, dim).normal_(), gates / gates.sum(1, keepdim=True), experts


def _arrange(weights: LayerWeights, libraries: ExpertLibraries | None) -> None:
    """Keep the choice on the weights; exchange gate and up of each expert where it asks for the other order."""
    is_there = (weights.experts_libraries is None) == (libraries is None)
    weights.experts_libraries = libraries
    assert isinstance(weights.experts_gate_up, Tensor)
    for of in () if is_there else weights.experts_gate_up:
        first, second = of.chunk(2)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
