"""Numbers of ggml's blocks as they are stored, with scales and offsets of their groups: ggml_blocks.py says what the
bytes are, plan/ggml_layouts.py which numbers the compiled kernels make of each type."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....kernels.cpu.linear import WeightNumbers
from ..gguf.gguf_types import GgmlType
from .bits import FP4, scales_of_exponents
from .ggml_blocks import IQ4, bit_of_each, fields, half, nibbles, scales_and_least

# [b, block] whole numbers, [b, groups] scales, and as many offsets where there are some.
Parts = tuple[Tensor, Tensor, Tensor | None]
TABLES = {"IQ4_NL": IQ4, "IQ4_XS": IQ4, "MXFP4": FP4}


def numbers_of_blocks(raw: Tensor, of: GgmlType) -> WeightNumbers:
    """raw: uint8 [n, bytes of a row]. Returns the numbers of the rows."""
    numbers, scales, offsets = _PARTS[of.name](raw.reshape(-1, of.num_bytes))

    def by_row(of_blocks: Tensor) -> Tensor:
        return of_blocks.reshape(len(raw), -1).contiguous()

    wide = None if offsets is None else by_row(offsets.float())
    return WeightNumbers(by_row(numbers.to(torch.int8)), by_row(scales.float()), wide, TABLES.get(of.name))


def _q4_0(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 2:], 16).to(torch.int8) - 8, half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scales = half(blocks, 0)
    return nibbles(blocks[:, 4:], 16).to(torch.int8) - 8, scales, half(blocks, 2) + 8 * scales


def _q5_0(blocks: Tensor) -> Parts:
    numbers = nibbles(blocks[:, 6:], 16) | bit_of_each(blocks[:, 2:6]) << 4
    return numbers.to(torch.int8) - 16, half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 8:], 16) | bit_of_each(blocks[:, 4:8]) << 4, half(blocks, 0), half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0), None


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    least = half(blocks, 82) * (scales >> 4).float()
    return fields(blocks[:, 16:80], 32, 2), half(blocks, 80) * (scales & 15).float(), -least


def _q3_k(blocks: Tensor) -> Parts:
    low, high = fields(blocks[:, 32:96], 32, 2), fields(blocks[:, :32], 32, 1)
    scales = nibbles(blocks[:, 96:104], 8) | fields(blocks[:, 104:108], 4, 2) << 4
    return low.to(torch.int8) - ((high ^ 1) << 2).to(torch.int8), half(blocks, 108) * (scales.float() - 32), None


def _q4_k(blocks: Tensor) -> Parts:
    scales, least = scales_and_least(blocks[:, 4:16])
    scales = half(blocks, 0) * scales
    return nibbles(blocks[:, 16:], 32).to(torch.int8) - 8, scales, 8 * scales - half(blocks, 2) * least


def _q5_k(blocks: Tensor) -> Parts:
    scales, least = scales_and_least(blocks[:, 4:16])
    numbers = nibbles(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 32, 1) << 4
    return numbers, half(blocks, 0) * scales, -half(blocks, 2) * least


def _q6_k(blocks: Tensor) -> Parts:
    numbers = nibbles(blocks[:, :128], 64) | fields(blocks[:, 128:192], 32, 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return numbers.to(torch.int8) - 32, half(blocks, 208) * scales, None


def _iq4_nl(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 2:], 16), half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Parts:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    scales = (low | fields(blocks[:, 2:4], 1, 2) << 4).float() - 32
    return nibbles(blocks[:, 8:], 16), half(blocks, 0) * scales, None


def _mxfp4(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 1:], 16), scales_of_exponents(blocks[:, :1]), None


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
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
