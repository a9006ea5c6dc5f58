"""Weights of 8-bit floats (e4m3) as published by their models: with a scale for each block (DeepSeek-V3, arXiv
2412.19437, section 3.3), or one for all.

    weight            e4m3 [n, k]
    weight_scale_inv  float32 (or E8M0) [blocks of n, blocks of k]: what numbers are multiplied by, despite the name
    weight_scale      float32 [] or [1], where there are no blocks; or under the other name, as transformers has it
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ...common.errors import CheckpointError
from ..families.quantisation import Fp8
from ..plan.number_layouts import number_layout
from ..plan.tensor_names import Shape
from .bits import scales_of_exponents
from .compressed_tensors import E4M3, SPARE
from .stored_weight import (
    FLOATS,
    StoredNumbers,
    StoredTensors,
    StoredWeight,
    bytes_of_fp8,
    checked_scales,
    floats_of_fp8,
    need,
    some_rows,
    whole,
)

E8M0 = "F8_E8M0"
BY_BLOCK, BY_TENSOR = "weight_scale_inv", "weight_scale"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """A WeightFormat."""

    config: Fp8

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        header = tensors.header(name)
        if header is None or header.dtype != E4M3 or len(shape) != 2:
            return None
        block, module = self.config.block, name.removesuffix(".weight")
        need(tensors, name, [shape], [E4M3])
        if block is None:
            scale_name, by_block = f"{module}.{BY_TENSOR}", tensors.header(f"{module}.{BY_BLOCK}")
            if tensors.header(scale_name) is None and by_block is not None:
                scale_name = f"{module}.{BY_BLOCK}"
            if scale_name.endswith(BY_BLOCK) and by_block is not None and math.prod(by_block.shape) != 1:
                raise CheckpointError(
                    f"{tensors.where(name)}: weight {name} has a scale for each block ({scale_name}), but "
                    "config.json has no weight_block_size"
                )
            need(tensors, scale_name, [(), (1,)], FLOATS)
        else:
            scale_name = f"{module}.{BY_BLOCK}"
            need(tensors, scale_name, [(-(-shape[0] // block[0]), -(-shape[1] // block[1]))], [*FLOATS, E8M0])
        high, wide = block or shape

        def scales(of: slice) -> Tensor:
            found = _scales(tensors, scale_name).reshape(1, 1) if block is None else _scales(tensors, scale_name)
            chosen = found[of.start // high : -(-of.stop // high)].repeat_interleave(high, dim=0)
            return chosen[of.start % high :][: of.stop - of.start]

        def rows(of: slice) -> Tensor:
            chosen = scales(of)
            numbers = floats_of_fp8(tensors, name, some_rows(tensors, name, of))
            for first in range(0, shape[1], wide):
                numbers[:, first : first + wide] *= chosen[:, first // wide, None]
            return numbers

        def numbers(_: tuple[int, ...], of: slice) -> WeightNumbers:
            return WeightNumbers(bytes_of_fp8(tensors, name, some_rows(tensors, name, of)), scales(of))

        layout = number_layout(self.config, module, shape[1])
        stored = None if layout is None else StoredNumbers(layout, numbers)
        return StoredWeight(shape, (name, scale_name), rows, stored)

    def is_spare(self, _tensors: StoredTensors, name: str, /) -> bool:
        return name.rpartition(".")[2] in SPARE


def _scales(tensors: StoredTensors, name: str) -> Tensor:
    scales = whole(tensors, name)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales_of_exponents(scales.view(torch.uint8))
    return checked_scales(tensors, name, scales)
