"""Noise of a draw: its key, mixed from the request's seed and the position of the token to be drawn.

With gumbel.py it makes randomness a pure function of (seed, position, token id), never of batch, time or order.
"""

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ...kernels.sampling.gumbel import GOLDEN, MIX1, MIX2, signed

_MASK = (1 << 64) - 1
UInt64s = NDArray[np.uint64]


def stream_key(seed: int, position: int) -> int:
    """The key of the draw at `position` (index in prompt and output) under `seed`, as a signed 64-bit integer."""
    return signed(_mix(seed ^ _mix((position + 1) * GOLDEN & _MASK)))


def stream_keys(seeds: UInt64s, positions: UInt64s) -> NDArray[np.int64]:
    """`stream_key` of each of them."""
    return _mix(seeds ^ _mix((positions + np.uint64(1)) * np.uint64(GOLDEN))).view(np.int64)


@overload
def _mix(x: int) -> int: ...
@overload
def _mix(x: UInt64s) -> UInt64s: ...
def _mix(x: Any) -> Any:
    x = (x ^ x >> 30) * MIX1 & _MASK
    x = (x ^ x >> 27) * MIX2 & _MASK
    return x ^ x >> 31
