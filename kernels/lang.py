"""Triton, where it can be of use: `jit`, `tl` and `next_power_of_2` for the kernels of this room.

It is imported with a GPU build of torch, or when the program has imported it before (to interpret kernels, or to
compile them ahead of time). Otherwise `jit` leaves kernels as plain functions that nobody calls: a worker on CPU does
not wait for the import, and needs no triton at all. Modules of kernels postpone annotations, for then `tl` is None.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

_HAS_GPU_BUILD = torch.version.cuda is not None or torch.version.hip is not None

if TYPE_CHECKING or "triton" in sys.modules or (_HAS_GPU_BUILD and find_spec("triton") is not None):
    import triton
    import triton.language as tl

    # Products and sums may become one instruction, whichever default a version of triton has: kernels rely on the rate.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

    def jit(fn: Callable[..., Any]) -> Any:
        """A kernel: call it as kernel[grid](arguments)."""
        return triton.jit(fn)
else:
    tl = None

    def jit(fn: Callable[..., Any]) -> Any:
        return fn


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


__all__ = ["jit", "next_power_of_2", "tl"]
