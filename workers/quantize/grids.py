"""Grids of whole numbers that weights are rounded to, and how compressed-tensors stores them.

A weight is number x scale; an output has a scale, or each group of its inputs. Of 4 bits the weight of the largest
magnitude in a group becomes -8 whatever its sign, so that all sixteen numbers serve (a scale may be below 0); of 8 bits
numbers go from -127 to 127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.plan.quantize_job import WrittenFormat

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Grid:
    """Whole numbers of `bits` bits (4 or 8), with a scale for each `group` inputs; 0: for each output."""

    bits: int
    group: int
    scale_dtype: torch.dtype  # that scales are stored in: numbers are rounded by what that leaves of them

    def group_of(self, k: int) -> int:
        return self.group or k

    def scales_of(self, weight: Tensor) -> Tensor:
        """weight: float32 [n, k], k a multiple of the group. Returns [n, k / group] of `scale_dtype`: 0 where a whole
        group is."""
        groups = weight.unflatten(1, (-1, self.group_of(weight.shape[1])))
        if self.bits == 8:
            return (groups.abs().amax(dim=2) / 127).to(self.scale_dtype)
        high, low = groups.amax(dim=2), groups.amin(dim=2)
        return (torch.where(high > -low, high, low) / -8).to(self.scale_dtype)

    def spread(self, scales: Tensor, k: int) -> Tensor:
        """scales: [n, k / group]. Returns float32, one for each weight, [n, k]."""
        return scales.float().repeat_interleave(self.group_of(k), dim=1)

    def round(self, weight: Tensor, spread: Tensor) -> Tensor:
        """weight, spread: float32 of one shape. Returns the whole numbers nearest to weight / spread, float32."""
        lowest, highest = (-127, 127) if self.bits == 8 else (-8, 7)
        return torch.round(weight / torch.where(spread == 0, 1.0, spread)).clamp_(lowest, highest)

    def nearest(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight: float32 [n, k]. Returns int8 [n, k] and its scales: round to nearest."""
        scales = self.scales_of(weight)
        return self.round(weight, self.spread(scales, weight.shape[1])).to(torch.int8), scales

    def meaning(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """numbers: int8 [n, k]. Returns the weight, float32 [n, k]."""
        return numbers.float() * self.spread(scales, numbers.shape[1])


def stored(written: WrittenFormat, numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """numbers: int8 [n, k]; scales: [n, groups]. Returns a module's tensors by their short names."""
    if written.format == "int-quantized":
        return {"weight": numbers, "weight_scale": scales}
    shape = torch.tensor(numbers.shape, dtype=torch.int64)
    return {"weight_packed": pack(numbers, written.bits), "weight_scale": scales, "weight_shape": shape}


def pack(numbers: Tensor, bits: int) -> Tensor:
    """numbers: int8 [n, k]. Returns int32 [n, words]: 32 / bits of them in a word, the first in its low bits, each
    stored from 0."""
    n, k = numbers.shape
    per_word = WORD_BITS // bits
    raised = torch.zeros(n, -(-k // per_word) * per_word, dtype=torch.int32)
    raised[:, :k] = numbers.int() + (1 << (bits - 1))
    words = torch.zeros(n, raised.shape[1] // per_word, dtype=torch.int32)
    for place in range(per_word):
        words |= raised[:, place::per_word] << (bits * place)
    return words
