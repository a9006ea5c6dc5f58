"""KV on the wire: in the dtype of the cache, or a narrower one over gRPC. numpy, no torch.

    cache      "float32", "bfloat16" (here as uint16: numpy has no such type), or a scaled dtype of kv/dtypes.py (here
               as bytes: a vector with its scale)
    wire       as in the source's cache, or narrower: "bfloat16", rounded to nearest, ties to even; or a scaled dtype

A *piece* is one layer of one block in one rank. A block's checksum is 16 bytes of blake3 over its pieces
as they travel: rank by rank, in each layer by layer, whatever the order of the axes; so group by group, where
layers are unlike.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..common.errors import LayoutMismatch
from .dtypes import KIVI, KV_DTYPES, is_scaled, vector_bytes
from .layout import KVLayout
from .scaled import dequantised, quantised
from .segment import CHECKSUM_BYTES

WIRE_DTYPES = ("bfloat16", "int8", "fp8", "int4")  # that a sink may ask for
_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 4, KIVI: 4}

Bytes: TypeAlias = bytes | memoryview
Numbers: TypeAlias = NDArray[Any]  # float32, uint16 that holds bfloat16, or uint8 that holds scaled vectors

_BYTES = dict.fromkeys(KV_DTYPES, np.uint8)
STORAGE: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, **_BYTES}


def on_the_wire(cache: str, asked: str) -> str:
    """Dtype that is sent out of a cache of dtype `cache` when `asked` is asked for ("": as in the cache). Raises
    LayoutMismatch for what is no wire dtype."""
    if asked and asked not in WIRE_DTYPES:
        raise LayoutMismatch(f"wire_dtype {asked!r} is unknown: choose from {', '.join(WIRE_DTYPES)}, or none")
    return asked if asked and _BITS[asked] < _BITS[cache] else cache


def row_size(dtype: str, head_dim: int) -> int:
    """Number of STORAGE's elements that a vector takes."""
    return vector_bytes(dtype, head_dim) // np.dtype(STORAGE[dtype]).itemsize


def piece_bytes(layout: KVLayout, wire: str) -> int:
    """Bytes that are sent of one layer of one block, for layers of one shape."""
    return layout.layer_bytes // vector_bytes(layout.dtype, layout.head_dim) * vector_bytes(wire, layout.head_dim)


def narrow(data: Bytes, cache: str, wire: str, head_dim: int) -> bytes:
    """Convert whole vectors of a cache to a narrower dtype, for the wire."""
    values = _to_float32(np.frombuffer(data, STORAGE[cache]).reshape(-1, head_dim))
    return (_to_bfloat16(values) if wire == "bfloat16" else quantised(values, wire)).tobytes()


def widen(data: Bytes, wire: str, cache: str, head_dim: int) -> Numbers:
    """Convert received bytes to vectors of our cache, [vectors, row_size] of its STORAGE. No copy where the two dtypes
    agree. Exact where the cache's dtype is wider; else rounded once."""
    rows: Numbers = np.frombuffer(data, STORAGE[wire]).reshape(-1, row_size(wire, head_dim))
    if wire == cache:
        return rows
    return stored(dequantised(rows, wire) if is_scaled(wire) else _to_float32(rows), cache)


def stored(values: NDArray[np.float32], cache: str) -> Numbers:
    """values: [vectors, head_dim]. Returns vectors of our cache, which rounds each alone, [vectors, row_size] of its
    STORAGE."""
    if is_scaled(cache):
        return quantised(values, cache)
    return values if cache == "float32" else _to_bfloat16(values)


def checksum(parts: Iterable[Bytes]) -> bytes:
    """Checksum (CHECKSUM_BYTES) of the sent bytes of a block."""
    from blake3 import blake3  # here, so that only who verifies KV needs it

    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(CHECKSUM_BYTES)


def _to_float32(numbers: Numbers) -> NDArray[np.float32]:
    if numbers.dtype == np.float32:
        return numbers
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even: add just less than half of what is cut off, and the lowest bit that stays."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():  # the sum may overflow into the sign
        rounded[is_nan] = 0x7FC0
    return rounded
