"""Numbers, scales and offsets of ggml's blocks, each as its description says (ggml/src/ggml-common.h, ggml-quants.c):
a block has a half-precision scale, of K types scales of its groups too, and numbers of few bits.

A weight is number x scale + offset. Float operations have the order of the original's, so that decoded weights are the
same in every bit. plan/ggml_layouts.py says what the compiled kernels make of each type's numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ..gguf.gguf_types import GgmlType
from .bits import FP4, scales_of_exponents

# Numbers that the nibbles of IQ4 stand for.
IQ4 = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
TABLES = {"IQ4_NL": IQ4, "IQ4_XS": IQ4, "MXFP4": FP4}
MIDDLE = 8  # of numbers of 4 bits that are stored from 0


@dataclass(frozen=True, slots=True)
class GgmlParts:
    """Parts of b blocks."""

    numbers: Tensor  # uint8 or int8 [b, block]
    scales: Tensor  # float32 [b, groups]
    offsets: Tensor | None = None  # float32 [b, groups]


def decode_blocks(raw: Tensor, of: GgmlType) -> Tensor:
    """raw: uint8 [n, bytes of a row]. Returns float32 [n, numbers of a row]."""
    parts = _PARTS[of.name](raw.reshape(-1, of.num_bytes))
    table = TABLES.get(of.name)
    numbers = parts.numbers.float() if table is None else table[parts.numbers.int()]
    found = numbers.unflatten(1, (parts.scales.shape[1], -1)) * parts.scales[:, :, None]
    if parts.offsets is not None:
        found += parts.offsets[:, :, None]
    return found.reshape(len(raw), -1)


def numbers_of_blocks(raw: Tensor, of: GgmlType) -> WeightNumbers:
    """raw: uint8 [n, bytes of a row]. Returns the numbers of the rows, within the range of their layout's."""
    parts = _PARTS[of.name](raw.reshape(-1, of.num_bytes))
    numbers, offsets = parts.numbers.to(torch.int8), parts.offsets
    if offsets is not None and of.name in _OF_16:
        numbers, offsets = numbers - MIDDLE, offsets + MIDDLE * parts.scales

    def by_row(of_blocks: Tensor) -> Tensor:
        return of_blocks.reshape(len(raw), -1).contiguous()

    wide = None if offsets is None else by_row(offsets)
    return WeightNumbers(by_row(numbers), by_row(parts.scales), wide, TABLES.get(of.name))


def half(blocks: Tensor, start: int) -> Tensor:
    """Half-precision numbers at byte `start` of each block, as float32 [b, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor, width: int) -> Tensor:
    """packed: uint8 [b, w]; of each `width` bytes, the low halves come before the high ones. Returns uint8 [b, 2 w]."""
    groups = packed.unflatten(1, (-1, width))
    return torch.stack((groups & 15, groups >> 4), dim=2).flatten(1)


def fields(packed: Tensor, width: int, bits: int) -> Tensor:
    """packed: uint8 [b, w]; of each `width` bytes, the lowest `bits` come first. Returns uint8 [b, w * 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (packed.unflatten(1, (-1, 1, width)) >> shifts & ((1 << bits) - 1)).flatten(1)


def bit_of_each(packed: Tensor) -> Tensor:
    """packed: uint8 [b, 4]. Returns uint8 [b, 32], 0 or 1, lowest bits first."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _signed(numbers: Tensor, middle: int) -> Tensor:
    return numbers.to(torch.int8) - middle


def _q4_0(blocks: Tensor) -> GgmlParts:
    return GgmlParts(_signed(nibbles(blocks[:, 2:], 16), 8), half(blocks, 0))


def _q4_1(blocks: Tensor) -> GgmlParts:
    return GgmlParts(nibbles(blocks[:, 4:], 16), half(blocks, 0), half(blocks, 2))


def _q5_0(blocks: Tensor) -> GgmlParts:
    numbers = nibbles(blocks[:, 6:], 16) | bit_of_each(blocks[:, 2:6]) << 4
    return GgmlParts(_signed(numbers, 16), half(blocks, 0))


def _q5_1(blocks: Tensor) -> GgmlParts:
    numbers = nibbles(blocks[:, 8:], 16) | bit_of_each(blocks[:, 4:8]) << 4
    return GgmlParts(numbers, half(blocks, 0), half(blocks, 2))


def _q8_0(blocks: Tensor) -> GgmlParts:
    return GgmlParts(blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0))


def _q2_k(blocks: Tensor) -> GgmlParts:
    scales, least = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    return GgmlParts(fields(blocks[:, 16:80], 32, 2), half(blocks, 80) * scales, -(half(blocks, 82) * least))


def _q3_k(blocks: Tensor) -> GgmlParts:
    """The third bit, of a mask, is 0 where 4 is to be subtracted. Scales have 6 bits: four low ones, as nibbles, and
    two high ones."""
    low, high = fields(blocks[:, 32:96], 32, 2), fields(blocks[:, :32], 32, 1)
    scales = nibbles(blocks[:, 96:104], 8) | fields(blocks[:, 104:108], 4, 2) << 4
    numbers = low.to(torch.int8) - ((high ^ 1) << 2).to(torch.int8)
    return GgmlParts(numbers, half(blocks, 108) * (scales.float() - 32))


def _scales_and_least(packed: Tensor) -> tuple[Tensor, Tensor]:
    """packed: uint8 [b, 12]: scales and minima of 8 groups, of 6 bits. The first four of each have bytes of their own,
    whose two high bits are the high bits of the last four; the low ones of these are nibbles. Returns both, float32
    [b, 8]."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    least = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return scales.float(), least.float()


def _q4_k(blocks: Tensor) -> GgmlParts:
    return _with_least(blocks, nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> GgmlParts:
    return _with_least(blocks, nibbles(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 32, 1) << 4)


def _with_least(blocks: Tensor, numbers: Tensor) -> GgmlParts:
    scales, least = _scales_and_least(blocks[:, 4:16])
    return GgmlParts(numbers, half(blocks, 0) * scales, -(half(blocks, 2) * least))


def _q6_k(blocks: Tensor) -> GgmlParts:
    numbers = nibbles(blocks[:, :128], 64) | fields(blocks[:, 128:192], 32, 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return GgmlParts(_signed(numbers, 32), half(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> GgmlParts:
    return GgmlParts(nibbles(blocks[:, 2:], 16), half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> GgmlParts:
    """Scales of 8 groups of 32 have 6 bits: nibbles, and two high bits each in 16 bits before them."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    scales = (low | fields(blocks[:, 2:4], 1, 2) << 4).float() - 32
    return GgmlParts(nibbles(blocks[:, 8:], 16), half(blocks, 0) * scales)


def _mxfp4(blocks: Tensor) -> GgmlParts:
    """OCP's numbers and exponents (bits.py), the low nibbles before the high ones."""
    return GgmlParts(nibbles(blocks[:, 1:], 16), scales_of_exponents(blocks[:, :1]))


_PARTS: dict[str, Callable[[Tensor], GgmlParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
_OF_16 = ("Q4_1", "Q4_K")  # types whose numbers are from 0 to 15
