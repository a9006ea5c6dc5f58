"""Choice of what computes experts of many tokens: our kernels, or a library (kernels/moe/expert_library.py, and
scaled_expert_library.py of weights in fp8 with scales of blocks).

Made for each kind of mixture and some ranges of numbers of tokens, with the weights of the first layer of the kind, in
place. A library may have up before gate: layers that it has are changed over for good, in place too, and our kernels
compute the rest of their steps from that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ....kernels.elementwise.gate_mul import SILU, SILU_UP_FIRST
from ....kernels.gemm.linear import Weight
from ....kernels.gemm.scaled_gemm import ScaledWeight
from ....kernels.moe.expert_library import ExpertLibraries, ExpertLibrary, find_expert_library
from ....kernels.moe.moe import moe_experts
from ....kernels.moe.scaled_expert_library import FP8, find_scaled_expert_library
from ...device.device import Lane
from ...models.checkpoint.weights import LayerWeights
from ...models.families.spec import MoeSpec
from ...models.layers.decoder import Decoder
from ...models.layers.layer import Layer
from .timed_choice import TOLERANCE, Contest, Work, fastest, made_on, timed_on, works

# Up to the first the kernels here compute: among these are all steps that are graphs, but for decodes of more rows.
RANGES = (1024, 2048, 4096)
NUM_IDLE = 3  # of the tokens that are compared, which no expert has: rows that are padding
NUM_CALLS = 4  # of a run
# Of weights in fp8: the library rounds gate and up to bfloat16 before the rows between both products are rounded to
# fp8. Some of these then come out as the next number, a tenth more or less: results differ by 0.02 of their norm.
SCALED_TOLERANCE = 5e-2

Inputs = tuple[Tensor, Tensor, Tensor]  # the first three of moe_experts


@dataclass(frozen=True, slots=True)
class MixtureKind:
    """A mixture, as far as a kernel's time and its code depend on it."""

    shape: torch.Size  # of gate and up, [E, 2I, H]
    num_experts: int  # with those of other ranks
    top_k: int
    is_scaled: bool  # weights in fp8 with scales of blocks; else of the model's dtype


def choose_expert_library(lane: Lane, decoder: Decoder, max_tokens: int) -> None:
    """Choose for each kind of mixture of the decoder's. max_tokens: of a step."""
    like = decoder.weights.embed
    libraries = _libraries(like.device) if max_tokens > RANGES[0] else []
    chosen = dict[MixtureKind, ExpertLibraries | None]()
    for layer in decoder.layers if libraries else ():
        kind = _kind(layer, like.dtype)
        library = next((of for of in libraries if kind is not None and of.is_of_scaled == kind.is_scaled), None)
        if kind is None or library is None:
            continue
        if kind not in chosen:
            contest = _MixtureContest(lane, library, kind, layer.weights, like)
            chosen[kind] = contest.chosen(max_tokens)
        layer.weights.experts_libraries = chosen[kind]
        if layer.weights.experts_up_first:
            lane.run(partial(_exchange, layer.weights))
    lane.record().wait()


def _libraries(device: torch.device) -> Sequence[ExpertLibrary]:
    found = find_expert_library(device), find_scaled_expert_library(device)
    return [library for library in found if library is not None]


def _kind(layer: Layer, dtype: torch.dtype) -> MixtureKind | None:
    """None: no mixture, or one that no library knows, or whose tokens come from other ranks."""
    spec, weights = layer.spec.feed_forward, layer.weights
    if not isinstance(spec, MoeSpec) or (layer.experts is not None and layer.experts.is_over):
        return None
    gate_up, down = weights.experts_gate_up, weights.experts_down
    is_plain = all(isinstance(of, Tensor) and of.dtype == dtype for of in (gate_up, down))
    is_scaled = _is_scaled(gate_up) and _is_scaled(down)
    has_bias = weights.experts_gate_up_bias is not None or weights.experts_down_bias is not None
    if gate_up is None or not (is_plain or is_scaled) or has_bias or spec.expert.activation != "silu":
        return None
    return MixtureKind(gate_up.shape, spec.num_experts, spec.routing.top_k, is_scaled)


def _is_scaled(weight: Weight | None) -> bool:
    return isinstance(weight, ScaledWeight) and weight.has_blocks and weight.values.dtype == FP8


@dataclass(frozen=True, slots=True)
class _MixtureContest:
    lane: Lane
    library: ExpertLibrary
    kind: MixtureKind
    weights: LayerWeights  # of the first layer of the kind
    like: Tensor  # of the dtype of tokens, on the device

    def chosen(self, max_tokens: int) -> ExpertLibraries | None:
        """Compare both on these weights, in the library's order meanwhile. None: it has no range of tokens."""
        if self.library.has_up_first:
            self.lane.run(partial(_exchange, self.weights))
        lasts = (*(last for last in RANGES if last < max_tokens), max_tokens)
        found: list[tuple[int, ExpertLibrary | None]] = [(lasts[0], None)]
        for last in lasts[1:]:  # of so many tokens, for which there then was memory
            library = self._faster(made_on(self.lane, partial(self._inputs, last)))
            if library is not None and not self._is_ready(library, found[-1][0] + 1):
                library = None
            found.append((last, library))
        if self.library.has_up_first:
            self.lane.run(partial(_exchange, self.weights))
        return tuple(found) if any(of is not None for _, of in found) else None

    def _faster(self, inputs: Inputs) -> ExpertLibrary | None:
        library, gate_up, down = self.library, self.weights.experts_gate_up, self.weights.experts_down
        assert gate_up is not None and down is not None
        activation = SILU_UP_FIRST if library.has_up_first else SILU
        if not library.takes(*inputs, gate_up, down, activation):
            return None
        own: Work = partial(moe_experts, *inputs, gate_up, down, activation=activation)
        by: Work = partial(library.compute, *inputs, gate_up, down)
        what = f"experts {'in fp8 ' if self.kind.is_scaled else ''}{list(gate_up.shape)}"
        tolerance = SCALED_TOLERANCE if self.kind.is_scaled else TOLERANCE
        contest = Contest(what, "computed", len(inputs[0]), tolerance, is_relative=True)
        return fastest(contest, own, [(library, by)], timed_on(self.lane, NUM_CALLS))

    def _is_ready(self, library: ExpertLibrary, num_tokens: int) -> bool:
        """Return whether it computes the fewest tokens of a range, too: kernels that sort pairs are compiled apart for
        them."""
        gate_up, down = self.weights.experts_gate_up, self.weights.experts_down
        assert gate_up is not None and down is not None
        compute = partial(made_on, self.lane, lambda: library.compute(*self._inputs(num_tokens), gate_up, down))
        return works(f"experts of {num_tokens} tokens and more", "computed", library, compute)

    def _inputs(self, num_tokens: int) -> Inputs:
        """Random tokens and their experts: -1 for those of other ranks, and of tokens that are idle."""
        num_here, _, dim = self.kind.shape
        scores = torch.rand(num_tokens, self.kind.num_experts, dtype=torch.float32, device=self.like.device)
        gates, experts = scores.topk(self.kind.top_k)
        experts = torch.where(experts < num_here, experts, -1).int()
        experts[-NUM_IDLE:] = -1
        return self.like.new_empty(num_tokens, dim).normal_(), gates / gates.sum(1, keepdim=True), experts


def _exchange(weights: LayerWeights) -> None:
    """Exchange gate and up of each expert, in place."""
    assert isinstance(weights.experts_gate_up, Tensor)
    for of in weights.experts_gate_up:
        first, second = of.chunk(2)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
