"""A weight rounded to nearest in a format that `diptych quantize` writes: its tensors, and what they mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.plan.quantize_job import WrittenFormat
from ..models.rounding import e2m1, float8, mxfp4
from .grids import Grid, stored


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A quantised weight."""

    tensors: dict[str, Tensor]  # by the short name that compressed-tensors stores them under
    meaning: Tensor  # float32 [n, k]


def grid_of(written: WrittenFormat, group: int, dtype: torch.dtype) -> Grid:
    """Return the grid of a format of whole numbers. group: of inputs, where the format has groups. dtype: of the
    checkpoint; activations of 8 bits are computed with scales of float32."""
    scale_dtype = torch.float32 if written.has_activations else dtype
    return Grid(written.bits, group if written.strategy == "group" else 0, scale_dtype)


def of_numbers(written: WrittenFormat, grid: Grid, numbers: Tensor, scales: Tensor) -> RoundedWeight:
    """numbers: int8 [n, k] of `grid`; scales: as it has them."""
    return RoundedWeight(stored(written, numbers, scales), grid.meaning(numbers, scales))


def rounded_float(written: WrittenFormat, weight: Tensor, largest: float) -> RoundedWeight:
    """weight: float32 [n, k]. largest: magnitude among all weights that are computed as one product with these, where
    the format has a scale for all of them (NVFP4)."""
    if written.format == "float-quantized":
        numbers, scales = float8.quantise(weight)
        return RoundedWeight({"weight": numbers, "weight_scale": scales}, float8.dequantise(numbers, scales))
    if written.format == "mxfp4-pack-quantized":
        codes, scales = mxfp4.quantise(weight)
        tensors = {"weight_packed": e2m1.pack(codes), "weight_scale": mxfp4.exponents_of(scales)}
        return RoundedWeight(tensors, mxfp4.dequantise(codes, scales))
    assert written.format == "nvfp4-pack-quantized"
    return _nvfp4(weight, largest, written.group)


def _nvfp4(weight: Tensor, largest: float, group: int) -> RoundedWeight:
    """NVFP4: 4-bit floats, an e4m3 scale for 16 inputs, and one for all that makes the largest of these 448 (NVIDIA,
    arXiv 2509.25149, section 2). A weight is number x scale / scale of all."""
    of_all = torch.tensor([float8.LARGEST * e2m1.LARGEST / largest if largest > 0 else 1.0])
    groups = weight.unflatten(1, (-1, group))
    scales = (of_all * groups.abs().amax(dim=2) / e2m1.LARGEST).clamp(max=float8.LARGEST).to(torch.float8_e4m3fn)
    spread = scales.float()[:, :, None] / of_all
    codes = e2m1.nearest(groups / torch.where(spread == 0, 1.0, spread))
    tensors = {
        "weight_packed": e2m1.pack(codes.flatten(1)),
        "weight_scale": scales,
        "weight_global_scale": of_all,
    }
    return RoundedWeight(tensors, (e2m1.values(codes) * spread).flatten(1))
