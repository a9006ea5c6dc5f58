"""Device interface of a CUDA engine: lanes on which work is queued, events, pinned memory, graphs.

    host     run(work) ─── run(work) ─── record() ──> event                    event.wait()
    lane           work ────────── work ─────── the event happens ────────────────^

There are two: cuda_device.py, and fake_device.py, which computes on CPU tensors as late (or early) as a real one may.
What is run on a lane is computed in inference mode. Its Python may run late: hand `run` work whose Python values stay.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..parallel.stores import Place
from .device_group import DeviceGroup

Work = Callable[[], object]  # only enqueues a device's work, without waiting for it or reading its results


class Event(Protocol):
    def wait(self) -> None:
        """The host waits until all that was run on the lane before it is done. Raises what went wrong there."""
        ...

    @property
    def has_happened(self) -> bool:
        """Does not wait. May raise what went wrong."""
        ...


class Lane(Protocol):
    """Queue of work on a device: its work runs in order, concurrently with other lanes."""

    def run(self, work: Work) -> None: ...

    def after(self, event: Event) -> None:
        """Make work queued from now on wait for the event; the host does not wait."""
        ...

    def record(self) -> Event: ...


class Device(Protocol):
    @property
    def name(self) -> str:
        """Name by which cuda_device.py's `gpu_named` finds it, and those of other ranks."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    def lane(self, name: str, *, high_priority: bool = False) -> Lane: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory from and to which a device copies on its own (`copy_`, non_blocking)."""
        ...

    def capture(self, lane: Lane, work: Work) -> Callable[[], None]:
        """A graph: what replays the device's work of `work`, on the same tensors. Run it on the same lane, never while
        another graph that was captured before is under way on a lane beside.

        `work` is done twice or so while it is captured; nothing may be under way then.
        """
        ...

    def group(self, rank: int, size: int, place: Place) -> DeviceGroup:
        """Join the devices of the worker's other ranks, once all have come. place: see GlooGroup.join. Raises
        RankLost."""
        ...

    def peak_bytes(self, work: Work) -> int:
        """Do work, and return the memory that it takes at most, beside what is there before and what it leaves; 0 where
        that cannot be told, and then nothing is done. Raises torch.OutOfMemoryError."""
        ...

    def loaded(self) -> None:
        """All that requests need is on the device: warn of each kernel that is compiled from now on."""
        ...

    def check(self) -> None:
        """Ask whether it still works, and do not wait: a device that is lost raises that, by the next call or so."""
        ...

    def synchronize(self) -> None:
        """The host waits for all lanes."""
        ...
