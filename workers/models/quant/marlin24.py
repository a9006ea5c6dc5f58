"""Weights of compressed-tensors for the kernel Marlin-24 (`marlin-24`): whole numbers of 4 or 8 bits, of which two of
four neighbours are there, in the order of a GPU's tensor cores. They are put back in order, and expanded.

    {module}.weight_packed  int32 [k / 32, 16 n bits / 32]: tiles of 16 inputs (of those that are there) and 16 outputs;
                            four tiles beside one another are permuted together, and packed lowest first
    {module}.scale_packed   float16 [k / group, n], permuted in 64s where there are several groups
    {module}.meta           int16 [k / 32, 2 n]: which two of each four, in CUTLASS's order of metadata

As written by compressed-tensors until 0.12 (compressors/sparse_quantized_compressors/marlin_24.py), from IST-DASLab's
Sparse-Marlin (https://github.com/IST-DASLab/Sparse-Marlin); metadata as in CUTLASS, tools/util/.../host_reorder.h.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..families.compressed_config import CompressedTensors, SchemeGroup
from ..plan.tensor_names import Shape
from .bits import unpack_words
from .stored_weight import (
    StoredTensors,
    StoredWeight,
    WeightFormat,
    check_divides,
    checked_scales,
    need,
    whole,
)

PARTS = ("weight_packed", "scale_packed", "meta")
TILE, BLOCK = 16, 64  # inputs or outputs of a tile; outputs that are permuted together
INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}  # by bits: numbers of a word, of their order before
_OF_SCALES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Marlin24Format:
    """A WeightFormat."""

    config: CompressedTensors
    inner: WeightFormat  # of weights that are stored otherwise

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        module = name.removesuffix(".weight")
        names = tuple(f"{module}.{part}" for part in PARTS)
        if not name.endswith(".weight") or len(shape) != 2 or tensors.header(names[0]) is None:
            return self.inner.find(tensors, name, shape)
        stored = tensors.stored_name(names[0]).removesuffix(f".{PARTS[0]}")
        group = self.config.group_of(stored) or self.config.group_of(module)
        if group is None or group.format != self.config.MARLIN:
            return self.inner.find(tensors, name, shape)
        self._check(tensors, name, shape, group)
        return StoredWeight(shape, names, lambda of: _rows(tensors, module, shape, group, of))

    def is_spare(self, tensors: StoredTensors, name: str, /) -> bool:
        return self.inner.is_spare(tensors, name)

    def _check(self, tensors: StoredTensors, name: str, shape: Shape, group: SchemeGroup) -> None:
        (n, k), module = shape, name.removesuffix(".weight")
        if group.bits not in INTERLEAVED or not group.is_symmetric or n % BLOCK or k % (2 * TILE):
            raise CheckpointError(
                f"{tensors.where(f'{module}.{PARTS[0]}')}: weight {name} must be symmetric, of 4 or 8 bits, with a "
                f"multiple of {BLOCK} outputs and of {2 * TILE} inputs; found {group.bits} bits of {list(shape)}"
            )
        size = group.group_size or k
        check_divides(tensors, name, size, k)
        need(tensors, f"{module}.weight_packed", [(k // (2 * TILE), n * TILE * group.bits // 32)], ["I32"])
        need(tensors, f"{module}.scale_packed", [(k // size, n)], ["F16"])
        need(tensors, f"{module}.meta", [(k // (2 * TILE), 2 * n)], ["I16"])


def _rows(tensors: StoredTensors, module: str, shape: Shape, group: SchemeGroup, of: slice) -> Tensor:
    n, k = shape
    low, high = of.start // BLOCK * BLOCK, -(-of.stop // BLOCK) * BLOCK
    numbers = _numbers(tensors, f"{module}.weight_packed", group.bits, low, high)
    first, second = _places(tensors, f"{module}.meta", n, low, high)
    dense = torch.zeros(high - low, k // 4, 4)
    dense.scatter_(2, torch.stack((first, second), dim=2), numbers.unflatten(1, (-1, 2)))
    size = group.group_size or k
    scales = _scales(tensors, f"{module}.scale_packed", is_permuted=size < k // 2)[low:high]
    found = dense.flatten(1).unflatten(1, (-1, size)).mul_(scales[:, :, None]).flatten(1)
    return found[of.start - low : of.stop - low]


def _numbers(tensors: StoredTensors, name: str, bits: int, low: int, high: int) -> Tensor:
    """Numbers that are there, of some rows: float32 [n, k / 2]."""
    per_row = TILE * bits // 32
    packed = whole(tensors, name)[:, low * per_row : high * per_row]
    mixed = unpack_words(packed.contiguous(), bits, (high - low) * TILE).reshape(-1, BLOCK * TILE)
    tiles = torch.empty_like(mixed)
    tiles[:, _permutation(bits)] = mixed
    inputs = len(packed)
    ordered = tiles.reshape(inputs, (high - low) // TILE, TILE, TILE).permute(1, 3, 0, 2)
    return ordered.reshape(high - low, inputs * TILE).float() - (1 << (bits - 1))


def _permutation(bits: int) -> Tensor:
    """Places in four tiles, one after the other, of what is stored: int64 [1024]. A thread of the 32 of a warp has four
    inputs of two outputs, four apart, in each tile."""
    thread, column, place = torch.arange(32)[:, None, None], torch.arange(4)[:, None], torch.arange(8)
    group = thread // 4
    row = 2 * (thread % 4) + place % 2 + 8 * (place % 4 // 2)
    found = TILE * row + group // 2 * TILE * TILE + 8 * (group % 2) + 4 * (place // 4) + column
    order = INTERLEAVED[bits]
    return found.reshape(-1, len(order))[:, list(order)].reshape(-1)


def _places(tensors: StoredTensors, name: str, n: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Places, among each four neighbours, of the two that are there, in some rows: two int64 [n, k / 4]."""
    meta = whole(tensors, name).reshape(-1)
    words = meta[meta_places(n, len(meta) // n, low, high)].int()
    quads = (words[:, :, None] >> torch.arange(0, 16, 4, dtype=torch.int32) & 15).flatten(1).long()
    first, second = quads & 3, quads >> 2
    if (first >= second).any():
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} must name two of each four: fetch it again")
    return first, second


def meta_places(n: int, columns: int, low: int, high: int) -> Tensor:
    """Places of the metadata of some of `n` rows, as CUTLASS orders them: int64 [rows, columns]."""
    rows, column = torch.arange(low, high)[:, None], torch.arange(columns)[None]
    row = rows // 64 * 64 + rows % 2 * 2 + rows % 8 // 4 + rows % 4 // 2 * 32 + rows % 64 // 8 * 4
    swap = ((row % 2 == 0) & (column % 2 == 1)).long() - ((row % 2 == 1) & (column % 2 == 0)).long()
    row, column = row + swap, column - swap
    return column // 2 * 2 * n + 2 * row + column % 2


def _scales(tensors: StoredTensors, name: str, *, is_permuted: bool) -> Tensor:
    """Scales of all rows: float32 [n, groups]."""
    stored = checked_scales(tensors, name, whole(tensors, name))
    if not is_permuted:
        return stored.T
    order = (torch.arange(0, BLOCK, 8)[:, None] + torch.tensor(_OF_SCALES)).reshape(-1)
    mixed = stored.reshape(-1, BLOCK)
    found = torch.empty_like(mixed)
    found[:, order] = mixed
    return found.reshape(stored.shape).T
