"""Weights of AWQ checkpoints (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ's `gemm` version writes them: numbers of 4
bits, inputs before outputs, eight outputs in a word.

    qweight  int32 [k, n / 8]
    qzeros   int32 [groups, n / 8]; may be missing where the config says zero_point: false
    scales   float16 [groups, n]

A weight is (number - zero point) x scale.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..families.quantisation import Awq
from ..plan.number_layouts import number_layout
from ..plan.tensor_names import Shape
from .bits import unpack_awq
from .inputs_first import InputsFirst
from .stored_weight import FLOATS, StoredTensors, StoredWeight, check_divides, checked_scales, need, whole

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
        if n % WORD:
            raise CheckpointError(
                f"{tensors.where(name)}: weight {name} has {n} outputs, which words of 8 do not divide"
            )
        need(tensors, f"{module}.qweight", [(k, n // WORD)], ["I32"])
        need(tensors, f"{module}.scales", [(k // group, n)], FLOATS)
        names = [f"{module}.qweight", f"{module}.scales"]
        has_zeros = self.config.has_zeros
        if has_zeros or tensors.header(f"{module}.qzeros") is not None:
            names.append(f"{module}.qzeros")
            need(tensors, names[-1], [(k // group, n // WORD)], ["I32"])
            # Written by some all the same, in the middle.
            has_zeros = has_zeros or bool((unpack_awq(whole(tensors, names[-1])) != MIDDLE).any())
        weight = _reader(tensors, module, k, group, has_zeros=has_zeros)
        layout = number_layout(self.config, module, k)
        own = None if layout is None else replace(layout, has_offsets=has_zeros)
        return StoredWeight(shape, tuple(names), weight.rows, weight.stored(own))

    def is_spare(self, _tensors: StoredTensors, _name: str, /) -> bool:
        return False


def _reader(tensors: StoredTensors, module: str, k: int, group: int, *, has_zeros: bool) -> InputsFirst:
    def read(short: str, of: slice) -> Tensor:
        words = slice(of.start // WORD, -(-of.stop // WORD))
        found = unpack_awq(tensors.raw(f"{module}.{short}", (slice(None), words)))
        return found[:, of.start % WORD :][:, : of.stop - of.start]

    def zeros(of: slice) -> Tensor:
        return read("qzeros", of) if has_zeros else torch.full((k // group, of.stop - of.start), MIDDLE)

    def scales(of: slice) -> Tensor:
        name = f"{module}.scales"
        return checked_scales(tensors, name, tensors.raw(name, (slice(None), of)))

    return InputsFirst(k, group, MIDDLE, lambda of: read("qweight", of), zeros, scales)
