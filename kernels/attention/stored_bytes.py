"""Caches of 8-bit numbers (kv_scales.py) as the attention kernels read them: as pairs of bytes.

Matrix units multiply numbers of 16 bits. A pair of bytes has their size, so that its loads, its copies through shared
memory and its places in registers are those of a cache of 16-bit numbers. There each pair becomes two numbers: the even
dims of a head make one tile, the odd dims another, and each is multiplied by its half of the queries or the weights.

Instructions that convert integers or float8 to bfloat16 are many times slower than others. On NVIDIA the bits are put
where the wider float has them instead, two numbers at a time, and a product moves the exponent. What comes out is the
stored number / unit, exactly: `unit` is a power of two that the kernels make up for, once for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, tl
from ..common.tuning import Chip

# By dtype of the cache: the dtype of its pairs, which tells kernels what the bytes are.
_PAIRS = {torch.int8: torch.int16, torch.float8_e4m3fn: torch.uint16, torch.float8_e5m2: torch.float16}
_WHOLE = """{{
    .reg .b32 bytes, byte, power, bias;
    mov.b32 power, {power};
    mov.b32 bias, {bias};
    xor.b32 bytes, $2, 0x80808080;
    and.b32 byte, bytes, 0x00ff00ff;
    fma.rn.{kind}x2 $0, byte, power, bias;
    prmt.b32 byte, bytes, 0, 0x4341;
    fma.rn.{kind}x2 $1, byte, power, bias;
}}"""
_FLOATS = """{{
    .reg .b32 bits, power, zero;
    mov.b32 power, {power};
    mov.b32 zero, 0x80008000;
    prmt.b32 bits, $2, 0, 0xa280;
    shl.b32 bits, bits, {shift};
    and.b32 bits, bits, {mask};
    fma.rn.{kind}x2 $0, bits, power, zero;
    prmt.b32 bits, $2, 0, 0xb391;
    shl.b32 bits, bits, {shift};
    and.b32 bits, bits, {mask};
    fma.rn.{kind}x2 $1, bits, power, zero;
}}"""


@dataclass(frozen=True)
class Widening:
    """Way in which kernels widen pairs of bytes."""

    unit: float = 1.0
    ptx: str = ""  # of two pairs ($2), to their two first ($0) and their two second numbers ($1); empty: Triton's code

    @property
    def flags(self) -> dict[str, float | str]:
        """The constants of a kernel that widens so."""
        return {"UNIT": self.unit, "PTX": self.ptx}


def _whole(kind: str, power: int, bias: int, unit: float) -> Widening:
    """Return the way for int8. A byte, its highest bit flipped, is the number + 128; and as the bits of a 16-bit float,
    where it is a subnormal or just beyond, a small power of two times that."""
    return Widening(unit, _WHOLE.format(kind=kind, power=_twice(power), bias=_twice(bias)))


def _floats(kind: str, shift: int, mask: int, power: int, unit: float = 1.0) -> Widening:
    """Return the way for float8. The sign's copies fill the byte before the number's; then both move to where the wider
    float has its fields, of which its exponent counts from elsewhere (subnormals too)."""
    return Widening(unit, _FLOATS.format(kind=kind, shift=shift, mask=_twice(mask), power=_twice(power)))


def _twice(bits: int) -> str:
    return f"0x{bits:04x}{bits:04x}"


_ON_NVIDIA = {
    (torch.int8, torch.bfloat16): _whole("bf16", 0x7F00, 0xC000, unit=64.0),  # 2^-133 * 2^127, -2
    (torch.int8, torch.float16): _whole("f16", 0x7800, 0xB400, unit=512.0),  # 2^-24 * 2^15, -0.25
    (torch.float8_e4m3fn, torch.bfloat16): _floats("bf16", 4, 0x87F0, 0x7B80),  # 2^120
    (torch.float8_e4m3fn, torch.float16): _floats("f16", 7, 0xBF80, 0x5C00),  # 2^8
    (torch.float8_e5m2, torch.bfloat16): _floats("bf16", 5, 0x8FE0, 0x7780),  # 2^112
    (torch.float8_e5m2, torch.float16): _floats("f16", 8, 0xFF00, 0x3C00),  # 1
}


def widening_of(chip: Chip, cache: Tensor, query: torch.dtype) -> Widening:
    """Return how kernels on the chip widen the cache's numbers for queries of this dtype."""
    if any(kind.startswith("sm_") for kind in chip.kinds) and (cache.dtype, query) in _ON_NVIDIA:
        return _ON_NVIDIA[cache.dtype, query]
    return Widening(256.0 if cache.dtype == torch.float8_e4m3fn else 1.0)


def stored_pairs(cache: Tensor) -> Tensor:
    """cache: [..., D]. One of 8-bit numbers as [..., D / 2] pairs (D, and every stride but the last, must be even), any
    other as it is."""
    return cache.view(_PAIRS[cache.dtype]) if cache.dtype in _PAIRS else cache


@jit
def apart(x: tl.tensor, IN_PAIRS: tl.constexpr):
    """x: [M, N]. Its even and its odd columns, each [M, N / 2]; whole, twice, unless IN_PAIRS."""
    if IN_PAIRS:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    else:
        even, odd = x, x
    return even, odd


@jit
def together(even: tl.tensor, odd: tl.tensor, UNIT: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Undo `apart`, and make up for the unit that the numbers were divided by."""
    return (tl.interleave(even, odd) if IN_PAIRS else even) * UNIT


@jit
def widened(stored: tl.tensor, query: tl.tensor, PTX: tl.constexpr):
    """The first and the second numbers of pairs, in the dtype of `query`, divided by the unit of their widening."""
    if PTX != "":
        bits = stored.to(tl.int16, bitcast=True)
        first, second = tl.inline_asm_elementwise(
            PTX,  # pyright: ignore[reportArgumentType]
            "=r,=r,r",
            [bits],
            (query.dtype, query.dtype),
            is_pure=True,
            pack=2,
        )
    elif stored.dtype == tl.int16:
        first, second = ((stored << 8) >> 8).to(query.dtype), (stored >> 8).to(query.dtype)
    else:
        bits = stored.to(tl.uint16, bitcast=True)
        if stored.dtype == tl.uint16:
            # The fields of a float8_e4m3fn are those of a float16 whose exponent counts from 8 higher (subnormals too).
            low, high = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7), (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        else:
            low, high = bits << 8, bits & 0xFF00
        first, second = (
            low.to(tl.float16, bitcast=True).to(query.dtype),
            high.to(tl.float16, bitcast=True).to(query.dtype),
        )
    return first, second
