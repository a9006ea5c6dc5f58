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

from ..families.quantisation import Awq
from ..plan.tensor_names import Shape
from .bits import unpack_awq
from .stored_weight import FLOATS, StoredTensors, StoredWeight, check_divides, checked_scales, need

WORD = 8  # numbers


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """A WeightFormat."""

    config: Awq

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        module = name.removesuffix(".weight")
        if len(shape) != 2 or tensors.header(f"{module}.qweight") is None:
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

        def rows(of: slice) -> Tensor:
            words = slice(of.start // WORD, -(-of.stop // WORD))
            kept = slice(of.start % WORD, of.start % WORD + of.stop - of.start)

            def read(short: str) -> Tensor:
                return unpack_awq(tensors.raw(f"{module}.{short}", (slice(None), words)))[:, kept]  # [.., rows]

            scales = checked_scales(tensors, f"{module}.scales", tensors.raw(f"{module}.scales", (slice(None), of)))
            zeros = read("qzeros").float() if self.config.has_zeros else torch.full_like(scales, WORD)
            numbers = read("qweight").float().unflatten(0, (k // group, group))
            numbers -= zeros[:, None]
            return numbers.mul_(scales[:, None]).flatten(0, 1).T

        return StoredWeight(shape, tuple(names), rows)

    def is_spare(self, _tensors: StoredTensors, _name: str, /) -> bool:
        return False
