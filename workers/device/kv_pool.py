"""A KV pool in device memory, as hand-offs use it (device_kv.py): copied off the device, and written by what arrives.

    source   read        pool ──out──> pinned buffer ──> bytes                     gRPC, checksums
    sink     convert     host's staging ──in──> device's ──kernel──> pool          gRPC, NIXL from host memory
                                 device's staging ──kernel──> pool                 CUDA IPC, NIXL between unlike layouts
             run         whatever CUDA IPC copies, straight into the pool or into the device's staging

Two lanes of our own, so that nothing waits for the engine's and the two directions do not wait for each other. Whoever
calls is off the engine's thread, and waits. Blocks that are read were announced when they were stored, and are leased;
blocks that are written are nobody else's until their sink has been told so.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.kv.kv_scales import KVParts
from ..kv.bridge import Bridge
from ..kv.device_kv import CudaDriver, Staged
from ..kv.layout import DOT, KVLayout, Offsets, Region, Runs
from ..kv.staging import STAGING_BYTES, Staging
from ..transport.runs import in_parts
from .device import Device
from .device_errors import of_copy
from .kv_convert import Placing, place_of, write_part

READ_BYTES = 4 << 20  # copied off the device at once
NUM_BUFFERS = 2  # of this many bytes each
# Runs that are copied off the device one by one; more are gathered there first, where they are pieces of so many
# bytes at least: a copy off it takes some microseconds, however small.
FEW_RUNS, LEAST_UNIT = 4, 256


class DevicePool:
    """A DeviceKV."""

    is_on_one_machine = True

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        pool: Tensor,
        groups: Sequence[KVParts],
        driver: CudaDriver | None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """pool: its numbers, [n], of some ranks of the layout or of all; groups: of each group of layers that are
        alike, [ranks, blocks, layers, vectors, slots, heads, dim], or with layers before blocks."""
        assert layout.packing != DOT and pool.dim() == 1 and pool.is_contiguous()
        self.driver = driver
        self._device, self._layout = device, layout
        self._bytes = pool.view(torch.uint8)
        self._rank_bytes = len(self._bytes) // len(groups[0].numbers)
        self._groups = [of if layout.is_block_major else _by_block(of) for of in groups]
        self._in, self._out = _SharedLane(device, "kv in"), _SharedLane(device, "kv out")
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._buffers.put(device.pinned((READ_BYTES,), torch.uint8))
        self._staged_here = device.pinned((staging_bytes,), torch.uint8)
        self._staged_there = torch.empty(staging_bytes, dtype=torch.uint8, device=device.torch_device)
        here = device.torch_device
        there = Region(self._staged_there.data_ptr(), staging_bytes, None, here.index or 0, is_fake=here.type == "cpu")
        self.staging = Staging(staging_bytes, self._staged_here.numpy().data, there)

    def read(self, runs: Runs) -> bytes:
        parts: list[bytes] = []
        # One copy stays within one rank's piece: the next may be another GPU's.
        for part in in_parts(runs.cut(self._rank_bytes), READ_BYTES):
            buffer = self._buffers.get()
            try:
                self._out.run(lambda part=part, buffer=buffer: self._gather(part, buffer))
                parts.append(buffer[: part.num_bytes].numpy().tobytes())
            finally:
                self._buffers.put(buffer)
        return b"".join(parts)

    def fetch(self, staged: Staged) -> memoryview:
        place = slice(staged.start, staged.start + staged.num_bytes)
        if staged.is_on_device:
            self._out.run(lambda: self._staged_here[place].copy_(self._staged_there[place], non_blocking=True))
        return self.staging.view[place]

    def convert(self, bridge: Bridge, staged: Staged, table: Sequence[int], first_token: int) -> None:
        place = place_of(staged.part, bridge.source.block_size, self._layout.block_size, table, first_token)
        if place is None:
            return
        table_here = self._device.pinned((len(place.blocks),), torch.int64)
        table_here.copy_(torch.tensor(place.blocks, dtype=torch.int64))
        self._in.run(lambda: self._write(bridge, staged, place, table_here))

    def run(self, work: Callable[[], object]) -> None:
        self._in.run(work)

    def _gather(self, runs: Runs, buffer: Tensor) -> None:
        """Device work: copy runs to a pinned buffer, at once where they are many pieces of a size."""
        unit = int(np.gcd.reduce(np.concatenate((runs.offsets, runs.lengths))))
        if len(runs.offsets) > FEW_RUNS and unit >= LEAST_UNIT:
            # torch copies number by number: of eight bytes where that is possible.
            word = torch.int64 if unit % 8 == 0 and self._bytes.data_ptr() % 8 == 0 else torch.uint8
            units = self._bytes[: len(self._bytes) // unit * unit].view(word).view(-1, unit // word.itemsize)
            place = self._device.pinned((runs.num_bytes // unit,), torch.int64)
            place.numpy()[:] = places_of(runs, unit)
            gathered = units.index_select(0, place.to(units.device, non_blocking=True))
            buffer[: runs.num_bytes].copy_(gathered.view(-1).view(torch.uint8), non_blocking=True)
            return
        at = 0
        for offset, length in zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True):
            buffer[at : at + length].copy_(self._bytes[offset : offset + length], non_blocking=True)
            at += length

    def _write(self, bridge: Bridge, staged: Staged, place: Placing, table_here: Tensor) -> None:
        data = self._staged_there[staged.start : staged.start + staged.num_bytes]
        if not staged.is_on_device:
            data.copy_(self._staged_here[staged.start : staged.start + staged.num_bytes], non_blocking=True)
        table = torch.empty_like(table_here, device=self._device.torch_device)
        table.copy_(table_here, non_blocking=True)
        write_part(bridge, staged.part, data, self._groups, place, table)


def _by_block(of: KVParts) -> KVParts:
    """Put blocks before layers."""
    return KVParts(of.numbers.transpose(1, 2), None if of.scales is None else of.scales.transpose(1, 2))


def places_of(runs: Runs, unit: int) -> Offsets:
    """Return the places of all bytes of runs, in units of so many bytes, which divide each run and where it begins."""
    counts = runs.lengths // unit
    before = np.cumsum(counts) - counts
    return np.repeat(runs.offsets // unit - before, counts) + np.arange(counts.sum())


class _SharedLane:
    """A lane that several threads use."""

    def __init__(self, device: Device, name: str) -> None:
        self._lane = device.lane(name)
        self._lock = threading.Lock()

    def run(self, work: Callable[[], object]) -> None:
        """Returns when it is done. Raises TransportError where the device fails or is full, and what `work` does."""
        try:
            self._run(work)
        except Exception as e:
            if (failed := of_copy(e)) is not None:
                raise failed from e
            raise

    def _run(self, work: Callable[[], object]) -> None:
        with self._lock:
            try:
                self._lane.run(work)
            except BaseException:
                self._lane.record().wait()  # copies that were queued before it may still write until then
                raise
            event = self._lane.record()
        event.wait()
