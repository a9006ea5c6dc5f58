"""KV that host code does not get at, as hand-offs use it: in device memory (workers/device/kv_pool.py), or on several
machines (workers/handoff/spread_kv.py). No torch.

A hand-off sees such a pool through this alone: transports that know the device get at its memory themselves, everything
else goes by the staging buffers, of which there are two of one size, in host and in device memory, with one set of
slices. What a method says has happened when it returns: the engine may use the blocks, or their source give them up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .bridge import Bridge
from .layout import Offsets, Runs
from .segment import Segment
from .staging import Staging

HANDLE_BYTES = 64
UUID_BYTES = 16
LISTED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Staged:
    """A part of a segment that was read into a slice of the staging buffers, in the wire's order."""

    part: Segment
    start: int  # of the slice
    num_bytes: int
    is_on_device: bool  # in the device's buffer; else in the host's


class CopyRows(NamedTuple):
    """`num` runs of `num_bytes` each, equally spaced on both sides."""

    target: int  # address of the first
    source: int
    num_bytes: int
    num: int = 1
    target_pitch: int = 0  # bytes from one to the next
    source_pitch: int = 0

    def apart(self) -> "list[CopyRows]":
        """Return the same runs, one by one."""
        return [
            CopyRows(self.target + i * self.target_pitch, self.source + i * self.source_pitch, self.num_bytes)
            for i in range(self.num)
        ]


class CopyList(NamedTuple):
    """Copies of many runs, which one kernel carries out: all addresses and lengths are multiples of LISTED_BYTES."""

    targets: Offsets  # [n] int64, addresses
    sources: Offsets
    lengths: Offsets  # bytes


class CudaDriver(Protocol):
    """Memory of one process that another one reads; workers/device/cuda_driver.py is one. Raises TransportError."""

    @property
    def device_uuid(self) -> bytes:
        """UUID of our device: UUID_BYTES."""
        ...

    def enter_thread(self) -> None:
        """Make our device the one of the calling thread, for libraries that use it there."""
        ...

    def can_reach(self, device_uuid: bytes) -> bool:
        """Return whether our device may read that one's memory, as far as can be told."""
        ...

    def export(self, address: int) -> tuple[bytes, int]:
        """Handle (HANDLE_BYTES) of the allocation that `address` lies in, and how many bytes into it."""
        ...

    def open(self, handle: bytes) -> tuple[int, int | None]:
        """Map another process's allocation: its address here, and its size where that can be told."""
        ...

    def open_pieces(self, descriptors: Sequence[int], num_bytes: int) -> int:
        """Map the pieces of another process's pool, of `num_bytes` each, one after the other: the address of the first.
        The descriptors may be closed then."""
        ...

    def close(self, address: int) -> None:
        """Unmap what was opened there."""
        ...

    def copy(self, copies: Sequence[CopyRows]) -> None:
        """Copy on the current lane."""
        ...

    @property
    def takes_lists(self) -> bool:
        """Return whether there is a kernel for `copy_list`."""
        ...

    def copy_list(self, copies: CopyList) -> None:
        """Copy on the current lane, at once. An address that nothing is mapped at ends the process's use of the device,
        not this copy alone."""
        ...


class DeviceKV(Protocol):
    """Every method may be called on any thread, and blocks it until the device has done what it says."""

    @property
    def driver(self) -> CudaDriver | None:
        """The CUDA driver; None where there is none."""
        ...

    @property
    def is_on_one_machine(self) -> bool:
        """Return whether all of the pool is on this machine, so that transports may get at it by its region."""
        ...

    @property
    def staging(self) -> Staging:
        """Used on the event loop; the transports must know both its regions."""
        ...

    def read(self, runs: Runs) -> bytes:
        """A copy of these runs of the pool, one after the other."""
        ...

    def fetch(self, staged: Staged) -> memoryview:
        """The staged bytes, in host memory."""
        ...

    def convert(self, bridge: Bridge, staged: Staged, table: Sequence[int], first_token: int) -> None:
        """Write a part into the pool: its tokens from `first_token` on, as far as `table` reaches."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Carry out what `work` gives the device to do, beside what else arrives."""
        ...
