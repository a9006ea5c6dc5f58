"""A device that is not there: its tensors (torch's meta tensors) have shapes, dtypes and strides, and no numbers.

What a fake device cannot show, because all its tensors are the host's, is refused here as CUDA, Triton or torch would:
an operation on tensors of both, a kernel that is given the host's memory or too large a grid, a number that is read
back; and, in works of lanes, a copy from or to memory that is not pinned, for which the host would wait. Numbers of the
host are real; what comes from the device is what was there before.

To be used in a process of its own (`prepare` first): what it changes stays changed.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton  # before any module of kernels: see kernels/common/lang.py
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from diptych.kernels.attention.paged_batch import sent
from diptych.workers.device.device import Event, Work
from diptych.workers.parallel.groups import Alone

_ATEN = torch.ops.aten


class RefusedError(RuntimeError):
    """Error: CUDA, Triton or torch would refuse it, or the host would wait."""


class DescribedEvent:
    has_happened = True

    def wait(self) -> None:
        return


class DescribedLane:
    def __init__(self, device: "DescribedDevice") -> None:
        self._device = device

    @torch.inference_mode()
    def run(self, work: Work) -> None:
        self._device.depth += 1
        try:
            work()
        finally:
            self._device.depth -= 1

    def after(self, event: Event) -> None:
        return

    def record(self) -> DescribedEvent:
        return DescribedEvent()


class DescribedDevice:
    """A Device. Use it within `with device.described()`."""

    name, torch_device = "described", torch.device("meta")

    def __init__(self) -> None:
        self.depth = 0  # of works that lanes run
        self.is_strict = False  # no copy may wait
        self.launches: dict[str, int] = {}  # by kernel
        self._pinned: list[tuple[int, int]] = []  # addresses, [first, end)

    def lane(self, name: str, *, high_priority: bool = False) -> DescribedLane:
        return DescribedLane(self)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.pin(torch.zeros(tuple(shape), dtype=dtype))

    def pin(self, memory: Tensor) -> Tensor:
        self._pinned.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    def is_pinned(self, memory: Tensor) -> bool:
        first, num_bytes = memory.data_ptr(), memory.nbytes
        return any(start <= first and first + num_bytes <= end for start, end in self._pinned)

    def capture(self, lane: DescribedLane, work: Work) -> Callable[[], None]:
        was_strict, self.is_strict = self.is_strict, True
        try:
            lane.run(work)
        finally:
            self.is_strict = was_strict
        return lambda: None

    def group(self, rank: int, size: int, rendezvous: Path) -> Alone:
        return Alone()

    def peak_bytes(self, work: Work) -> int:
        self.lane("profile").run(work)
        return 0

    def loaded(self) -> None:
        self.is_strict = True

    def check(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def described(self) -> "_Modes":
        return _Modes(self)


class _Modes:
    def __init__(self, device: DescribedDevice) -> None:
        self._modes = _Functions(device), _Operations(device)

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)


class _Functions(TorchFunctionMode):
    """Memory that is pinned as it is made, on CUDA: a build for CPUs alone cannot."""

    def __init__(self, device: DescribedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_pinned = func is torch.tensor and sys._getframe(1).f_code is sent.__code__  # pyright: ignore[reportPrivateUsage]
        result = func(*args, **kwargs)
        return self._device.pin(result) if is_pinned else result


class _Operations(TorchDispatchMode):
    """Copies between the two, and what may not have tensors of both."""

    def __init__(self, device: DescribedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # of what is made of other operations, those: in inference mode they come whole
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = [of for of in tensors if of.is_cpu and of.dim() > 0]
        goes_to = kwargs.get("device")
        is_mixed = len({of.device.type for of in tensors if of.dim() > 0}) > 1
        if func is _ATEN._to_copy.default and goes_to is not None and torch.device(goes_to) != args[0].device:
            self._check_copy(func, args[0] if args[0].is_cpu else None)
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=goes_to)
        if func is _ATEN.copy_.default and is_mixed:
            self._check_copy(func, host[0])
            if args[0].shape != torch.broadcast_shapes(args[0].shape, args[1].shape):
                raise RefusedError(f"{tuple(args[1].shape)} does not fit {tuple(args[0].shape)}")
            return args[0]
        if is_mixed:
            raise RefusedError(f"{func} is given tensors of the host and of the device")
        if func is _ATEN._local_scalar_dense.default and not args[0].is_cpu:
            raise RefusedError("a number is read back: the host waits for the device")
        return func(*args, **kwargs)

    def _check_copy(self, func: Any, host: Tensor | None) -> None:
        """host: the side of a copy that is there; None: memory that nobody can have pinned."""
        device = self._device
        if device.depth and device.is_strict and (host is None or not device.is_pinned(host)):
            what = "new memory" if host is None else f"{tuple(host.shape)}"
            raise RefusedError(f"{func} waits for the device: it copies {what}, which is not pinned")


def prepare() -> None:
    """Have kernels launched for an H200 that is not there. Before any module of kernels is imported."""
    assert triton.__version__
    os.environ["DIPTYCH_GPU"] = "h200"


def launching(device: DescribedDevice) -> None:
    """Check and count launches from now on; they do nothing."""

    def run(kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        if any(isinstance(of, Tensor) and of.is_cpu for of in (*args, *kwargs.values())):
            raise RefusedError(f"{kernel.__name__}: a pointer argument is memory of the host")
        limits = (1 << 31) - 1, 65535, 65535
        if not all(0 < size <= limit for size, limit in zip(grid, limits, strict=False)):
            raise RefusedError(f"{kernel.__name__}: a grid of {grid}")
        device.launches[kernel.__name__] = device.launches.get(kernel.__name__, 0) + 1

    JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
