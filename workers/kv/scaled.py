"""Vectors of scaled dtypes (kv/dtypes.py): from float32 and back. numpy, no torch.

kernels/kv/kv_scales.py does the same in torch, kernels/cpu/src/scaled.h in C++, bit for bit: a vector is stored alike
by whoever computes it and by a hand-off that converts it.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .dtypes import LARGEST_STORED, SCALE_BYTES, SMALLEST, stored_size, transform_size

Rows: TypeAlias = NDArray[np.uint8]  # [vectors, vector_bytes]
Floats: TypeAlias = NDArray[np.float32]


def quantised(values: Floats, dtype: str) -> Rows:
    """values: [vectors, head_dim]; dtype: a scaled one. Rounds to nearest, ties to even (of int4: up). What is no
    number (slots that were never written may hold any bits) makes no number of its vector."""
    rows = np.empty((len(values), SCALE_BYTES + stored_size(dtype, values.shape[1])), np.uint8)
    largest_stored = np.float32(LARGEST_STORED[dtype])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        values = hadamard(values) if dtype == "int4" else values
        largest = np.abs(values).max(axis=1)
        is_zero = largest < np.float32(SMALLEST)
        scales = (largest / largest_stored).view(np.uint32) + 0xFFFF & 0xFFFF0000  # up to a bfloat16
        inverse = np.where(is_zero, np.float32(0), np.float32(1) / scales.view(np.float32))
        scaled = values * inverse[:, None]
        rows[:, SCALE_BYTES:] = _ROUND[dtype](scaled)
    halves = np.where(is_zero, 0, np.where(np.isnan(largest), 0x7FC0, scales >> 16)).astype("<u2")
    rows[:, :SCALE_BYTES] = halves.view(np.uint8).reshape(-1, SCALE_BYTES)
    return rows


def dequantised(rows: Rows, dtype: str) -> Floats:
    """rows: [vectors, vector_bytes], contiguous. Returns [vectors, head_dim]."""
    scales = (np.ascontiguousarray(rows[:, :SCALE_BYTES]).view("<u2").astype(np.uint32) << 16).view(np.float32)
    stored = rows[:, SCALE_BYTES:]
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype == "int4":
            codes = np.concatenate((stored & 15, stored >> 4), axis=1)
            values = (2 * codes.astype(np.float32) - 15) * scales
            return hadamard(values) / np.float32(transform_size(values.shape[1]))
        numbers: NDArray[Any] = stored.view(np.int8) if dtype == "int8" else _FP8[stored]
        return numbers * scales


def hadamard(values: Floats) -> Floats:
    """Transform of each `transform_size` neighbours, in Sylvester's order, not divided by anything. values:
    [vectors, head_dim]. A sum's terms are added in one order, the nearest first."""
    size, at = transform_size(values.shape[1]), 1
    while at < size:
        pairs = values.reshape(len(values), -1, 2, at)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack((first + second, first - second), axis=2).reshape(values.shape)
        at *= 2
    return values


def _to_int8(scaled: Floats) -> Rows:
    return np.rint(scaled).astype(np.int8).view(np.uint8)


def _to_int4(scaled: Floats) -> Rows:
    codes = (np.floor(scaled * np.float32(0.5)).astype(np.int32) + 8 & 15).astype(np.uint8)
    first, second = np.split(codes, 2, axis=1)
    return np.bitwise_or(first, second << 4, dtype=np.uint8)


def _to_fp8(scaled: Floats) -> Rows:
    """e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): 4 bits of exponent, 3 of mantissa."""
    magnitude = np.abs(scaled)
    bits = magnitude.view(np.uint32)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20) - ((127 - 7) << 3)
    tiny = np.rint(magnitude * np.float32(512))  # below 2^-6 numbers are multiples of 2^-9
    code = np.where(magnitude < np.float32(2**-6), tiny.astype(np.uint32), normal)
    code = np.where(np.isnan(scaled), np.uint32(0x7F), code)
    return (code | (scaled.view(np.uint32) >> 24 & 0x80)).astype(np.uint8)


def _fp8_numbers() -> Floats:
    """[256]: the number of each code; 0x7F and 0xFF are none."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 0xF, code & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    numbers = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
    numbers[(code & 0x7F) == 0x7F] = np.nan
    return numbers


_FP8 = _fp8_numbers()
_ROUND = {"int8": _to_int8, "fp8": _to_fp8, "int4": _to_int4}
