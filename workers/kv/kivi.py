"""Whole blocks of kivi (dtypes.py): from float32 and back. numpy, no torch.

kernels/kv/kivi.py has the layout of the bytes and does the same in torch, kernels/cpu/src in C++, bit for bit: a block
is stored alike by whoever computes it and by a hand-off that converts it.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .dtypes import GROUP, KIVI, SMALLEST, vector_bytes

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Halves: TypeAlias = NDArray[np.uint16]  # bfloat16s

_LARGEST_CODE = np.float32(15)
_HALF = GROUP // 2


def rounded(rows: Floats) -> Bytes:
    """rows: [n, 2, GROUP, heads, head_dim], keys and values of whole blocks. Returns [n, 2, heads, bytes of a head's
    block]. What is no number (slots that were never written may hold any bits) makes no number of its group."""
    keys, values = rows[:, 0].transpose(0, 2, 3, 1), rows[:, 1].transpose(0, 2, 1, 3)
    codes, scales, leasts = _rounded_groups(keys)  # [n, heads, dim, GROUP], and without the last axis
    packed = np.bitwise_or(codes[:, :, 0::2], codes[:, :, 1::2] << 4, dtype=np.uint8)  # [n, heads, dim / 2, GROUP]
    halves = packed.reshape(*packed.shape[:3], 2, _HALF).swapaxes(2, 3)
    stored_keys = _joined(halves, scales, leasts)
    codes, scales, leasts = _rounded_groups(values.reshape(*values.shape[:3], -1, GROUP))  # [n, heads, token, dim / 32]
    packed = np.bitwise_or(codes[..., :_HALF], codes[..., _HALF:] << 4, dtype=np.uint8)
    return np.stack((stored_keys, _joined(packed, scales.swapaxes(2, 3), leasts.swapaxes(2, 3))), axis=1)


def widened(blocks: Bytes, head_dim: int) -> Floats:
    """blocks: [n, 2, heads, bytes of a head's block]. Returns [n, 2, GROUP, heads, head_dim]."""
    n, _, heads, _ = blocks.shape
    size = GROUP * head_dim // 2
    codes, scales, leasts = (
        blocks[..., :size],
        _wide(blocks[..., size : size + 2 * head_dim]),
        _wide(blocks[..., size + 2 * head_dim :]),
    )
    with np.errstate(invalid="ignore", over="ignore"):
        packed = codes[:, 0].reshape(n, heads, 2, head_dim // 2, _HALF).swapaxes(2, 3).reshape(n, heads, -1, GROUP)
        numbers = np.stack((packed & 15, packed >> 4), axis=3).reshape(n, heads, head_dim, GROUP).astype(np.float32)
        keys = numbers * scales[:, 0, ..., None] + leasts[:, 0, ..., None]
        packed = codes[:, 1].reshape(n, heads, GROUP, head_dim // GROUP, _HALF)
        numbers = np.concatenate((packed & 15, packed >> 4), axis=4).astype(np.float32)
        steps, least = (x[:, 1].reshape(n, heads, -1, GROUP).swapaxes(2, 3)[..., None] for x in (scales, leasts))
        values = (numbers * steps + least).reshape(n, heads, GROUP, head_dim)
    return np.stack((keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)), axis=1)


def head_block_bytes(head_dim: int) -> int:
    """Number of bytes that the keys, or the values, of a block take in one head."""
    return GROUP * vector_bytes(KIVI, head_dim)


def _rounded_groups(x: Floats) -> tuple[Bytes, Halves, Halves]:
    """x: [..., GROUP]. Returns codes [..., GROUP], and scales and least numbers [...]."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        least = x.min(axis=-1) + np.float32(0)
        bits = least.view(np.int32)
        least = (np.where(bits < 0, bits + 0xFFFF, bits).astype(np.int32) & ~np.int32(0xFFFF)).view(np.float32)  # down
        extent = x.max(axis=-1) - least
        is_number = extent < np.inf
        exact = extent / _LARGEST_CODE
        scale = (exact.view(np.int32) + np.int32(0xFFFF) & ~np.int32(0xFFFF)).view(np.float32)  # up
        scale = np.where(extent < np.float32(SMALLEST), np.float32(0), scale)
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        codes = np.rint((x - least[..., None]) * inverse[..., None])
        codes = np.where(is_number[..., None], codes, np.float32(0)).astype(np.uint8)
    scale = np.where(is_number, scale, np.float32(np.nan))
    return codes, _halves(scale), _halves(np.where(is_number, least, np.float32(0)))


def _halves(values: Floats) -> Halves:
    """values: numbers that a bfloat16 holds."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")


def _wide(stored: Bytes) -> Floats:
    """stored: [..., 2 n] bytes of bfloat16s. Returns [..., n]."""
    return (np.ascontiguousarray(stored).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _joined(codes: Bytes, scales: Halves, leasts: Halves) -> Bytes:
    """Each [n, heads, ...]. Returns their bytes, [n, heads, bytes]."""
    parts = (np.ascontiguousarray(part).reshape(*part.shape[:2], -1).view(np.uint8) for part in (codes, scales, leasts))
    return np.concatenate(list(parts), axis=2)
