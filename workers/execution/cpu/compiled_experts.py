"""The weights of a mixture of experts for the compiled CPU kernels, packed expert by expert as they are read."""

from collections.abc import Callable

from torch import Tensor

from ....kernels.cpu.experts import PackedExperts, PackedMixture
from ....kernels.cpu.library import Team
from ....kernels.cpu.linear import PackedLinear, pack
from ...models.checkpoint.weights import LayerTensors
from ...models.families.spec import MoeSpec
from ...models.layers.moe import routing_of
from .compiled_shape import EXPERT_GATES


def read_mixture(team: Team, fields: LayerTensors, of: MoeSpec, take: Callable[[int], Tensor]) -> PackedMixture:
    """Pack a mixture's experts; only one expert's tensors at a time are in memory beside their packed form. take: as
    `pack` has it."""
    gate_up: list[PackedLinear] = []
    down: list[PackedLinear] = []
    for expert in range(of.num_experts):
        own = fields.of_expert(expert)
        for field, packed in (("experts_gate_up", gate_up), ("experts_down", down)):
            bias, gated = own.fused(f"{field}_bias"), packed is gate_up
            format, scales = own.format(field), own.scales(field)
            bias = None if bias is None else bias.flatten()
            packed.append(pack(team, own.parts(field), bias, gated=gated, format=format, scales=scales, take=take))
    experts = PackedExperts(gate_up, down, of.routing.top_k, EXPERT_GATES[of.expert.activation])
    router = pack(team, [fields.tensor("router").to(experts.sizes.dtype)], fields.fused("router_bias"), take=take)
    return PackedMixture(router, routing_of(of.routing), fields.fused("choice_bias"), experts)
