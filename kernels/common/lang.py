"""Triton, where it can be of use: `jit`, `tl` and `next_power_of_2` for the kernels of these folders.

It is imported with a GPU build of torch, or when the program has imported it before (to interpret kernels, or to
compile them ahead of time). Otherwise `jit` leaves kernels as plain functions that nobody calls: a worker on CPU does
not wait for the import, and needs no triton at all. Modules of kernels postpone annotations, for then `tl` is None.

Which computes, a kernel or its torch twin, is said here alone (`kernel_for`): a kernel what is on a GPU, or anything
where DIPTYCH_TRITON=interpret (with TRITON_INTERPRET=1, and triton imported first: for tests).
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")
_IS_INTERPRETED = os.environ.get("DIPTYCH_TRITON") == "interpret"
_HAS_GPU_BUILD = torch.version.cuda is not None or torch.version.hip is not None

if TYPE_CHECKING or "triton" in sys.modules or (_HAS_GPU_BUILD and find_spec("triton") is not None):
    import triton
    import triton.language as tl

    # Products and sums may become one instruction, whichever default a version of triton has: kernels rely on the rate.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

    def jit(fn: Callable[..., Any]) -> Any:
        """A kernel: call it as kernel[grid](arguments)."""
        return _interpreted(fn) if _IS_INTERPRETED else triton.jit(fn)

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


__all__ = ["has_kernel", "jit", "kernel_for", "launched", "next_power_of_2", "tl"]
