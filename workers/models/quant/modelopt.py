"""Weights of NVIDIA ModelOpt's checkpoints: FP8 with one scale, and NVFP4.

    FP8    weight e4m3 [n, k]; weight_scale float32 []
    NVFP4  weight uint8 [n, k / 2], low nibble first; weight_scale e4m3 [n, k / 16]; weight_scale_2 float32 []

With NVFP4 a weight is number x scale x scale_2: scale_2 is the reciprocal of what compressed-tensors calls the global
scale.
"""

from dataclasses import dataclass

from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ..families.quantisation import Fp8, ModelOpt
from ..plan.number_layouts import number_layout
from ..plan.tensor_names import Shape
from .bits import FP4, nibbles, unpack_fp4
from .compressed_tensors import E4M3, SPARE
from .fp8 import Fp8Format
from .stored_weight import (
    StoredNumbers,
    StoredTensors,
    StoredWeight,
    check_divides,
    checked_scales,
    need,
    scaled,
    some_rows,
    whole,
)


@dataclass(frozen=True, slots=True)
class ModelOptFormat:
    """A WeightFormat."""

    config: ModelOpt

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        if self.config.algorithm == "FP8":
            return Fp8Format(Fp8(None)).find(tensors, name, shape)
        header = tensors.header(name)
        if header is None or header.dtype != "U8" or len(shape) != 2:
            return None
        (n, k), group = shape, self.config.group_size
        check_divides(tensors, name, group, k)
        scale_name, global_name = f"{name}_scale", f"{name}_scale_2"
        need(tensors, name, [(n, k // 2)], ["U8"])
        need(tensors, scale_name, [(n, k // group)], [E4M3])
        need(tensors, global_name, [(), (1,)], ["F32"])

        def scales(of: slice) -> Tensor:
            of_all = checked_scales(tensors, global_name, whole(tensors, global_name).reshape(()))
            found = checked_scales(tensors, scale_name, some_rows(tensors, scale_name, of)) * of_all
            return checked_scales(tensors, global_name, found)  # the product may be too large for float32

        def rows(of: slice) -> Tensor:
            return scaled(unpack_fp4(some_rows(tensors, name, of)), scales(of), group)

        def numbers(_: tuple[int, ...], of: slice) -> WeightNumbers:
            return WeightNumbers(nibbles(some_rows(tensors, name, of)), scales(of), None, FP4)

        layout = number_layout(self.config, name, k)
        stored = None if layout is None else StoredNumbers(layout, numbers)
        return StoredWeight(shape, (name, scale_name, global_name), rows, stored)

    def is_spare(self, _tensors: StoredTensors, name: str, /) -> bool:
        return name.rpartition(".")[2] in SPARE
