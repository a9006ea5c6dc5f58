"""KV of 4 bits in kernels: the Hadamard transform of a tile of vectors, and their numbers in bytes.

kv_scales.py says what is stored, and is the twin: bit for bit, of kernels launched with `enable_fp_fusion=False`.
"""

from __future__ import annotations

from ..common.lang import jit, tl


@jit
def transformed(x: tl.tensor, SIZE: tl.constexpr):
    """Transform each SIZE neighbours as `hadamard` does. x: [M, N] float32; SIZE: a power of two to 256, divides N."""
    for stage in tl.static_range(8):  # pyright: ignore[reportGeneralTypeIssues]
        if (1 << stage) < SIZE:
            x = _added_and_subtracted(x, 1 << stage, x.shape[0], x.shape[1])  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    return x


@jit
def _added_and_subtracted(x: tl.tensor, AT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """x: [M, N]. Sums of columns that are AT apart in place of the first ones, differences in place of the others."""
    first, second = tl.split(tl.permute(tl.reshape(x, (M, N // (2 * AT), 2, AT)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (M, N))


@jit
def packed(first: tl.tensor, second: tl.tensor, inverse: tl.tensor):
    """first, second: [M, N] float32, transformed halves; inverse: [M, 1], of scale_and_inverse. Returns their bytes,
    [M, N] uint8."""
    low = (tl.floor(first * inverse * 0.5).to(tl.int32) + 8) & 15
    high = (tl.floor(second * inverse * 0.5).to(tl.int32) + 8) & 15
    return (low | (high << 4)).to(tl.uint8)


@jit
def unpacked(stored: tl.tensor):
    """stored: [M, N] uint8. Returns the odd numbers that its codes mean, of both halves, each [M, N] float32."""
    return (stored & 15).to(tl.float32) * 2.0 - 15.0, (stored >> 4).to(tl.float32) * 2.0 - 15.0


@jit
def halves(x: tl.tensor):
    """x: [M, N], columns as `half_columns` has them. Its first N / 2 and its last."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


@jit
def joined(first: tl.tensor, second: tl.tensor):
    """Undo `halves`. first, second: [M, N / 2]."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (first.shape[0], 2 * first.shape[1]))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


@jit
def half_columns(dim: int, BLOCK: tl.constexpr):
    """Numbers of a vector of `dim` that BLOCK columns have, each half of them those of one of its halves, and which
    columns have one: [BLOCK] int32 and bool."""
    column = tl.arange(0, BLOCK)
    place = column % (BLOCK // 2)
    return column // (BLOCK // 2) * (dim // 2) + place, place < dim // 2
