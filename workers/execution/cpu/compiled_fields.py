"""A field of weights packed for the compiled kernels: in the numbers of the checkpoint where those may be kept."""

from collections.abc import Sequence

from torch import Tensor

from ....kernels.cpu.formats import AT_LOAD, Format, NumberLayout, group_of
from ....kernels.cpu.library import Team
from ....kernels.cpu.linear import PackedLinear, Take, WeightNumbers, pack, pack_numbers
from ...models.checkpoint.weights import LayerTensors
from ...models.rounding.stored import numbers_of


def pack_field(team: Team, fields: LayerTensors, name: str, *, gated: bool = False, take: Take) -> PackedLinear:
    """Pack the weights of field `name`, and its bias. gated, take: as `pack` has them."""
    bias, layout = _flat(fields.fused(f"{name}_bias")), fields.layout(name)
    if layout is not None:
        return pack_numbers(team, fields.numbers(name, layout), layout, fields.dtype, bias, gated=gated, take=take)
    format, scales = fields.format(name), fields.scales(name)
    if format not in AT_LOAD:
        parts = _rounded(fields.parts(name), format, scales)
        layout = NumberLayout(format, group_of(format, parts[0].numbers.shape[1]))
        return pack_numbers(team, parts, layout, fields.dtype, bias, gated=gated, take=take)
    return pack(team, fields.parts(name), bias, gated=gated, format=format, scales=scales, take=take)


def _rounded(parts: Sequence[Tensor], format: Format, scales: Tensor | None) -> list[WeightNumbers]:
    """parts: [n_i, k] each. scales: float32 [n, groups] of all of them, where they are parts of longer rows."""
    own = [None] * len(parts) if scales is None else scales.split([len(part) for part in parts])
    return [numbers_of(part, format, of) for part, of in zip(parts, own, strict=True)]


def _flat(bias: Tensor | None) -> Tensor | None:
    """An expert's bias has an axis for the expert."""
    return None if bias is None else bias.flatten()
