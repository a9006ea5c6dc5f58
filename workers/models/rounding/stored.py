"""Parts of a weight as a format stores them, and the scales of each part."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ....kernels.cpu.formats import Format, group_of
from ....kernels.cpu.linear import WeightNumbers
from . import e2m1, float8, int4, int8, mxfp4

# By format: scales_of, quantise and dequantise.
TWINS = {Format.INT8: int8, Format.INT4: int4, Format.W8A8: int8, Format.FP8: float8, Format.TABLE4: mxfp4}
PIECE_BYTES = 16 << 20  # of rows that are quantised at once, as float32


def scales_of_part(weight: Tensor, format: Format, part: slice) -> Tensor:
    """weight: whole rows [n, k]. Returns the scales that their inputs `part` have, float32 [n, groups]."""
    scales = TWINS[format].scales_of(weight)
    whole, own = group_of(format, weight.shape[1]), group_of(format, part.stop - part.start)
    return scales[:, torch.arange(part.start, part.stop, own) // whole].contiguous()


def as_stored_(weight: Tensor, format: Format, scales: Tensor | None = None) -> Tensor:
    """Overwrites a weight [..., n, k], contiguous, with what `format` leaves of it, in its dtype: for a product by
    torch. scales: of all rows below one another, [.. n, groups]; None, its own. Some rows at a time: what they are
    meanwhile takes several times their memory."""
    if format == Format.PLAIN:
        return weight
    kind = TWINS[format]
    rows = weight.view(-1, weight.shape[-1])
    for part in _some_rows(rows):
        own_scales = scales if scales is None else scales[part]
        rows[part] = kind.dequantise(*kind.quantise(rows[part], own_scales))
    return weight


def numbers_of(weight: Tensor, format: Format, scales: Tensor | None = None) -> WeightNumbers:
    """Quantise a weight [n, k], on its device, some rows at a time. scales: as `as_stored_` has them."""
    kind, found = TWINS[format], list[tuple[Tensor, Tensor]]()
    for part in _some_rows(weight):
        numbers, own = kind.quantise(weight[part], scales if scales is None else scales[part])
        found.append((numbers.view(torch.int8), own))
    table = e2m1.values(torch.arange(16, dtype=torch.uint8)) if format == Format.TABLE4 else None
    return WeightNumbers(*(torch.cat(of) for of in zip(*found, strict=True)), table=table)


def _some_rows(rows: Tensor) -> Iterator[slice]:
    """Return parts of [n, k], so many rows as are quantised at once."""
    step = max(PIECE_BYTES // (4 * rows.shape[1]), 1)
    for first in range(0, len(rows), step):
        yield slice(first, first + step)
