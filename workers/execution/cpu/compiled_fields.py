"""A field of weights packed for the compiled kernels: in the numbers of the checkpoint where those may be kept."""

from torch import Tensor

from ....kernels.cpu.library import Team
from ....kernels.cpu.linear import PackedLinear, Take, pack, pack_numbers
from ...models.checkpoint.weights import LayerTensors


def pack_field(team: Team, fields: LayerTensors, name: str, *, gated: bool = False, take: Take) -> PackedLinear:
    """Pack the weights of field `name`, and its bias. gated, take: as `pack` has them."""
    bias, layout = _flat(fields.fused(f"{name}_bias")), fields.layout(name)
    if layout is not None:
        return pack_numbers(team, fields.numbers(name, layout), layout, fields.dtype, bias, gated=gated, take=take)
    format, scales = fields.format(name), fields.scales(name)
    return pack(team, fields.parts(name), bias, gated=gated, format=format, scales=scales, take=take)


def _flat(bias: Tensor | None) -> Tensor | None:
    """An expert's bias has an axis for the expert."""
    return None if bias is None else bias.flatten()
