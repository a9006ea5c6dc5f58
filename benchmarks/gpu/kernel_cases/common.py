"""Parts shared by the files beside this one: each has `cases()`, which makes Cases one after another.

On a GPU they are as large as the goals ask for, or with KERNEL_CASES=small as small as it takes to launch them. Where
Triton is interpreted (TRITON_INTERPRET=1) the same code makes small ones on the CPU, so that inputs, kernels,
references and peers are tested where there is no GPU.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

if TYPE_CHECKING:
    from diptych.kernels.kv.kv_scales import KVParts

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_TINY = IS_INTERPRETED or os.environ.get("KERNEL_CASES") == "small"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter multiplies matrices of bfloat16 by their bits, as if they were whole numbers.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
# Of ||found - expected|| / ||expected||: what roundings of 16-bit factors and results may add up to.
HALF_TOLERANCE = 1e-2

SCALED_LAYERS = 2  # of a pool of 8-bit or 4-bit numbers, of which the cases use one

Number = TypeVar("Number")
Tensors = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Goal:
    """Goal of a figure: "copy", the share of copy bandwidth; "TB/s"; "TFLOP/s"; or the beginning of peers' names: how
    many times as fast as the fastest of them."""

    of: str
    least: float
    aim: float


# The goals that several kernels share: of what only moves bytes.
MOVES = (Goal("copy", 0.80, 0.92),)


@dataclass(frozen=True)
class Case:
    kernel: str
    shape: str
    make: Callable[[int], Any]  # random inputs by a seed, the same for the same seed
    run: Callable[[Any], Tensors]  # the kernel; it may stand in a graph: no host reads the device
    # What `run` is held against, of the inputs, made anew, and of what was found (for what follows from a choice).
    reference: Callable[[Any, Any], Tensors]
    num_bytes: float  # that must at least be read and written
    num_flops: float = 0.0
    tolerance: float = HALF_TOLERANCE
    peers: dict[str, Callable[[Any], object]] = field(default_factory=dict)  # torch's and others', by name
    unlike: tuple[str, ...] = ()  # peers that compute something else: their results are not held against the reference
    goals: tuple[Goal, ...] = ()


class Random:
    """Random tensors on DEVICE, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=DEVICE, dtype=torch.float32).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, device=DEVICE)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=DEVICE, dtype=dtype)

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator, device=DEVICE)


def sized(large: Number, tiny: Number) -> Number:
    return tiny if IS_TINY else large


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of it, where there is a GPU to compile for."""
    return fn if IS_TINY else torch.compile(fn, dynamic=False)


def error(found: object, expected: object) -> float:
    """The largest ||found - expected|| / ||expected|| of the tensors (of whole numbers: the share that differs).

    Infinite where shapes differ, infinities lie elsewhere, or a number is none: what was not written is never near.
    """
    ours, theirs = (list(x) if isinstance(x, tuple) else [x] for x in (found, expected))
    if len(ours) != len(theirs):
        return float("inf")
    errors = [_error(one, other) for one, other in zip(ours, theirs, strict=True)]
    return max(float("inf") if math.isnan(e) else e for e in errors)


def _error(found: Any, expected: Any) -> float:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return float("inf")
    if not found.is_floating_point() and not found.dtype.is_signed:
        found, expected = found.int(), expected.int()
    if found.dtype in (torch.int32, torch.int64):
        return (found != expected).float().mean().item()
    ours, theirs = found.float(), expected.float()
    infinite = theirs.isinf()
    if not torch.equal(ours[infinite], theirs[infinite]):
        return float("inf")
    ours, theirs = ours.masked_fill(infinite, 0.0), theirs.masked_fill(infinite, 0.0)
    whole = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()
    if theirs.dim() < 2:
        return whole
    # A row among thousands that is quite wrong is not to be lost in the others: each may be off ten times as much.
    sizes = theirs.norm(dim=-1)
    rows = (ours - theirs).norm(dim=-1) / sizes.clamp_min(1e-3 * sizes.amax().clamp_min(1e-30))
    return max(whole, rows.amax().item() / 10)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty gives with NaN (whole numbers: far off), so that what a kernel does not write shows."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return made.fill_(torch.nan if made.is_floating_point() else 99)

        return empty

    with patch("torch.empty", filled(torch.empty)), patch("torch.empty_like", filled(torch.empty_like)):
        yield


def in_pool(cache: Tensor, stored: torch.dtype) -> "KVParts":
    """cache: a layer, [num_blocks, 2, block_size, K, D]. The same in 8 or 4 bits, block-major as GPUs have it."""
    from diptych.kernels.kv.kv_scales import (
        SCALE_BYTES,
        numbers_in,
        parts_of_pieces,
        quantise,
    )  # once triton was imported

    num_blocks, _, block_size, num_heads, dim = cache.shape
    width = dim // numbers_in(stored)
    num_bytes = 2 * block_size * num_heads * (width + SCALE_BYTES)
    pool = torch.zeros(num_blocks, SCALED_LAYERS, num_bytes, dtype=torch.uint8, device=cache.device)
    numbers, scales = made = parts_of_pieces(pool.view(stored)[:, -1], (2, block_size, num_heads, width))
    assert scales is not None
    found, own = quantise(cache, stored)
    numbers.copy_(found)
    scales.copy_(own)
    return made
