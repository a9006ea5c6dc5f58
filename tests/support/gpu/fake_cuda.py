"""A CudaDriver without CUDA, strict where that is fatal: "device" memory is a memory file that other processes map.

A handle says "process:descriptor"; like CUDA's it opens as long as the process lives, and what is open outlives it.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from diptych.workers.common.errors import TransportError
from diptych.workers.device.device import Device
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.kv_cache import parts_in, view_of
from diptych.workers.device.kv_convert import STORED
from diptych.workers.device.kv_pool import DevicePool
from diptych.workers.kv.device_kv import HANDLE_BYTES, LISTED_BYTES, CopyList, CopyRows
from diptych.workers.kv.layout import KVLayout, Region
from diptych.workers.kv.memory import KVMemory

OFFSET = 512  # of a pool in its allocation
UUID, OTHER_UUID = b"\1" * 16, b"\2" * 16
STAGING_BYTES = 1 << 20


class FakeCuda:
    def __init__(
        self, device_uuid: bytes = UUID, out_of_reach: Sequence[bytes] = (), *, takes_lists: bool = False
    ) -> None:
        self.device_uuid = device_uuid
        self.takes_lists = takes_lists
        self.out_of_reach = out_of_reach
        self.opened: dict[int, mmap.mmap] = {}  # by address
        self.num_opens = 0
        self.num_copies = 0  # that the driver was asked for
        self.lists: list[int] = []  # copies in each list that the driver was given
        self.threads: list[str] = []  # those that our device is the one of
        self._made: dict[int, tuple[mmap.mmap, int]] = {}  # by address: memory, descriptor

    def allocate(self, num_bytes: int) -> mmap.mmap:
        descriptor = os.memfd_create("fake-device-memory")
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
        self._made[_address(memory)] = memory, descriptor
        return memory

    def free(self) -> None:
        for _, descriptor in self._made.values():
            os.close(descriptor)

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def can_reach(self, device_uuid: bytes) -> bool:
        return device_uuid not in self.out_of_reach

    def export(self, address: int) -> tuple[bytes, int]:
        for start, (memory, descriptor) in self._made.items():
            if start <= address < start + len(memory):
                return f"{os.getpid()}:{descriptor}".encode().ljust(HANDLE_BYTES, b"\0"), address - start
        raise TransportError("this memory cannot be shared")

    def open(self, handle: bytes) -> tuple[int, int | None]:
        try:
            process, descriptor = handle.rstrip(b"\0").decode().split(":")
            opened = os.open(f"/proc/{int(process)}/fd/{int(descriptor)}", os.O_RDWR)
        except (ValueError, OSError) as e:
            raise TransportError("cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_INVALID_VALUE (1)") from e
        memory = mmap.mmap(opened, os.fstat(opened).st_size)
        os.close(opened)
        self.opened[_address(memory)] = memory
        self.num_opens += 1
        return _address(memory), len(memory)

    def open_pieces(self, descriptors: Sequence[int], num_bytes: int) -> int:
        raise TransportError("the GPU has no virtual memory")

    def close(self, address: int) -> None:
        self.opened.pop(address).close()

    def copy(self, copies: Sequence[CopyRows]) -> None:
        self.num_copies += len(copies)
        for rows in copies:
            assert rows.num == 1 or min(rows.target_pitch, rows.source_pitch) >= rows.num_bytes
        for target, source, num_bytes, *_ in (row for rows in copies for row in rows.apart()):
            assert self._is_mapped(source, num_bytes), "an illegal address would end the process's CUDA"
            ctypes.memmove(target, source, num_bytes)

    def copy_list(self, copies: CopyList) -> None:
        assert self.takes_lists and not np.bitwise_or.reduce(np.concatenate(copies)) % LISTED_BYTES
        self.lists.append(len(copies.lengths))
        for target, source, num_bytes in np.stack(copies).T.tolist():
            assert self._is_mapped(source, num_bytes), "an illegal address would end the process's CUDA"
            ctypes.memmove(target, source, num_bytes)

    def _is_mapped(self, address: int, num_bytes: int) -> bool:
        mapped = {**self.opened, **{start: memory for start, (memory, _) in self._made.items()}}
        return any(start <= address and address + num_bytes <= start + len(m) for start, m in mapped.items())


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_device_memory(
    layout: KVLayout,
    num_blocks: int,
    content: bytes | None = None,
    *,
    driver: FakeCuda | None = None,
    device: Device | None = None,
    ranks: range | None = None,
) -> KVMemory:
    """A pool on a fake device, of zeros unless `content` is given; of `ranks` alone."""
    num_ranks = layout.tensor_parallel if ranks is None else len(ranks)
    num_bytes = num_blocks * layout.rank_block_bytes * num_ranks
    driver = driver or FakeCuda()
    allocation = driver.allocate(OFFSET + num_bytes)
    if content is not None:
        allocation[OFFSET:] = content
    dtype = STORED[layout.dtype]
    pool = torch.frombuffer(allocation, dtype=dtype, offset=OFFSET, count=num_bytes // dtype.itemsize)
    by_rank = pool.view(num_ranks, -1)
    of_layers = layout.layer_groups(0, layout.num_layers)
    groups = [parts_in(view_of(by_rank, num_blocks, layout, of), of) for of in of_layers]
    on_device = DevicePool(device or FakeDevice(), layout, pool, groups, driver, STAGING_BYTES)
    return KVMemory(layout, num_blocks, Region(pool.data_ptr(), num_bytes, None), on_device, ranks=ranks)


def seen_by_host(memory: KVMemory) -> KVMemory:
    """The same pool, for a test to read."""
    region = memory.region
    view = memoryview((ctypes.c_char * region.num_bytes).from_address(region.address)).cast("B")
    return replace(memory, region=replace(region, view=view), device=None)
