"""Decodes ggml's blocks of numbers, each as its description says (ggml/src/ggml-common.h, ggml-quants.c): a block has
a half-precision scale, of K types scales of its groups too, and numbers of few bits.

Float operations have the order of the original's, so that results are the same in every bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .bits import FP4, scales_of_exponents

# Numbers that the nibbles of IQ4 stand for.
IQ4 = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def decode_blocks(raw: Tensor, type_name: str, block: int, num_bytes: int) -> Tensor:
    """raw: uint8 [n, bytes of a row]. Returns float32 [n, numbers of a row]. type_name: a key of gguf_types.BLOCKS;
    block: its numbers, num_bytes: what they take."""
    blocks = raw.reshape(-1, num_bytes)
    return _DECODERS[type_name](blocks).reshape(len(raw), raw.shape[1] // num_bytes * block)


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


def _by_groups(numbers: Tensor, scales: Tensor) -> Tensor:
    """numbers: float32 [b, k]; scales: float32 [b, groups]. Returns [b, groups, k / groups], multiplied."""
    return numbers.unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]


def _q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * nibbles(blocks[:, 4:], 16).float() + half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    high = bit_of_each(blocks[:, 2:6])
    return half(blocks, 0) * ((nibbles(blocks[:, 6:], 16) | high << 4).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    high = bit_of_each(blocks[:, 4:8])
    return half(blocks, 0) * (nibbles(blocks[:, 8:], 16) | high << 4).float() + half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, numbers = blocks[:, :16], fields(blocks[:, 16:80], 32, 2).float()
    least = half(blocks, 82) * (scales >> 4).float()
    return (_by_groups(numbers, half(blocks, 80) * (scales & 15).float()) - least[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """The third bit, of a mask, is 0 where 4 is to be subtracted. Scales have 6 bits: four low ones, as nibbles, and
    two high ones."""
    low, high = fields(blocks[:, 32:96], 32, 2), fields(blocks[:, :32], 32, 1)
    numbers = low.float() - ((high ^ 1) << 2).float()
    scales = nibbles(blocks[:, 96:104], 8) | fields(blocks[:, 104:108], 4, 2) << 4
    return _by_groups(numbers, half(blocks, 108) * (scales.float() - 32)).flatten(1)


def scales_and_least(packed: Tensor) -> tuple[Tensor, Tensor]:
    """packed: uint8 [b, 12]: scales and minima of 8 groups, of 6 bits. The first four of each have bytes of their own,
    whose two high bits are the high bits of the last four; the low ones of these are nibbles. Returns both, float32
    [b, 8]."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    least = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return scales.float(), least.float()


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_least(blocks, nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_least(blocks, nibbles(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 32, 1) << 4)


def _with_least(blocks: Tensor, numbers: Tensor) -> Tensor:
    scales, least = scales_and_least(blocks[:, 4:16])
    least = half(blocks, 2) * least
    return (_by_groups(numbers.float(), half(blocks, 0) * scales) - least[:, :, None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    numbers = nibbles(blocks[:, :128], 64) | fields(blocks[:, 128:192], 32, 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _by_groups(numbers.float() - 32, half(blocks, 208) * scales).flatten(1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * IQ4[nibbles(blocks[:, 2:], 16).int()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Scales of 8 groups of 32 have 6 bits: nibbles, and two high bits each in 16 bits before them."""
    high = fields(blocks[:, 2:4], 1, 2)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    scales = (low | high << 4).float() - 32
    return _by_groups(IQ4[nibbles(blocks[:, 8:], 16).int()], half(blocks, 0) * scales).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """OCP's numbers and exponents (bits.py), the low nibbles before the high ones."""
    return FP4[nibbles(blocks[:, 1:], 16).int()] * scales_of_exponents(blocks[:, :1])


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
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
