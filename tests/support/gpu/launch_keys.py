"""The kernels that an engine would have to compile, on a machine without a GPU: Triton's own keys of its launches.

Nothing computes: launches end where Triton has found what it would compile, and all numbers are zeros. To be used in a
process of its own (`prepare` first): what it changes stays changed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from tests.kernels.ahead_of_time import DEVICES, NoDevice

_MAKES_MEMORY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)

Key = tuple[str, ...]


class LaunchKeys:
    """Keys of the launches so far, by kernel; each key is compiled once."""

    def __init__(self) -> None:
        self.found: dict[str, set[Key]] = {}

    def add(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Take the place of JITFunction.run."""
        kwargs["debug"] = False
        for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # of newer versions
            if hasattr(triton.knobs.compilation, name):
                kwargs[name] = getattr(triton.knobs.compilation, name)
        *_, bind = kernel.device_caches[0]
        _, specialised, options = bind(*args, **kwargs)
        names = [parameter.name for parameter in kernel.params]
        key = [f"{name}: {of}" for name, of in zip(names, specialised, strict=True)]
        key += [f"{name}: {of}" for name, of in sorted(options.items())]
        self.found.setdefault(kernel.__name__, set()).add(tuple(key))

    def take(self) -> dict[str, set[Key]]:
        """Return the keys, and begin anew."""
        found, self.found = self.found, {}
        return found


class _Zeros(TorchFunctionMode):
    """Memory that is not written is zeros: nobody writes what kernels would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _MAKES_MEMORY else result


def prepare() -> None:
    """Have kernels launched for an H200 that is not there. Before any other module of kernels is imported."""
    target, name = DEVICES["sm_90"]
    os.environ["DIPTYCH_GPU"] = name
    triton.runtime.driver.set_active(NoDevice(target, 0))
    from diptych.kernels.common import lang

    lang.has_kernel = lambda on: True


@contextmanager
def recorded() -> Iterator[LaunchKeys]:
    """Record launches instead of making them."""
    keys, run = LaunchKeys(), JITFunction.run

    def add(kernel: Any, *args: Any, **kwargs: Any) -> None:
        keys.add(kernel, *args, **kwargs)

    JITFunction.run = add
    try:
        with _Zeros():
            yield keys
    finally:
        JITFunction.run = run
