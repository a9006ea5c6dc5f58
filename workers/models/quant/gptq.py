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

from ...common.errors import CheckpointError
from ..families.quantisation import Gptq
from ..plan.number_layouts import number_layout
from ..plan.tensor_names import Shape
from .bits import num_words, unpack_columns, unpack_words
from .inputs_first import InputsFirst
from .stored_weight import FLOATS, StoredTensors, StoredWeight, check_divides, checked_scales, need, whole

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
        stored = tuple(of for of in names if tensors.header(of) is not None)
        weight = _reader(_GptqTensors(tensors, module, shape, config), group)
        return StoredWeight(shape, stored, weight.rows, weight.stored(number_layout(config, module, k)))

    def is_spare(self, tensors: StoredTensors, name: str, /) -> bool:
        """A bias of zeros, which older ones have beside each weight, though the model has none."""
        module = name.removesuffix(".bias")
        is_beside = module != name and tensors.header(f"{module}.qweight") is not None
        return is_beside and not whole(tensors, name).any()


def _reader(of: "_GptqTensors", group: int) -> InputsFirst:
    k, middle = of.shape[1], 1 << (of.config.bits - 1)
    return InputsFirst(k, group, middle, of.numbers, of.zeros, of.scales, lambda: of.groups(group))


@dataclass(frozen=True, slots=True)
class _GptqTensors:
    tensors: StoredTensors
    module: str
    shape: Shape  # [n, k]
    config: Gptq

    def numbers(self, of: slice) -> Tensor:
        """[k, rows] float32."""
        words = self.tensors.raw(f"{self.module}.qweight", (slice(None), of))
        return unpack_columns(words, self.config.bits, self.shape[1])

    def scales(self, of: slice) -> Tensor:
        """[groups, rows] float32."""
        name = f"{self.module}.scales"
        return checked_scales(self.tensors, name, self.tensors.raw(name, (slice(None), of)))

    def zeros(self, of: slice) -> Tensor:
        """[groups, rows] float32. 32 numbers fill a whole number of words.

        Those of a symmetric weight are all in the middle: so which version they are stored by is known by their values,
        whatever the config says. Raises CheckpointError for others of a weight that is said to be symmetric.
        """
        name, bits = f"{self.module}.qzeros", self.config.bits
        first, last = of.start // 32, -(-of.stop // 32)
        part = slice(first * bits, min(last * bits, num_words(self.shape[0], bits)))
        words = self.tensors.raw(name, (slice(None), part))
        stored = unpack_words(words, bits, of.stop - 32 * first)[:, of.start - 32 * first :]
        middle = 1 << (bits - 1)
        if self.config.is_symmetric is not False and ((stored == middle).all() or (stored == middle - 1).all()):
            return torch.full(stored.shape, float(middle))
        if self.config.is_symmetric:
            raise CheckpointError(
                f"{self.tensors.where(name)}: tensor {name} has zero points that are not in the middle, though the "
                "config says sym: true: set it to false there, or fetch the checkpoint again"
            )
        return (stored if self.config.is_v2 else (stored + 1) & ((1 << bits) - 1)).float()

    def groups(self, group: int) -> Tensor | None:
        """The group of each input, [k]; None: they are in order."""
        name, k = f"{self.module}.g_idx", self.shape[1]
        if self.tensors.header(name) is None:
            return None
        found, num = whole(self.tensors, name).long(), k // group
        if torch.equal(found, torch.arange(k) // group):
            return None
        if found.min() < 0 or found.max() >= num:
            raise CheckpointError(f"{self.tensors.where(name)}: tensor {name} must have groups from 0 to {num - 1}")
        return found
