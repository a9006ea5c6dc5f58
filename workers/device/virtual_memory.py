"""CUDA's virtual memory: pieces of device memory, other processes' and other devices' among them, side by side.

    create ──> handle ──descriptor_of──> a file descriptor ──sent to another process──> imported ──> handle there
    handles ──map──> addresses, one piece after the other, that our device reads and writes ──> tensor

By the CUDA driver API reference, "Virtual Memory Management". A piece lasts as long as anything of it: a mapping, a
handle or a descriptor, in any process. cudaIpc* cannot share such memory.
"""

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.errors import ConfigError, TransportError
from ..kv.device_kv import CudaDriver
from .cuda_driver import LibCuda
from .device import Device

_INT, _POINTER, _BYTES, _U64 = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
# CU_DEVICE_ATTRIBUTE_*_SUPPORTED; the last one: GPU_DIRECT_RDMA_WITH_CUDA_VMM
_VIRTUAL_MEMORY, _DESCRIPTORS, _RDMA = 102, 103, 110

log = logging.getLogger("diptych.worker")


class Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", _INT), ("id", _INT))


class _Flags(ctypes.Structure):  # CUmemAllocationProp.allocFlags
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", _INT),
        ("requested_handle_types", _INT),
        ("location", Location),
        ("win32_handle_metadata", _POINTER),
        ("flags", _Flags),
    )


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", Location), ("flags", _INT))


class VirtualMemory(LibCuda):
    """Virtual memory of one device of this process. Raises TransportError."""

    def __init__(self, index: int) -> None:
        """`index`: torch's."""
        super().__init__(index)
        if not (self._has(_VIRTUAL_MEMORY) and self._has(_DESCRIPTORS)):
            raise TransportError("the GPU has no virtual memory that processes can share")
        self._location = Location(ON_DEVICE, self._ordinal.value)
        flags = _Flags(gpu_direct_rdma_capable=self._has(_RDMA))  # so that network cards can reach it, as NIXL's do
        self._properties = Properties(PINNED, POSIX_DESCRIPTOR, self._location, flags=flags)
        granularity = _BYTES()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), _INT(_MINIMUM)
        )
        self.granularity = granularity.value  # bytes: a piece has a multiple of it
        self._opened: dict[int, Mapped] = {}  # pieces of other processes, by address

    def create(self, num_bytes: int) -> int:
        """A handle of a new piece on our device, of any content."""
        handle = _U64()
        with self._in_context():
            self._call("cuMemCreate", ctypes.byref(handle), _BYTES(num_bytes), ctypes.byref(self._properties), _U64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Release the handle; mappings of it stay."""
        self._call("cuMemRelease", _U64(handle))

    def descriptor_of(self, handle: int) -> int:
        """A file descriptor, to be closed by whoever asked."""
        descriptor = _INT(-1)
        self._call(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            _U64(handle),
            _INT(POSIX_DESCRIPTOR),
            _U64(0),
        )
        return descriptor.value

    def imported(self, descriptor: int) -> int:
        """A handle of the piece that it is of; it may be closed then."""
        handle = _U64()
        with self._in_context():
            self._call(
                "cuMemImportFromShareableHandle", ctypes.byref(handle), _POINTER(descriptor), _INT(POSIX_DESCRIPTOR)
            )
        return handle.value

    def map(self, handles: Sequence[int], num_bytes: int) -> "Mapped":
        """Pieces of `num_bytes` each, one after the other."""
        address, total = _U64(), len(handles) * num_bytes
        with self._in_context():
            self._call(
                "cuMemAddressReserve", ctypes.byref(address), _BYTES(total), _BYTES(self.granularity), _U64(0), _U64(0)
            )
            mapped = Mapped(self, address.value, total)
            access = Access(self._location, READ_WRITE)
            for handle in handles:
                at = _U64(mapped.address + len(mapped.pieces) * num_bytes)
                self._call("cuMemMap", at, _BYTES(num_bytes), _BYTES(0), _U64(handle), _U64(0))
                mapped.pieces.append((at.value, num_bytes))
                self._call("cuMemSetAccess", at, _BYTES(num_bytes), ctypes.byref(access), _BYTES(1))
        return mapped

    def open_pieces(self, descriptors: Sequence[int], num_bytes: int) -> int:
        handles: list[int] = []
        try:
            for descriptor in descriptors:
                handles.append(self.imported(descriptor))
            mapped = self.map(handles, num_bytes)
        finally:
            for handle in handles:
                self.release(handle)
        self._opened[mapped.address] = mapped
        return mapped.address

    def close(self, address: int) -> None:
        if self._opened.pop(address, None) is None:  # else unmapped: nobody holds it any more
            super().close(address)

    def tensor(self, mapped: "Mapped") -> Tensor:
        """[bytes] uint8, which keeps it mapped."""
        return torch.as_tensor(mapped, device=torch.device("cuda", self._index))

    def synchronize(self) -> None:
        """Waits for all that our device is at."""
        with self._in_context():
            self._call("cuCtxSynchronize")

    def unmap(self, mapped: "Mapped") -> None:
        """Unmap the memory. Nothing uses it, or will, except work that the device has already begun."""
        self.synchronize()
        with self._in_context():
            for address, num_bytes in mapped.pieces:
                self._call("cuMemUnmap", _U64(address), _BYTES(num_bytes))
            self._call("cuMemAddressFree", _U64(mapped.address), _BYTES(mapped.num_bytes))

    def _has(self, attribute: int) -> bool:
        value = _INT()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), _INT(attribute), self._ordinal)
        return bool(value.value)


class Mapped:
    """A range of addresses of a device, until nobody holds this object."""

    def __init__(self, memory: VirtualMemory, address: int, num_bytes: int) -> None:
        self._memory, self.address, self.num_bytes = memory, address, num_bytes
        self.pieces: list[tuple[int, int]] = []  # address and bytes of those that are mapped

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        try:
            self._memory.unmap(self)
        except TransportError as e:  # CUDA has ended with the process, or has failed: its memory is released with it
            log.debug("device memory was not unmapped: %s", e)


def driver_of(device: Device) -> CudaDriver | None:
    """Return None where there is no CUDA: a device for tests, or ROCm. Compiles what it may launch."""
    if device.torch_device.type != "cuda":
        return None
    for kind in (VirtualMemory, LibCuda):  # the second one is without virtual memory
        try:
            driver = kind(device.torch_device.index)
        except TransportError as e:
            log.info("without CUDA's driver, or its virtual memory: %s", e)
        else:
            driver.load_kernel()
            return driver
    return None


def virtual_memory_of(device: Device) -> VirtualMemory | None:
    """None for a device for tests, whose ranks share a memory file. Raises ConfigError."""
    if device.torch_device.type != "cuda":
        return None
    try:
        return VirtualMemory(device.torch_device.index)
    except TransportError as e:
        raise ConfigError(
            f"ranks on GPUs need shared GPU memory, which this machine does not support ({e}): use tensor_parallel 1"
        ) from e
