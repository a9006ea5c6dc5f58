"""What the cases of the kernels share. Each file beside this one has the cases of one kernel:

    test_*      its values against its twin's, interpreted or on a GPU: odd sizes, strided inputs, poisoned outputs
    LAUNCHES    calls of its wrapper with tensors of no memory: what they would launch is compiled for every target

test_triton.py runs both, each in a process of its own: a process decides once, when it imports the kernels, how they
run. Files are found by themselves.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch

from diptych.kernels.common import dependent_launch
from diptych.kernels.kv.kv_scales import SCALE_BYTES, KVParts, numbers_in, parts_of_pieces, quantise

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.bfloat16]
# The interpreter multiplies matrices of bfloat16 by their bits, as if they were whole numbers.
DOT_DTYPES = [torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16]
NVIDIA = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA, "gfx942")
FOLLOWING = ("sm_90", "sm_100")  # where kernels may start while the one before ends


@dataclass(frozen=True)
class Launch:
    """A call whose kernels are compiled as the wrapper launches them: with its constants, warps and stages."""

    name: str  # the properties of this case: dtype, sizes, options
    call: Callable[[], object]  # the wrapper's, with tensors made by `meta`
    targets: tuple[str, ...] = TARGETS  # or "sm_89", of small shared memory
    spilled_bytes: int = 0  # that a thread may at most spill, on any target
    is_gated: bool = True  # False: compiled only by `ahead_of_time.py --all`
    gated_targets: tuple[str, ...] = (*TARGETS, "sm_89")  # other targets: compiled only with --all


def following(call: Callable[[], object]) -> Callable[[], object]:
    """The same, of kernels that start while the one before ends (dependent_launch.py)."""

    def run() -> object:
        with patch.object(dependent_launch, "is_asked", lambda: True):
            return call()

    return run


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that has no memory, and an address that is a multiple of 16 as an allocated one's."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def scaled_layer(num_blocks: int, block_size: int, num_heads: int, dim: int, stored: torch.dtype, on: str) -> KVParts:
    """One of three layers of a pool of 8-bit or 4-bit numbers as GPUs have it, all bytes of it 1. on: a device, or
    "meta"."""
    width = dim // numbers_in(stored)
    size = 2 * block_size * num_heads * (width + SCALE_BYTES)
    pool = torch.empty(num_blocks, 3, size, dtype=torch.uint8, device=on)
    pieces = (pool if on == "meta" else pool.fill_(1)).view(stored)[:, 1]
    return parts_of_pieces(pieces, (2, block_size, num_heads, width))


def in_pool(cache: torch.Tensor, stored: torch.dtype) -> KVParts:
    """cache: a layer, [num_blocks, 2, block_size, K, D]. The same in 8 or 4 bits, as GPUs have it."""
    num_blocks, _, block_size, num_heads, dim = cache.shape
    numbers, scales = made = scaled_layer(num_blocks, block_size, num_heads, dim, stored, DEVICE)
    assert scales is not None
    found, own = quantise(cache.nan_to_num(), stored)
    numbers.copy_(found)
    scales.copy_(own)
    return made


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def dot_tolerance(of: torch.dtype) -> float | None:
    """Tolerance of products of numbers of this dtype, for assert_near. Hopper's matrix units add products of fp8 with
    some 14 bits (DeepSeek-V3, 3.3.2)."""
    return 2e-3 if DEVICE != "cpu" and of.itemsize == 1 and of.is_floating_point else None


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Whether values are equal within a few roundings. NaN marks an element that was not written, and never is."""
    tolerance = max(1e-5 if found.dtype == torch.float32 else 2e-2, tolerance or 0.0)
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
