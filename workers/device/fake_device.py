"""A Device on CPU tensors that computes as late as a real one may, so that what is wrong with the order shows.

A lane is a queue that is worked off only as far as somebody waits for one of its events, or when another lane that
waits has to go `after` one. A host that overwrites pinned memory too early, reads it too early, or forgets an `after`
gets wrong numbers. With `is_late=False` work is done at once: then what is written too late shows.

A capture does the work once and records it: torch's operations one by one, and each launch of a kernel, interpreted or
by its twin (lang.py: `launched`). A replay repeats them on the same tensors, with the Python values of then.
Reading a value back, and making a tensor of host numbers, raise while capturing, as they do on CUDA.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

from ...kernels.common.lang import launched
from ..parallel.groups import GlooGroup
from ..parallel.stores import Place
from .device import Event, Lane, Work
from .device_group import FakeGroup

FAKE = "fake"


class CaptureError(RuntimeError):
    """Error: a graph cannot hold this operation."""


class FakeEvent:
    def __init__(self, lane: "FakeLane") -> None:
        self._lane = lane
        self.has_happened = False

    def wait(self) -> None:
        self._lane.run_until(self)


class FakeLane:
    def __init__(self, name: str, device: "FakeDevice") -> None:
        self.name, self._device = name, device
        self._queue: deque[Callable[[], object] | FakeEvent] = deque()
        self._is_running = False

    def run(self, work: Work) -> None:
        self._put(work)

    def after(self, event: Event) -> None:
        self._put(event.wait)

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self._put(event)
        return event

    def run_until(self, event: FakeEvent | None) -> None:
        """None: to its end."""
        self._device.check()
        with self._device.lock:
            while self._queue if event is None else not event.has_happened:
                if self._is_running:
                    raise RuntimeError(f"lane {self.name} waits for itself through other lanes")
                item = self._queue.popleft()
                if isinstance(item, FakeEvent):
                    item.has_happened = True
                else:
                    self._do(item)

    @torch.inference_mode()
    def _do(self, work: Work) -> None:
        self._is_running = True
        try:
            work()
        finally:
            self._is_running = False

    def _put(self, item: Callable[[], object] | FakeEvent) -> None:
        self._device.check()
        with self._device.lock:
            self._queue.append(item)
            if not self._device.is_late:
                self.run_until(None)


class FakeDevice:
    name = FAKE

    def __init__(self, *, is_late: bool = True) -> None:
        self.is_late = is_late
        self.is_lost = False
        self.lock = threading.RLock()
        self.lanes: list[FakeLane] = []
        self.num_captured = 0
        self.num_replayed = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def lane(self, name: str, *, high_priority: bool = False) -> FakeLane:
        lane = FakeLane(name, self)
        self.lanes.append(lane)
        return lane

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Of memory that costs no page until it is written, unlike that of torch.zeros.
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(zeros).view(dtype).view(tuple(shape))

    @torch.inference_mode()
    def capture(self, lane: Lane, work: Work) -> Callable[[], None]:
        self.synchronize()
        record: list[_Step] = []
        with _Launches(record), _Operations(record):
            work()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            for step in record:
                step.repeat()

        return replay

    def group(self, rank: int, size: int, place: Place) -> FakeGroup:
        return FakeGroup(GlooGroup.join(rank, size, place))

    def peak_bytes(self, work: Work) -> int:
        return 0  # its memory is the host's

    def loaded(self) -> None:
        pass  # it compiles nothing

    def check(self) -> None:
        if self.is_lost:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    def synchronize(self) -> None:
        for lane in self.lanes:
            lane.run_until(None)


@dataclass(frozen=True, slots=True)
class _Step:
    """A call, and what it gave: where a repeated call's results go."""

    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[Tensor]  # only new tensors

    def repeat(self) -> None:
        found = self.call(*self.args, **self.kwargs)
        if self.results:
            for result, new in zip(self.results, _tensors(found), strict=True):
                result.copy_(new)


def _tensors(result: Any) -> list[Tensor]:
    leaves = tree_leaves(result)
    if not all(isinstance(leaf, Tensor | None) for leaf in leaves):
        raise CaptureError(f"a launch returns more than tensors: {result!r}")
    return [leaf for leaf in leaves if leaf is not None]


_ATEN = torch.ops.aten
_WAITS = {  # for the device, to know a number or a size
    _ATEN._local_scalar_dense.default,
    _ATEN.nonzero.default,
    _ATEN.nonzero_numpy.default,
    _ATEN.argwhere.default,
    _ATEN.where.default,  # only of a condition
    _ATEN.masked_select.default,
    _ATEN.is_nonzero.default,
    _ATEN.equal.default,
    _ATEN.allclose.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default,
    _ATEN.bincount.default,
}
_MAKES_NO_NUMBERS = {
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}
_READS_OR_COPIES = {
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.pin_memory,
    torch.tensor,
    torch.Tensor.new_tensor,
    torch.as_tensor,
    torch.asarray,
    torch.from_numpy,
}


@dataclass
class _Launches(TorchFunctionMode):
    """Launches of kernels; and what reads back or copies before torch dispatches it."""

    record: list[_Step] = field(default_factory=list[_Step])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS_OR_COPIES or _copies_by_its_arguments(func, args, kwargs):
            raise CaptureError(f"{func.__name__} waits for the device, or reads memory that is not pinned")
        if func is not launched:
            return func(*args, **kwargs)
        with _disable_current_modes():
            results = args[0](*args[1:], **kwargs)
        self.record.append(_Step(args[0], args[1:], kwargs, _tensors(results)))
        return results


def _copies_by_its_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether it goes to another device, or by host numbers: a list (but a tuple is of axes)."""
    if func is torch.Tensor.to:
        return any(isinstance(of, str | torch.device) for of in (*args, kwargs.get("device")))
    if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
        axes = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(of, Sequence | np.ndarray) for of in axes)
    return False


class _Operations(TorchDispatchMode):
    def __init__(self, record: list[_Step]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WAITS or _must_count(func, args, kwargs):
            raise CaptureError(f"{func} waits for the device")
        results = func(*args, **kwargs)
        is_mutable = func._schema.is_mutable
        if is_mutable or not (func in _MAKES_NO_NUMBERS or _is_view(results, args)):
            self._record.append(_Step(func, args, kwargs, [] if is_mutable else _tensors(results)))
        return results


def _is_view(results: Any, args: Sequence[Any]) -> bool:
    """Compare memory: an operation that may return a view by its schema, as `to` and `reshape`, may return a copy."""
    given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    return all(leaf.untyped_storage().data_ptr() in given for leaf in tree_leaves(results) if isinstance(leaf, Tensor))


def _must_count(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the size of the result depends on the values, which have to be counted first."""
    if func in (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    repeats = (_ATEN.repeat_interleave.Tensor, _ATEN.repeat_interleave.self_Tensor)
    return func in repeats and kwargs.get("output_size") is None
