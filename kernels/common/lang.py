"""Triton, where it can be of use: `jit`, `tl` and `next_power_of_2` for the kernels of these folders.

It is imported with a GPU build of torch, or when the program has imported it before (to interpret kernels, or to
compile them ahead of time). Otherwise `jit` leaves kernels as plain functions that nobody calls: a worker on CPU does
not wait for the import, and needs no triton at all. Modules of kernels postpone annotations, for then `tl` is None.

A kernel is compiled once for each dtype and each `constexpr`, and apart for whole numbers that are 1, or multiples of
16 (strides, say). Not for COUNTS, which differ from step to step: a request would wait for the compiler.

Which computes, a kernel or its torch twin, is said here alone (`kernel_for`): a kernel what is on a GPU, or anything
where DIPTYCH_TRITON=interpret (with TRITON_INTERPRET=1, and triton imported first: for tests).
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")
# Parameters of kernels that say how much there is to compute.
COUNTS = {
    "capacity",
    "most",
    "num",
    "num_blocks",
    "num_chunks",
    "num_pairs",
    "num_rows",
    "num_seqs",
    "num_tiles",
    "num_tokens",
    "programs",
    "source_place",
    "target_place",
    "width",
}
_IS_INTERPRETED = os.environ.get("DIPTYCH_TRITON") == "interpret"
_HAS_GPU_BUILD = torch.version.cuda is not None or torch.version.hip is not None

if TYPE_CHECKING or "triton" in sys.modules or (_HAS_GPU_BUILD and find_spec("triton") is not None):
    import triton
    import triton.language as tl
    from triton import knobs

    # Products and sums may become one instruction, whichever default a version of triton has: kernels rely on the rate.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if knobs.runtime.interpret:
        from .interpreting import hasten

        hasten()

    def jit(fn: Callable[..., Any]) -> Any:
        """A kernel: call it as kernel[grid](arguments)."""
        if _IS_INTERPRETED:
            return _interpreted(fn)
        return triton.jit(do_not_specialize=sorted(COUNTS & signature(fn).parameters.keys()))(fn)

    def _interpreted(fn: Callable[..., Any]) -> Any:
        from triton.runtime.interpreter import InterpretedFunction

        class Interpreted(InterpretedFunction[Any]):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                return launched(super().run, *args, **kwargs)

        return Interpreted(fn)
else:
    tl = None

    def jit(fn: Callable[..., Any]) -> Any:
        return fn


def tell_of_compiles(told: Callable[[str, float], object]) -> None:
    """Call `told` with a kernel's name and how long it took, in seconds, whenever one is compiled from now on."""
    from triton import knobs

    began = [0.0]

    def before(**_: Any) -> None:
        began[0] = perf_counter()

    def after(*, fn: Any, **_: Any) -> None:
        told(fn.name.rpartition(".")[2], perf_counter() - began[0])

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = before, after


def launched(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `work`, the launch of a kernel, in such a way that modes of torch see it whole (torch.overrides); return its
    result."""
    if has_torch_function(args):
        return handle_torch_function(launched, (), work, *args, **kwargs)
    return work(*args, **kwargs)


def has_kernel(on: Tensor) -> bool:
    """Return whether kernels compute what is where `on` is, or their twins."""
    return not on.is_cpu or _IS_INTERPRETED


def kernel_for(on: Tensor, kernel: Callable[P, R], twin: Callable[P, R]) -> Callable[P, R]:
    """The one of the two that computes what is where `on` is."""
    return kernel if has_kernel(on) else partial(launched, twin)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


__all__ = ["has_kernel", "jit", "kernel_for", "launched", "next_power_of_2", "tell_of_compiles", "tl"]
