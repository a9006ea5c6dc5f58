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
def packed(x: tl.tensor, inverse: tl.tensor):
    """x: [M, N] float32, transformed; inverse: [M, 1], of scale_and_inverse. Returns its bytes, [M, N / 2] uint8."""
    code = (tl.floor(x * inverse * 0.5).to(tl.int32) + 8) & 15
    low, high = tl.split(tl.reshape(code, (x.shape[0], x.shape[1] // 2, 2)))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    return (low | (high << 4)).to(tl.uint8)


@jit
def unpacked(stored: tl.tensor):
    """stored: [M, N / 2] uint8. Returns the odd numbers that its codes mean, [M, N] float32."""
    return tl.interleave(stored & 15, stored >> 4).to(tl.float32) * 2.0 - 15.0
