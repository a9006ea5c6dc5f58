"""The weights of a mixture of experts for the compiled CPU kernels, packed expert by expert as they are read."""

from ....kernels.cpu.experts import PackedExperts, PackedMixture
from ....kernels.cpu.library import Team
from ....kernels.cpu.linear import PackedLinear, Take, pack
from ...models.checkpoint.weights import LayerTensors
from ...models.families.spec import MoeSpec
from ...models.layers.moe import routing_of
from .compiled_fields import pack_field
from .compiled_shape import EXPERT_GATES


def read_mixture(team: Team, fields: LayerTensors, of: MoeSpec, take: Take) -> PackedMixture:
    """Pack a mixture's experts; only one expert's tensors at a time are in memory beside their packed form. take: as
    `pack` has it."""
    gate_up: list[PackedLinear] = []
    down: list[PackedLinear] = []
    for expert in range(of.num_experts):
        own = fields.of_expert(expert)
        for field, packed in (("experts_gate_up", gate_up), ("experts_down", down)):
            packed.append(pack_field(team, own, field, gated=packed is gate_up, take=take))
    experts = PackedExperts(gate_up, down, of.routing.top_k, EXPERT_GATES[of.expert.activation])
    router = pack(team, [fields.tensor("router").to(experts.sizes.dtype)], fields.fused("router_bias"), take=take)
    return PackedMixture(router, routing_of(of.routing), fields.fused("choice_bias"), experts)
