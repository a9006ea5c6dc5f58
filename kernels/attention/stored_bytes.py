"""Caches of 8-bit and 4-bit numbers (kv_scales.py) as the attention kernels read them: in words of 16 bits.

Matrix units multiply numbers of 16 bits. A word has their size, so that its loads, its copies through shared memory and
its places in registers are those of a cache of 16-bit numbers. There each word becomes two numbers, or four: the first
ones make one tile, the second ones another, and each is multiplied by its part of the queries or the weights. Of two
parts one has the even dims of a head, the other the odd ones; of four, two have those of its first half, and two those
of its second: a byte of 4-bit numbers has one of each.

Instructions that convert integers or float8 to bfloat16 are many times slower than others. On NVIDIA the bits are put
where the wider float has them instead, two numbers at a time, and a product moves the exponent. What comes out is the
stored number / unit, exactly: `unit` is a power of two that the kernels make up for, once for all.

Of 4 bits are Hadamard transforms H of keys and values, of TRANSFORM neighbours at a time. H H = TRANSFORM: so queries
are transformed and divided by it before they meet the keys, and what comes of the values, in the end, likewise. Matrix
units do both, by signs that are made where they are needed: once for a tile of queries, little beside its walk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, tl
from ..common.tuning import Chip
from ..kv.int4_tiles import half_columns, halves, joined
from ..kv.kv_scales import numbers_in, transform_size

# By dtype of the cache: the dtype of its words, which tells kernels what they hold.
_WORDS = {
    torch.int8: torch.int16,
    torch.float8_e4m3fn: torch.uint16,
    torch.float8_e5m2: torch.float16,
    torch.uint8: torch.bfloat16,
}
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

_NIBBLES = """{{
    .reg .b32 bytes, code, low, high, bias;
    mov.b32 low, {low};
    mov.b32 high, {high};
    mov.b32 bias, {bias};
    and.b32 code, $4, 0x000f000f;
    fma.rn.{kind}x2 $0, code, low, bias;
    and.b32 code, $4, 0x00f000f0;
    fma.rn.{kind}x2 $1, code, high, bias;
    shr.b32 bytes, $4, 8;
    and.b32 code, bytes, 0x000f000f;
    fma.rn.{kind}x2 $2, code, low, bias;
    and.b32 code, bytes, 0x00f000f0;
    fma.rn.{kind}x2 $3, code, high, bias;
}}"""


@dataclass(frozen=True)
class Widening:
    """Way in which kernels widen words."""

    unit: float = 1.0
    ptx: str = ""  # of two words (the last operand), to their two first, two second... numbers; empty: Triton's code

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


def _nibbles(kind: str, low: int, high: int, bias: int, unit: float) -> Widening:
    """Return the way for int4. A code, as the bits of a 16-bit float, is a subnormal or just beyond: `low` is the power
    of two that makes 2 c / unit of it, `high` of one that lies 4 bits higher, and the bias is -15 / unit."""
    return Widening(unit, _NIBBLES.format(kind=kind, low=_twice(low), high=_twice(high), bias=_twice(bias)))


def _twice(bits: int) -> str:
    return f"0x{bits:04x}{bits:04x}"


_ON_NVIDIA = {
    (torch.int8, torch.bfloat16): _whole("bf16", 0x7F00, 0xC000, unit=64.0),  # 2^-133 * 2^127, -2
    (torch.int8, torch.float16): _whole("f16", 0x7800, 0xB400, unit=512.0),  # 2^-24 * 2^15, -0.25
    (torch.uint8, torch.bfloat16): _nibbles("bf16", 0x7F00, 0x7D00, 0xBDF0, unit=128.0),  # 2^127, 2^123, -7.5 / 64
    (torch.uint8, torch.float16): _nibbles("f16", 0x7800, 0x6800, 0xA380, unit=1024.0),  # 2^15, 2^11, -7.5 / 512
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


def stored_words(cache: Tensor) -> Tensor:
    """cache: [..., bytes]. One of 8-bit or 4-bit numbers as [..., bytes / 2] words (the bytes, and every stride but the
    last, must be even), any other as it is."""
    return cache.view(_WORDS[cache.dtype]) if cache.dtype in _WORDS else cache


def layout_of(cache: Tensor) -> dict[str, int]:
    """Constants of a kernel: PARTS, the numbers of a word (1 of a cache that is not read in words), and TRANSFORM, of
    how many neighbours a 4-bit cache has the Hadamard transform (of any other 0)."""
    if numbers_in(cache.dtype) == 2:
        return {"PARTS": 4, "TRANSFORM": transform_size(2 * cache.shape[-1])}
    return {"PARTS": 2 if cache.dtype in _WORDS else 1, "TRANSFORM": 0}


@jit
def apart(x: tl.tensor, PARTS: tl.constexpr):
    """x: [M, N], columns as `columns` has them. A tuple of PARTS tiles, [M, N / PARTS]: the numbers of words that stand
    in the first place of each, in the second..."""
    if PARTS == 1:
        parts = (x,)
    elif PARTS == 2:
        even, odd = _even_and_odd(x)
        parts = (even, odd)
    else:
        one, two = halves(x)
        first, third = _even_and_odd(one)
        second, fourth = _even_and_odd(two)
        parts = (first, second, third, fourth)
    return parts


@jit
def _even_and_odd(x: tl.tensor):
    """x: [M, N]. Its even and its odd columns, each [M, N / 2]."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


@jit
def columns(DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Numbers of a vector of DIM that BLOCK columns of a tile have, and which columns have one: [BLOCK] int32, bool."""
    if PARTS == 4:
        d, inside = half_columns(DIM, BLOCK)
    else:
        d = tl.arange(0, BLOCK)
        inside = d < DIM
    return d, inside


@jit
def together(
    parts: tl.tuple,  # PARTS tiles, [M, N / PARTS] float32: sums of values
    total: tl.tensor,  # [M] float32: what they are divided by
    query: tl.tensor,  # of the dtype that matrix units multiply
    UNIT: tl.constexpr,
    TRANSFORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Undo `apart`, and the transform, and make up for the unit that the numbers were divided by: [M, N] float32."""
    if PARTS == 1:
        whole = parts[0] * UNIT / total[:, None]  # pyright: ignore[reportArgumentType]
    elif PARTS == 2:
        whole = tl.interleave(parts[0], parts[1]) * UNIT / total[:, None]  # pyright: ignore[reportArgumentType]
    else:
        factor = UNIT / TRANSFORM / total[:, None]
        first, second, third, fourth = transformed_parts(
            (parts[0] * factor).to(query.dtype),  # pyright: ignore[reportArgumentType]
            (parts[1] * factor).to(query.dtype),  # pyright: ignore[reportArgumentType]
            (parts[2] * factor).to(query.dtype),  # pyright: ignore[reportArgumentType]
            (parts[3] * factor).to(query.dtype),  # pyright: ignore[reportArgumentType]
            TRANSFORM,
        )
        whole = joined(tl.interleave(first, third), tl.interleave(second, fourth))
    return whole


@jit
def queries(rows: tl.tensor, PARTS: tl.constexpr, TRANSFORM: tl.constexpr):
    """rows: [M, N]. Queries as they meet the keys: `apart`, and transformed if TRANSFORM is not 0, divided by it and
    rounded once."""
    parts = apart(rows, PARTS)
    if TRANSFORM > 0:
        first, second, third, fourth = transformed_parts(parts[0], parts[1], parts[2], parts[3], TRANSFORM)
        parts = (
            (first / TRANSFORM).to(rows.dtype),
            (second / TRANSFORM).to(rows.dtype),
            (third / TRANSFORM).to(rows.dtype),
            (fourth / TRANSFORM).to(rows.dtype),
        )
    return parts


@jit
def _multiplied(part: tl.tensor, signs: tl.tensor):
    """part: [M, W]; signs: [SIDE, SIDE], SIDE divides W. Each SIDE neighbours by the signs, [M, W] float32."""
    SIDE: tl.constexpr = signs.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    rows = tl.reshape(part, (part.shape[0] * (part.shape[1] // SIDE), SIDE))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    return tl.reshape(tl.dot(rows, signs, input_precision="ieee"), part.shape)


@jit
def transformed_parts(
    first: tl.tensor,  # [M, W], parts of vectors
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    TRANSFORM: tl.constexpr,
):
    """Parts of the vectors' Hadamard transforms, float32 (`hadamard` of kv_scales.py, but for the order of its sums):
    of the columns of one part, then of neighbours, which lie in two parts of one half."""
    AT_ONCE: tl.constexpr = TRANSFORM // 2
    if AT_ONCE > 1:
        # Matrix units take 16 and more.
        SIDE: tl.constexpr = AT_ONCE if AT_ONCE > 16 else 16  # pyright: ignore[reportAssignmentType]
        i = tl.arange(0, SIDE)[:, None]
        j = tl.arange(0, SIDE)[None, :]
        ones = i & j & (AT_ONCE - 1)  # an element is 1 where these are of an even number, else -1
        ones ^= ones >> 4
        ones ^= ones >> 2
        ones ^= ones >> 1
        signs = tl.where(i // AT_ONCE == j // AT_ONCE, 1 - 2 * (ones & 1), 0).to(first.dtype)
        first, second = _multiplied(first, signs), _multiplied(second, signs)
        third, fourth = _multiplied(third, signs), _multiplied(fourth, signs)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        third, fourth = third.to(tl.float32), fourth.to(tl.float32)
    if TRANSFORM > 1:
        first, third = first + third, first - third
        second, fourth = second + fourth, second - fourth
    return first, second, third, fourth


@jit
def widened(stored: tl.tensor, query: tl.tensor, PTX: tl.constexpr):
    """A tuple of the first, the second... numbers of words, in the dtype of `query`, divided by the unit of their
    widening. stored: of a dtype of _WORDS."""
    if stored.dtype == tl.bfloat16:
        parts = _four(stored.to(tl.int16, bitcast=True), query, PTX)
    elif PTX != "":
        parts = tl.inline_asm_elementwise(
            PTX,  # pyright: ignore[reportArgumentType]
            "=r,=r,r",
            [stored.to(tl.int16, bitcast=True)],
            (query.dtype, query.dtype),
            is_pure=True,
            pack=2,
        )
    elif stored.dtype == tl.int16:
        parts = (((stored << 8) >> 8).to(query.dtype), (stored >> 8).to(query.dtype))
    else:
        bits = stored.to(tl.uint16, bitcast=True)
        if stored.dtype == tl.uint16:
            # The fields of a float8_e4m3fn are those of a float16 whose exponent counts from 8 higher (subnormals too).
            low, high = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7), (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        else:
            low, high = bits << 8, bits & 0xFF00
        parts = (
            low.to(tl.float16, bitcast=True).to(query.dtype),
            high.to(tl.float16, bitcast=True).to(query.dtype),
        )
    return parts


@jit
def _four(bits: tl.tensor, query: tl.tensor, PTX: tl.constexpr):
    """bits: int16, words of 4-bit numbers; as `widened` has it."""
    if PTX != "":
        parts = tl.inline_asm_elementwise(
            PTX,  # pyright: ignore[reportArgumentType]
            "=r,=r,=r,=r,r",
            [bits],
            (query.dtype, query.dtype, query.dtype, query.dtype),
            is_pure=True,
            pack=2,
        )
    else:
        parts = (
            ((bits & 15) * 2 - 15).to(query.dtype),
            (((bits >> 4) & 15) * 2 - 15).to(query.dtype),
            (((bits >> 8) & 15) * 2 - 15).to(query.dtype),
            (((bits >> 12) & 15) * 2 - 15).to(query.dtype),
        )
    return parts
