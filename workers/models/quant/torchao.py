"""Weights of torchao (https://github.com/pytorch/ao) as transformers saves them in safetensors: a weight is some
tensors, named after the fields of torchao's class.

    _weight_qdata       int8 [n, k] (Int8Tensor, and IntxUnpackedToInt8Tensor, which holds fewer bits), or e4m3 [n, k]
                        (Float8Tensor)
    _weight_scale       a float for each block of [n, k], in as many rows and columns: by row, by group, by tensor
    _weight_zero_point  int8 of the same shape, of whole numbers alone

A weight is (number - zero point) x scale. Int4Tensor is other:

    _weight_qdata       int8 [n, k / 2]: signed numbers of 4 bits, the low half first
    _weight_scale, _weight_zero_point  floats [groups, n]

A weight is number x scale + zero point. Other classes pack numbers as a GPU's kernels want them, and are refused.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..families.quantisation import TorchAo
from ..plan.tensor_names import Shape
from .compressed_tensors import E4M3
from .stored_weight import (
    FLOATS,
    Header,
    StoredTensors,
    StoredWeight,
    checked_scales,
    floats_of_fp8,
    need,
    some_rows,
    whole,
)

DATA, SCALE, ZERO, BEFORE = "_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale"
SPARE = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")


@dataclass(frozen=True, slots=True)
class TorchAoFormat:
    """A WeightFormat."""

    config: TorchAo

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        prefix = name.removesuffix("weight")
        data, scale, zero = f"{prefix}{DATA}", f"{prefix}{SCALE}", f"{prefix}{ZERO}"
        header = tensors.header(data)
        if header is None or not name.endswith(".weight") or len(shape) != 2:
            return None
        if tensors.header(f"{prefix}{BEFORE}") is not None:
            raise CheckpointError(f"{tensors.where(data)}: tensor {prefix}{BEFORE} scales activations: it is not read")
        if header == Header((shape[0], shape[1] // 2), "I8") and shape[1] % 2 == 0:
            return _int4(tensors, (data, scale, zero), shape)
        need(tensors, data, [shape], ["I8", E4M3])
        block = _block(tensors, scale, shape)
        names = [data, scale]
        if tensors.header(zero) is not None:
            scales = tensors.header(scale)
            assert scales is not None
            need(tensors, zero, [scales.shape], ["I8"])
            names.append(zero)

        def rows(of: slice) -> Tensor:
            stored = some_rows(tensors, data, of)
            numbers = stored.float() if header.dtype == "I8" else floats_of_fp8(tensors, data, stored)
            if zero in names:
                numbers -= _spread(whole(tensors, zero).float(), block, of)
            return numbers.mul_(_spread(checked_scales(tensors, scale, whole(tensors, scale)), block, of))

        return StoredWeight(shape, tuple(names), rows)

    def is_spare(self, _tensors: StoredTensors, name: str, /) -> bool:
        return name.endswith(SPARE)


def _int4(tensors: StoredTensors, names: tuple[str, str, str], shape: Shape) -> StoredWeight:
    """Find an Int4Tensor. names: of numbers, scales and zero points."""
    (n, k), (data, scale, zero) = shape, names
    header = tensors.header(scale)
    groups = header.shape[0] if header is not None and len(header.shape) == 2 else 1
    if not groups or k % groups:
        raise CheckpointError(
            f"{tensors.where(scale)}: tensor {scale} must have groups that divide {k} inputs, found {groups}"
        )
    for name in (scale, zero):
        need(tensors, name, [(groups, n)], FLOATS)

    def rows(of: slice) -> Tensor:
        packed = some_rows(tensors, data, of)
        numbers = torch.stack((packed << 4 >> 4, packed >> 4), dim=-1).flatten(1).float()  # with their signs
        scales, zeros = (
            checked_scales(tensors, name, tensors.raw(name, (slice(None), of))).T for name in (scale, zero)
        )
        return numbers.unflatten(1, (groups, -1)).mul_(scales[:, :, None]).add_(zeros[:, :, None]).flatten(1)

    return StoredWeight(shape, names, rows)


def _block(tensors: StoredTensors, scale: str, shape: Shape) -> tuple[int, int]:
    """Return how many rows and columns of a weight share a scale. Raises CheckpointError."""
    header = tensors.header(scale)
    num = header.shape if header is not None else (shape[0], 1)
    num = (1, 1) if num in ((), (1,)) else num
    if len(num) != 2 or not all(num) or shape[0] % num[0] or shape[1] % num[1]:
        raise CheckpointError(
            f"{tensors.where(scale)}: tensor {scale} must have scales that divide {list(shape)}, found {list(num)}"
        )
    need(tensors, scale, [num, *(((), (1,)) if num == (1, 1) else ())], FLOATS)
    return shape[0] // num[0], shape[1] // num[1]


def _spread(values: Tensor, block: tuple[int, int], of: slice) -> Tensor:
    """values: float32, one for each block. Returns those of some rows: [n or 1, k or 1]."""
    values = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    high, wide = block
    if len(values) > 1:
        first = of.start // high
        values = values[first : -(-of.stop // high)].repeat_interleave(high, dim=0)[of.start - first * high :]
        values = values[: of.stop - of.start]
    return values if values.shape[1] == 1 else values.repeat_interleave(wide, dim=1)
