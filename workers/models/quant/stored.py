"""Parts of a weight as a format stores them, and the scales of each part."""

import torch
from torch import Tensor

from ....kernels.cpu.formats import Format, group_of
from . import int4, int8

PIECE_BYTES = 16 << 20  # of rows that are quantised at once, as float32


def scales_of_part(weight: Tensor, format: Format, part: slice) -> Tensor:
    """weight: whole rows [n, k]. Returns the scales that their inputs `part` have, float32 [n, groups]."""
    scales = int4.scales_of(weight) if format == Format.INT4 else int8.scales_of(weight)
    whole, own = group_of(format, weight.shape[1]), group_of(format, part.stop - part.start)
    return scales[:, torch.arange(part.start, part.stop, own) // whole].contiguous()


def as_stored_(weight: Tensor, format: Format, scales: Tensor | None = None) -> Tensor:
    """Overwrites a weight [..., n, k], contiguous, with what `format` leaves of it, in its dtype: for a product by
    torch. scales: of all rows below one another, [.. n, groups]; None, its own. Some rows at a time: what they are
    meanwhile takes several times their memory."""
    if format == Format.PLAIN:
        return weight
    kind = int4 if format == Format.INT4 else int8
    rows = weight.view(-1, weight.shape[-1])
    step = max(PIECE_BYTES // (4 * rows.shape[1]), 1)
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        own_scales = scales if scales is None else scales[part]
        rows[part] = kind.dequantise(*kind.quantise(rows[part], own_scales))
    return weight
