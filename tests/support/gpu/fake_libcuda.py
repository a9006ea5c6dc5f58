"""libcuda's virtual memory without CUDA, as ctypes calls it: pieces are memory files, mapping them is mmap.

Strict where the driver is: sizes and addresses are multiples of the granularity, what is mapped may not be touched (the
process dies) until access was given, and a context must be current.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.workers.device import virtual_memory
from diptych.workers.device.run_copier import RunCopier
from diptych.workers.device.virtual_memory import Mapped, VirtualMemory
from diptych.workers.kv.device_kv import CopyList, CopyRows

GRANULARITY = 1 << 16
PIECE = "fake-piece"  # the file that is one
OUT_OF_MEMORY, INVALID_VALUE, INVALID_DEVICE = 2, 1, 101
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID_DEVICE: b"CUDA_ERROR_INVALID_DEVICE"}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MAP_FIXED, _PROT_NONE = 0x10, 0


class FakeLibCuda:
    """The functions of one process; a process here is a rank."""

    def __init__(self) -> None:
        self.most_bytes = 1 << 30
        self.has_virtual_memory = True
        self.out_of_reach = False  # of other devices' memory
        self.handles: dict[int, int] = {}  # descriptor of each
        self.mapped: dict[int, int] = {}  # bytes, by address
        self.reserved: dict[int, int] = {}
        self._contexts = 0
        self._next = 0x7000

    def __getattr__(self, name: str) -> Any:
        """Answer for functions that LibCuda asks for and this fake does not need."""
        return lambda *_: 0

    def cuDeviceGet(self, device: Any, index: ctypes.c_int) -> int:
        device._obj.value = index.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: ctypes.c_int, _: object) -> int:
        assert attribute.value in (102, 103, 110)
        value._obj.value = self.has_virtual_memory
        return 0

    def cuCtxPushCurrent_v2(self, _: object) -> int:
        self._contexts += 1
        return 0

    def cuCtxPopCurrent_v2(self, _: object) -> int:
        self._contexts -= 1
        return 0

    def cuGetErrorName(self, status: ctypes.c_int, name: Any) -> int:
        name._obj.value = NAMES.get(status.value, b"CUDA_ERROR_INVALID_VALUE")
        return 0

    def cuMemGetAllocationGranularity(self, value: Any, properties: Any, flags: ctypes.c_int) -> int:
        self._check(properties._obj)
        value._obj.value = GRANULARITY
        return flags.value

    def cuMemCreate(self, handle: Any, num_bytes: ctypes.c_size_t, properties: Any, flags: Any) -> int:
        self._check(properties._obj)
        if num_bytes.value % GRANULARITY or flags.value or not self._contexts:
            return INVALID_VALUE
        if num_bytes.value > self.most_bytes:
            return OUT_OF_MEMORY
        descriptor = os.memfd_create(PIECE)
        os.ftruncate(descriptor, num_bytes.value)
        os.pwrite(descriptor, b"\xff" * num_bytes.value, 0)  # of any content
        handle._obj.value = self._named(descriptor)
        return 0

    def cuMemRelease(self, handle: ctypes.c_uint64) -> int:
        os.close(self.handles.pop(handle.value))
        return 0

    def cuMemExportToShareableHandle(self, descriptor: Any, handle: Any, kind: Any, flags: Any) -> int:
        descriptor._obj.value = os.dup(self.handles[handle.value])
        return int((kind.value, flags.value) != (1, 0))

    def cuMemImportFromShareableHandle(self, handle: Any, descriptor: ctypes.c_void_p, kind: ctypes.c_int) -> int:
        if kind.value != 1 or not self._contexts or descriptor.value is None:
            return INVALID_VALUE
        handle._obj.value = self._named(os.dup(descriptor.value))
        return 0

    def cuMemAddressReserve(self, address: Any, num_bytes: Any, alignment: Any, hint: Any, flags: Any) -> int:
        if num_bytes.value % GRANULARITY or (alignment.value, hint.value, flags.value) != (GRANULARITY, 0, 0):
            return INVALID_VALUE
        found = _LIBC.mmap(None, num_bytes.value, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        address._obj.value = found
        self.reserved[found] = num_bytes.value
        return 0

    def cuMemMap(self, address: Any, num_bytes: Any, offset: Any, handle: Any, flags: Any) -> int:
        descriptor, at, size = self.handles[handle.value], address.value, num_bytes.value
        inside = any(start <= at and at + size <= start + most for start, most in self.reserved.items())
        if not inside or at in self.mapped or size != os.fstat(descriptor).st_size or offset.value or flags.value:
            return INVALID_VALUE
        flags_of_map = mmap.MAP_SHARED | _MAP_FIXED
        assert _LIBC.mmap(at, size, _PROT_NONE, flags_of_map, descriptor, 0) == at
        self.mapped[at] = size
        return 0

    def cuMemSetAccess(self, address: Any, num_bytes: Any, access: Any, count: Any) -> int:
        location = access._obj.location
        assert (count.value, access._obj.flags, location.type, location.id) == (1, 3, 1, 0)
        if self.mapped.get(address.value) != num_bytes.value:
            return INVALID_VALUE
        if self.out_of_reach and len(self.mapped) > 1:
            return INVALID_DEVICE
        both = ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE)
        return _LIBC.mprotect(ctypes.c_void_p(address.value), ctypes.c_size_t(num_bytes.value), both)

    def cuMemUnmap(self, address: Any, num_bytes: Any) -> int:
        if self.mapped.pop(address.value, None) != num_bytes.value:
            return INVALID_VALUE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        assert _LIBC.mmap(address.value, num_bytes.value, _PROT_NONE, flags, -1, 0) == address.value
        return 0

    def cuMemAddressFree(self, address: Any, num_bytes: Any) -> int:
        if self.reserved.pop(address.value, None) != num_bytes.value:
            return INVALID_VALUE
        return _LIBC.munmap(ctypes.c_void_p(address.value), ctypes.c_size_t(num_bytes.value))

    @property
    def is_idle(self) -> bool:
        return not (self.handles or self.mapped or self.reserved or self._contexts)

    def _named(self, descriptor: int) -> int:
        self._next += 1
        self.handles[self._next] = descriptor
        return self._next

    @staticmethod
    def _check(properties: virtual_memory.Properties) -> None:
        """Each of the 32 bytes that the driver reads."""
        words = memoryview(bytes(properties)).cast("i")
        assert words.tolist() == [1, 1, 1, 0, 0, 0, 1 << 8, 0]  # the last but one: GPUs that network cards reach


class FakeVirtualMemory(VirtualMemory):
    """A driver that copies at once."""

    def __init__(self, libcuda: FakeLibCuda) -> None:
        super().__init__(0)
        self.libcuda = libcuda
        self.copied: list[CopyRows] = []
        self.has_kernel, self.num_lists = False, 0

    def copy(self, copies: Sequence[CopyRows]) -> None:
        self.copied += copies
        for rows in copies:
            of = {
                (self._piece_of(row.source, row.num_bytes), self._piece_of(row.target, row.num_bytes))
                for row in rows.apart()
            }
            assert len(of) == 1, "one copy reads or writes the memory of two GPUs"
            for target, source, num_bytes, *_ in rows.apart():
                ctypes.memmove(target, source, num_bytes)

    @property
    def takes_lists(self) -> bool:
        return self.has_kernel

    def copy_list(self, copies: CopyList) -> None:
        """A kernel may read and write the memory of several GPUs."""
        self.num_lists += 1
        self.copied += [CopyRows(*copy) for copy in np.stack(copies).T.tolist()]
        RunCopier(torch.device("cpu")).copy(copies)

    def _piece_of(self, address: int, num_bytes: int) -> int | None:
        """Address of the piece that has these bytes; None: no piece."""
        for start, size in self.libcuda.mapped.items():
            if start <= address < start + size:
                assert address + num_bytes <= start + size, "one copy reads or writes the memory of two GPUs"
                return start
        return None

    def tensor(self, mapped: Mapped) -> Tensor:
        kind: Any = type("Bytes", (ctypes.c_char * mapped.num_bytes,), {})
        numbers = kind.from_address(mapped.address)
        numbers.owner = mapped
        return torch.frombuffer(numbers, dtype=torch.uint8)


def make_virtual_memory(libcuda: FakeLibCuda) -> FakeVirtualMemory:
    """Make the virtual memory of a rank."""
    with pytest.MonkeyPatch.context() as patch:
        for loader in ("CDLL", "PyDLL"):
            patch.setattr(f"diptych.workers.device.cuda_driver.ctypes.{loader}", lambda _: libcuda)
        return FakeVirtualMemory(libcuda)
