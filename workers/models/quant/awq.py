"""Weights of AWQ checkpoints (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ's `gemm` version writes them: numbers of 4
bits, inputs before outputs, eight outputs in a word.

    qweight  int32 [k, n / 8]
    qzeros   int32 [groups, n / 8]
    scales   float16 [groups, n]

A weight is (number - zero point) x scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ..families.quantisation import Awq
from ..plan.number_layouts import number_layout
from ..plan.tensor_names import Shape
from .bits import unpack_awq
from .stored_weight import (
    FLOATS,
    StoredNumbers,
    StoredTensors,
    StoredWeight,
    check_divides,
    checked_scales,
    in_bytes,
    need,
)

WORD = 8  # numbers
MIDDLE = 8  # of numbers from 0 to 15


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """A WeightFormat."""

    config: Awq

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        module = name.removesuffix(".weight")
        if len(shape) != 2 or all(tensors.header(f"{module}.{of}") is None for of in ("qweight", "scales")):
            return None
        n, k = shape
        group = self.config.group_size or k
        check_divides(tensors, name, group, k)
        need(tensors, f"{module}.qweight", [(k, n // WORD)], ["I32"])
        need(tensors, f"{module}.scales", [(k // group, n)], FLOATS)
        names = [f"{module}.qweight", f"{module}.scales"]
        if self.config.has_zeros:
            names.append(f"{module}.qzeros")
            need(tensors, names[-1], [(k // group, n // WORD)], ["I32"])

        weight = _AwqWeight(tensors, module, k, group, self.config.has_zeros)
        layout = number_layout(self.config, module, k)
        numbers = None if layout is None else StoredNumbers(layout, lambda _, rows: weight.numbers(rows))
        return StoredWeight(shape, tuple(names), weight.rows, numbers)

    def is_spare(self, _tensors: StoredTensors, _name: str, /) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _AwqWeight:
    tensors: StoredTensors
    module: str
    k: int
    group: int
    has_zeros: bool

    def rows(self, of: slice) -> Tensor:
        scales = self._scales(of)
        zeros = self._read("qzeros", of).float() if self.has_zeros else torch.full_like(scales, MIDDLE)
        numbers = self._read("qweight", of).float().unflatten(0, (self.k // self.group, self.group))
        numbers -= zeros[:, None]
        return numbers.mul_(scales[:, None]).flatten(0, 1).T

    def numbers(self, of: slice) -> WeightNumbers:
        scales = self._scales(of)
        offsets = (MIDDLE - self._read("qzeros", of)) * scales if self.has_zeros else None
        numbers = in_bytes(of, self.k, lambda rows: (self._read("qweight", rows) - MIDDLE).T)
        return WeightNumbers(numbers, scales.T.contiguous(), None if offsets is None else offsets.T.contiguous())

    def _scales(self, of: slice) -> Tensor:
        """[groups, rows] float32."""
        name = f"{self.module}.scales"
        return checked_scales(self.tensors, name, self.tensors.raw(name, (slice(None), of)))

    def _read(self, short: str, of: slice) -> Tensor:
        """[.., rows] int32."""
        words = slice(of.start // WORD, -(-of.stop // WORD))
        found = unpack_awq(self.tensors.raw(f"{self.module}.{short}", (slice(None), words)))
        return found[:, of.start % WORD :][:, : of.stop - of.start]
