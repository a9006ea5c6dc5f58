"""A CudaDriver by libcuda, which is wherever a GPU's driver is; through ctypes.

Handles name whole allocations of cudaMalloc: torch cuts its tensors out of such ones, hence the offset. Memory that
torch makes of expandable segments, or by cudaMallocAsync, cannot be shared so.
"""

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from ..common.errors import TransportError
from ..kv.device_kv import HANDLE_BYTES, UUID_BYTES, CopyList, CopyRows
from .run_copier import RunCopier

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
_INT, _POINTER, _BYTES, _U32 = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_ADDRESS = ctypes.c_uint64  # CUdeviceptr
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: pitches that cuMemAllocPitch did not choose may be refused
_MAX_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH


class _Handle(ctypes.Structure):  # CUipcMemHandle, passed by value
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Side(ctypes.Structure):
    """Half of a CUDA_MEMCPY2D."""

    _fields_ = (
        ("x_in_bytes", _BYTES),
        ("y", _BYTES),
        ("memory_type", _U32),
        ("host", _POINTER),
        ("device", _ADDRESS),
        ("array", _POINTER),
        ("pitch", _BYTES),
    )


class Memcpy2D(ctypes.Structure):  # CUDA_MEMCPY2D
    _fields_ = (("source", _Side), ("target", _Side), ("width_in_bytes", _BYTES), ("height", _BYTES))


def copy_of(rows: CopyRows) -> Memcpy2D:
    def side(address: int, pitch: int) -> _Side:
        return _Side(memory_type=_DEVICE_MEMORY, device=address, pitch=pitch)

    source, target = side(rows.source, rows.source_pitch), side(rows.target, rows.target_pitch)
    return Memcpy2D(source=source, target=target, width_in_bytes=rows.num_bytes, height=rows.num)


class LibCuda:
    """CUDA driver calls for one device, in its primary context, which is torch's. Any thread may call it."""

    def __init__(self, index: int) -> None:
        """`index`: torch's. Raises TransportError."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            # Calls that only queue copies keep the interpreter's lock: to get it back may take longer than they do.
            self._quick = ctypes.PyDLL("libcuda.so.1")
        except OSError as e:
            raise TransportError(f"the CUDA driver's library cannot be loaded: {e}") from e
        self._quick.cuMemcpyAsync.argtypes = (_ADDRESS, _ADDRESS, _BYTES, _POINTER)
        self._quick.cuMemcpy2DAsync_v2.argtypes = (_POINTER, _POINTER)
        self._call("cuInit", _U32(0))
        self._index = index
        self._ordinal = self._device_at(index)
        self._context = _POINTER()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._ordinal)
        self.device_uuid = self._uuid_of(self._ordinal)
        self._copier: RunCopier | None = None

    def enter_thread(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def can_reach(self, device_uuid: bytes) -> bool:
        """A device that this process does not see may yet be mapped: that is tried."""
        if device_uuid == self.device_uuid:
            return True
        count = _INT()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for index in range(count.value):
            other = self._device_at(index)
            if self._uuid_of(other) == device_uuid:
                can_access = _INT()
                self._call("cuDeviceCanAccessPeer", ctypes.byref(can_access), self._ordinal, other)
                return bool(can_access.value)
        return True

    def export(self, address: int) -> tuple[bytes, int]:
        handle = _Handle()
        with self._in_context():
            base, _ = self._range_of(address)
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), _ADDRESS(base))
            except TransportError as e:
                raise TransportError(
                    f"{e.message}: the pool's memory cannot be shared; leave expandable_segments and cudaMallocAsync "
                    "out of PYTORCH_CUDA_ALLOC_CONF"
                ) from e
        return bytes(handle), address - base

    def open(self, handle: bytes) -> tuple[int, int | None]:
        address = _ADDRESS()
        with self._in_context():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                _U32(LAZY_PEER_ACCESS),
            )
            try:
                base, num_bytes = self._range_of(address.value)
            except TransportError:
                return address.value, None
        return address.value, num_bytes - (address.value - base)

    def open_pieces(self, descriptors: Sequence[int], num_bytes: int) -> int:
        raise TransportError("the GPU has no virtual memory, which processes share piece by piece")

    def close(self, address: int) -> None:
        with self._in_context():
            self._call("cuIpcCloseMemHandle", _ADDRESS(address))

    def copy(self, copies: Sequence[CopyRows]) -> None:
        stream = torch.cuda.current_stream(self._index).cuda_stream
        with self._in_context():
            for rows in copies:
                if not self._copied_at_once(rows, stream):
                    self._copy_one_by_one(rows, stream)

    def _copied_at_once(self, rows: CopyRows, stream: int) -> bool:
        """False, and nothing is done, where the driver takes no such pitches."""
        if rows.num == 1 or max(rows.target_pitch, rows.source_pitch) > _MAX_PITCH:
            return False
        status = self._quick.cuMemcpy2DAsync_v2(ctypes.byref(copy_of(rows)), stream)
        if status not in (0, _INVALID_VALUE):
            raise self._error("cuMemcpy2DAsync_v2", status)
        return status == 0

    def _copy_one_by_one(self, rows: CopyRows, stream: int) -> None:
        for target, source, num_bytes, *_ in rows.apart():
            if status := self._quick.cuMemcpyAsync(target, source, num_bytes, stream):
                raise self._error("cuMemcpyAsync", status)

    def load_kernel(self) -> None:
        """Compile what `copy_list` launches, where that can be had. To be called before requests are served."""
        with self._on_device():
            self._copier = RunCopier.checked(torch.device("cuda", self._index))

    @property
    def takes_lists(self) -> bool:
        return self._copier is not None

    def copy_list(self, copies: CopyList) -> None:
        assert self._copier is not None
        with self._on_device():
            self._copier.copy(copies)

    @contextmanager
    def _on_device(self) -> Generator[None]:
        """Make our device the thread's, and its context: torch and Triton ask for both."""
        with torch.cuda.device(self._index), self._in_context():
            yield

    @contextmanager
    def _in_context(self) -> Generator[None]:
        """A thread that torch has not used yet has none."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    def _device_at(self, index: int) -> ctypes.c_int:
        device = _INT()
        self._call("cuDeviceGet", ctypes.byref(device), _INT(index))
        return device

    def _uuid_of(self, device: ctypes.c_int) -> bytes:
        uuid = (ctypes.c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        return bytes(uuid)

    def _range_of(self, address: int) -> tuple[int, int]:
        """(start, bytes) of its allocation."""
        base, num_bytes = _ADDRESS(), _BYTES()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), _ADDRESS(address))
        return base.value, num_bytes.value

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise self._error(name, status)

    def _error(self, function: str, status: int) -> TransportError:
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(_INT(status), ctypes.byref(name))
        return TransportError(f"{function} failed with {(name.value or b'an unknown error').decode()} ({status})")
