"""What a format leaves of a weight, and which scales a part of one has."""

import torch
from torch import Tensor

from ...kernels.cpu.formats import Format, group_of
from . import int4, int8


def scales_of_part(weight: Tensor, format: Format, part: slice) -> Tensor:
    """weight: whole rows [n, k]. Returns the scales that their inputs `part` have, float32 [n, groups]."""
    scales = int8.scales_of(weight) if format == Format.INT8 else int4.scales_of(weight)
    whole, own = group_of(format, weight.shape[1]), group_of(format, part.stop - part.start)
    return scales[:, torch.arange(part.start, part.stop, own) // whole].contiguous()


def as_stored(weight: Tensor, format: Format, scales: Tensor | None = None) -> Tensor:
    """What `format` leaves of a weight [..., n, k], in its dtype: for a product by torch. scales: of all rows below one
    another, [.. n, groups]; None, its own."""
    if weight.dim() > 2:
        return as_stored(weight.flatten(0, -2), format, scales).view(weight.shape)
    match format:
        case Format.PLAIN:
            return weight
        case Format.INT8:
            return int8.dequantise(*int8.quantise(weight, scales)).to(weight.dtype)
        case Format.INT4:
            return int4.dequantise(*int4.quantise(weight, scales)).to(weight.dtype)
