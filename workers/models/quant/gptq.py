"""Weights of GPTQ checkpoints (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write them: numbers of
2, 3, 4 or 8 bits, inputs before outputs.

    qweight  int32 [words of k, n], each column a stream of bits along the inputs
    qzeros   int32 [groups, words of n]: zero points, in the first version of the format less 1
    scales   float16 [groups, n]
    g_idx    int32 [k]: the group of each input; in order unless activations ordered them (desc_act)

A weight is (number - zero point) x scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ...common.errors import CheckpointError
from ..families.quantisation import Gptq
from ..plan.number_layouts import number_layout
from ..plan.tensor_names import Shape
from .bits import num_words, unpack_columns, unpack_words
from .stored_weight import (
    FLOATS,
    StoredNumbers,
    StoredTensors,
    StoredWeight,
    check_divides,
    checked_scales,
    in_bytes,
    need,
    whole,
)

_TENSORS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """A WeightFormat."""

    config: Gptq

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        module = name.removesuffix(".weight")
        if len(shape) != 2 or all(tensors.header(f"{module}.{of}") is None for of in ("qweight", "scales")):
            return None
        (n, k), bits, config = shape, self.config.bits, self.config
        group = config.group_size or k
        check_divides(tensors, name, group, k)
        need(tensors, f"{module}.qweight", [(num_words(k, bits), n)], ["I32"])
        need(tensors, f"{module}.qzeros", [(k // group, num_words(n, bits))], ["I32"])
        need(tensors, f"{module}.scales", [(k // group, n)], FLOATS)
        names = [f"{module}.{of}" for of in _TENSORS]
        if tensors.header(names[-1]) is not None or not config.is_in_order:
            need(tensors, names[-1], [(k,)], ["I32", "I64"])
        weight = _GptqWeight(tensors, module, shape, config, group)
        stored = tuple(of for of in names if tensors.header(of) is not None)
        layout = number_layout(config, module, k)
        if layout is None or weight.groups() is not None:  # inputs of a group stand apart
            return StoredWeight(shape, stored, weight.rows)
        return StoredWeight(shape, stored, weight.rows, StoredNumbers(layout, lambda _, rows: weight.numbers(rows)))

    def is_spare(self, tensors: StoredTensors, name: str, /) -> bool:
        """A bias of zeros, which older ones have beside each weight, though the model has none."""
        module = name.removesuffix(".bias")
        is_beside = module != name and tensors.header(f"{module}.qweight") is not None
        return is_beside and not whole(tensors, name).any()


@dataclass(frozen=True, slots=True)
class _GptqWeight:
    tensors: StoredTensors
    module: str
    shape: Shape  # [n, k]
    config: Gptq
    group: int

    def rows(self, of: slice) -> Tensor:
        k, bits = self.shape[1], self.config.bits
        numbers = unpack_columns(self.tensors.raw(f"{self.module}.qweight", (slice(None), of)), bits, k)  # [k, rows]
        zeros, scales = self._zeros(of), self._scales(of)
        groups = self.groups()
        if groups is None:
            grouped = numbers.unflatten(0, (-1, self.group))
            return grouped.sub_(zeros[:, None]).mul_(scales[:, None]).flatten(0, 1).T
        return numbers.sub_(zeros[groups]).mul_(scales[groups]).T

    def numbers(self, of: slice) -> WeightNumbers:
        """Read the numbers of rows whose inputs are in the order of their groups."""
        k, bits, middle = self.shape[1], self.config.bits, 1 << (self.config.bits - 1)

        def read(rows: slice) -> Tensor:
            words = self.tensors.raw(f"{self.module}.qweight", (slice(None), rows))
            return (unpack_columns(words, bits, k) - middle).T

        zeros, scales = self._zeros(of), self._scales(of)
        offsets = None if (zeros == middle).all() else ((middle - zeros) * scales).T.contiguous()
        return WeightNumbers(in_bytes(of, k, read), scales.T.contiguous(), offsets)

    def _scales(self, of: slice) -> Tensor:
        """[groups, rows] float32."""
        name = f"{self.module}.scales"
        return checked_scales(self.tensors, name, self.tensors.raw(name, (slice(None), of)))

    def _zeros(self, of: slice) -> Tensor:
        """[groups, rows] float32. 32 numbers fill a whole number of words."""
        name, bits = f"{self.module}.qzeros", self.config.bits
        first, last = of.start // 32, -(-of.stop // 32)
        words = self.tensors.raw(name, (slice(None), slice(first * bits, last * bits)))
        stored = unpack_words(words, bits, of.stop - 32 * first)[:, of.start - 32 * first :]
        if not self.config.is_v2 and not self._is_mislabelled(stored):
            stored = (stored + 1) & ((1 << bits) - 1)
        return stored.float()

    def _is_mislabelled(self, stored: Tensor) -> bool:
        """Return whether zero points are stored as they are, though the config says less 1: those of a symmetric weight
        are all in the middle."""
        return self.config.is_symmetric and bool((stored == 1 << (self.config.bits - 1)).all())

    def groups(self) -> Tensor | None:
        """The group of each input, [k]; None: they are in order."""
        name, k = f"{self.module}.g_idx", self.shape[1]
        if self.tensors.header(name) is None:
            return None
        found, num = whole(self.tensors, name).long(), k // self.group
        if torch.equal(found, torch.arange(k) // self.group):
            return None
        if found.min() < 0 or found.max() >= num:
            raise CheckpointError(f"{self.tensors.where(name)}: tensor {name} must have groups from 0 to {num - 1}")
        return found
