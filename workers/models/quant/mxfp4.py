"""Experts of gpt-oss as published, in MXFP4 (OCP Microscaling Formats v1.0, section 5): 32 numbers share a power of 2.

    {name}_blocks  uint8 [E, outputs, inputs / 32, 16], low nibble first
    {name}_scales  uint8, E8M0, [E, outputs, inputs / 32]

The weight that they stand for has inputs before outputs: [E, inputs, outputs].
"""

from dataclasses import dataclass

from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ..families.quantisation import Mxfp4
from ..plan.number_layouts import MXFP4_GROUP, number_layout
from ..plan.tensor_names import Shape
from .bits import FP4, nibbles, scales_of_exponents, unpack_fp4
from .stored_weight import StoredNumbers, StoredTensors, StoredWeight, check_divides, checked_scales, need, some_rows


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """A WeightFormat."""

    config: Mxfp4

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        blocks, scale_name = f"{name}_blocks", f"{name}_scales"
        if len(shape) != 3 or all(tensors.header(of) is None for of in (blocks, scale_name)):
            return None
        num, k, n = shape
        check_divides(tensors, name, MXFP4_GROUP, k)
        groups = k // MXFP4_GROUP
        need(tensors, blocks, [(num, n, groups, MXFP4_GROUP // 2)], ["U8"])
        need(tensors, scale_name, [(num, n, groups)], ["U8"])

        def rows(of: slice) -> Tensor:
            numbers = unpack_fp4(some_rows(tensors, blocks, of))  # [.., outputs, groups, 32]
            scales = checked_scales(tensors, scale_name, scales_of_exponents(some_rows(tensors, scale_name, of)))
            return numbers.mul_(scales[..., None]).flatten(-2).mT

        def numbers(at: tuple[int, ...], of: slice) -> WeightNumbers:
            exponents = scales_of_exponents(tensors.raw(scale_name, (*at, of, slice(None))))
            codes = nibbles(tensors.raw(blocks, (*at, of, slice(None), slice(None)))).flatten(1)
            return WeightNumbers(codes, checked_scales(tensors, scale_name, exponents), None, FP4)

        layout = number_layout(self.config, name, k)
        stored = None if layout is None else StoredNumbers(layout, numbers)
        return StoredWeight(shape, (blocks, scale_name), rows, stored)

    def is_spare(self, _tensors: StoredTensors, _name: str, /) -> bool:
        return False
