"""KV between GPUs of one machine: the sink maps the source's pool (CUDA IPC) and copies on a lane of its own.

    connect   check the endpoint, map the source's allocation; of several GPUs, receive the descriptors of their pieces
              (file_server.py), and map these side by side
    read      on a thread: copies to the lane, a batch at a time, each waited for
    ended     the source's process: unmapped at once, for a mapping keeps a dead process's memory from whoever comes
              after it; where the system does not tell of its end, after IDLE_S without a read
    forget    unmapped as soon as no read uses it

The source has no part in a read, as with NIXL: blocks are protected by the lease. What is mapped outlives the process
that made it, so a read of a source that has died ends, and what it brought is never released, and so thrown away.
"""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.device_kv import HANDLE_BYTES, UUID_BYTES, CudaDriver, DeviceKV
from ..kv.layout import Copies, Region
from ..kv.pool_pieces import close_all
from .base import KVReader, Source, Transport
from .file_server import MAX_DESCRIPTORS, FileServer, is_sound, receive_files
from .machine import this_machine
from .runs import by_pieces, equally_spaced, listed, shares_of
from .tracked_reader import TrackedReader

NUM_THREADS = 2  # reads at a time
MAX_COPIES = 128  # of one batch: a lane queues this many without blocking
# At most in one launch, which other reads wait for: about 1 ms within a GPU, 5 ms between two.
LAUNCH_COPIES, LAUNCH_BYTES = 1 << 17, 2 << 30
CONNECT_TIMEOUT_S = 10.0
IDLE_S = 10.0

log = logging.getLogger("diptych.transport")


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Address at which the descriptors of a pool's pieces are passed."""

    socket: str
    token: bytes
    num: int


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Address of a peer's pool, as the peer published it."""

    handle: bytes
    offset: int
    num_bytes: int
    process: int  # its id; 0: not told
    pieces: _Pieces | None = None  # in place of `handle`

    @property
    def piece_bytes(self) -> int:
        return self.num_bytes if self.pieces is None else self.num_bytes // self.pieces.num


@dataclass(slots=True, eq=False)
class _IpcPeer:
    incarnation: str
    endpoint: _Endpoint
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the two below
    address: int | None = None  # of its memory, while it is mapped
    num_users: int = 0
    is_forgotten: bool = False
    life: int | None = None  # a descriptor that can be read once its process has ended; of a process, or a connection
    timer: asyncio.TimerHandle | None = None


class CudaIpcReader(TrackedReader):
    lands_on_device = True

    def __init__(self, transport: "CudaIpcTransport", peer: _IpcPeer) -> None:
        super().__init__()
        self._transport = transport
        self._peer = peer

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        if (copies.remote + copies.lengths).max(initial=0) > self._peer.endpoint.num_bytes:
            raise TransportError("the source announced a block that it does not have")
        copy = partial(self._transport.copy, self._peer.endpoint, copies, into)
        await self.wait_for(copies.num_bytes, self._transport.start(self._peer, copy))


class CudaIpcTransport(Transport):
    """Raises TransportError where other processes cannot map the pool."""

    name = "cuda_ipc"

    def __init__(self, pool: Region, device: DeviceKV, driver: CudaDriver) -> None:
        self._device, self._driver, self._pieces = device, driver, pool.pieces
        self._endpoint = kv_pb2.CudaIpcEndpoint(
            num_bytes=pool.num_bytes, device_uuid=self._driver.device_uuid, process=os.getpid()
        )
        if pool.pieces is None:
            self._endpoint.handle, self._endpoint.offset = self._driver.export(pool.address)
        self._server: FileServer | None = None  # of the pieces
        self._peers: dict[str, _IpcPeer] = {}  # that may be mapped, by incarnation
        self._threads = ThreadPoolExecutor(NUM_THREADS, "diptych-cuda-ipc")

    def suits(self, request: kv_pb2.SubscribeRequest) -> bool:
        return request.on_device and request.machine == this_machine()

    def is_described(self, opened: kv_pb2.Opened) -> bool:
        return opened.HasField("cuda_ipc")

    def publish(self, opened: kv_pb2.Opened) -> None:
        """Called on the loop. Pieces are passed from the first sink on; where that fails the sink takes another
        transport."""
        if self._pieces is not None and self._server is None:
            descriptors = self._pieces.descriptors
            try:
                self._server = FileServer(*descriptors)
            except OSError as e:
                log.warning("no other process can be given our KV pool's memory: %s", e)
                return
            name, token = self._server.name, self._server.token
            self._endpoint.pieces.CopyFrom(kv_pb2.PoolPieces(socket=name, token=token, num=len(descriptors)))
        opened.cuda_ipc.CopyFrom(self._endpoint)

    async def connect(self, source: Source) -> KVReader:
        endpoint, incarnation = self._checked(source.opened.cuda_ipc), source.opened.source_incarnation
        peer = self._peers.get(incarnation)
        if peer is None or peer.endpoint != endpoint:
            self.forget(incarnation)
            peer = _IpcPeer(incarnation, endpoint)
            self._watch(peer)
        mapped = asyncio.wrap_future(self.start(peer, lambda address: None))
        mapped.add_done_callback(lambda f: f.cancelled() or f.exception())
        await asyncio.wait([mapped], timeout=CONNECT_TIMEOUT_S)
        if not mapped.done():
            raise TransportError("the source's memory was not mapped in time")
        mapped.result()
        return CudaIpcReader(self, peer)

    def forget(self, incarnation: str) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            peer.is_forgotten = True
            if peer.timer is not None:
                peer.timer.cancel()
            if peer.life is not None:
                asyncio.get_running_loop().remove_reader(peer.life)
                os.close(peer.life)
                peer.life = None
            self._threads.submit(self._unmap, peer)

    async def close(self) -> None:
        for incarnation in list(self._peers):
            self.forget(incarnation)
        if self._server is not None:
            await self._server.close()
            self._server = None
        await asyncio.to_thread(self._threads.shutdown)

    def start(self, peer: _IpcPeer, job: Callable[[int], None]) -> "Future[None]":
        """Run `job`, with the address of the peer's memory, on a thread. On the loop; raises TransportError for one
        that was forgotten."""
        if peer.is_forgotten:
            raise TransportError("the connection to the source is closed")
        self._peers[peer.incarnation] = peer
        loop = asyncio.get_running_loop()
        future = self._threads.submit(self._with_mapping, peer, job, loop)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._rest, peer))
        return future

    def copy(self, endpoint: _Endpoint, copies: Copies, into: Region, address: int) -> None:
        """Carry out copies; called on a thread."""
        many = listed(copies, into.address, address + endpoint.offset) if self._driver.takes_lists else None
        if many is not None:
            for share in shares_of(many, LAUNCH_COPIES, LAUNCH_BYTES):
                self._device.run(partial(self._driver.copy_list, share))
            return
        # One copy stays within one piece on each side: the next may be another GPU's.
        own_bytes = into.num_bytes if into.pieces is None else into.pieces.num_bytes
        parts = by_pieces(copies, endpoint.piece_bytes, own_bytes)
        rows = [row for part in parts for row in equally_spaced(part, into.address, address + endpoint.offset)]
        for first in range(0, len(rows), MAX_COPIES):
            self._device.run(partial(self._driver.copy, rows[first : first + MAX_COPIES]))

    def _with_mapping(self, peer: _IpcPeer, job: Callable[[int], None], loop: asyncio.AbstractEventLoop) -> None:
        with peer.lock:
            if peer.address is None:
                pieces = peer.endpoint.pieces
                peer.address = self._map(peer.endpoint) if pieces is None else self._map_pieces(peer, pieces, loop)
            address = peer.address
            peer.num_users += 1
        try:
            job(address)
        finally:
            with peer.lock:
                peer.num_users -= 1
            if peer.is_forgotten:
                self._unmap(peer)

    def _map(self, endpoint: _Endpoint) -> int:
        address, num_bytes = self._driver.open(endpoint.handle)
        if num_bytes is not None and endpoint.offset + endpoint.num_bytes > num_bytes:
            self._driver.close(address)
            raise TransportError(f"the source's pool of {endpoint.num_bytes:,} bytes exceeds the mapped memory")
        return address

    def _map_pieces(self, peer: _IpcPeer, pieces: _Pieces, loop: asyncio.AbstractEventLoop) -> int:
        receiving = receive_files(pieces.socket, pieces.token, pieces.num)
        line, descriptors = asyncio.run_coroutine_threadsafe(receiving, loop).result(CONNECT_TIMEOUT_S)
        try:
            address = self._driver.open_pieces(descriptors, peer.endpoint.piece_bytes)
        except BaseException:
            line.close()
            raise
        finally:
            close_all(descriptors)
        loop.call_soon_threadsafe(self._watch_line, peer, line)
        return address

    def _unmap(self, peer: _IpcPeer) -> None:
        """Unmap the peer's memory unless it is in use."""
        with peer.lock:
            if peer.num_users == 0 and peer.address is not None:
                self._driver.close(peer.address)
                peer.address = None

    def _watch(self, peer: _IpcPeer) -> None:
        """Have the system tell of the end of the peer's process, where it can: until then the pool stays mapped. Of
        pieces the connection tells, by which they come."""
        if peer.endpoint.process and peer.endpoint.pieces is None:
            with suppress(OSError):  # another namespace, or a system without
                peer.life = os.pidfd_open(peer.endpoint.process)
                asyncio.get_running_loop().add_reader(peer.life, self.forget, peer.incarnation)

    def _watch_line(self, peer: _IpcPeer, line: socket.socket) -> None:
        """Have the connection tell of the end of the peer's process, which sends nothing more."""
        if peer.is_forgotten:
            line.close()
        else:
            peer.life = line.detach()
            asyncio.get_running_loop().add_reader(peer.life, self.forget, peer.incarnation)

    def _rest(self, peer: _IpcPeer) -> None:
        """End a use; where nobody tells of the peer's end, the allocation is unmapped when no other follows for a
        while."""
        if peer.timer is not None:
            peer.timer.cancel()
        if not peer.is_forgotten and peer.life is None:
            peer.timer = asyncio.get_running_loop().call_later(IDLE_S, self._drop_idle, peer)

    def _drop_idle(self, peer: _IpcPeer) -> None:
        """Unmap the allocation; its readers may map it again."""
        if peer.num_users:
            self._rest(peer)
        elif not peer.is_forgotten:
            if self._peers.get(peer.incarnation) is peer:
                del self._peers[peer.incarnation]
            self._threads.submit(self._unmap, peer)

    def _checked(self, message: kv_pb2.CudaIpcEndpoint) -> _Endpoint:
        pieces = _checked_pieces(message) if message.HasField("pieces") else None
        is_whole = len(message.handle) == (0 if pieces else HANDLE_BYTES) and len(message.device_uuid) == UUID_BYTES
        is_whole = is_whole and message.num_bytes > 0 and message.process < 1 << 31
        if not is_whole or message.offset + message.num_bytes > 1 << 63:
            raise TransportError("the source's CUDA IPC endpoint is malformed")
        if not self._driver.can_reach(message.device_uuid):
            raise TransportError("this worker's GPU cannot read the memory of the source's GPU")
        return _Endpoint(message.handle, message.offset, message.num_bytes, message.process, pieces)


def _checked_pieces(message: kv_pb2.CudaIpcEndpoint) -> _Pieces:
    found = message.pieces
    are_alike = 0 < found.num <= MAX_DESCRIPTORS and message.num_bytes % found.num == 0 and message.offset == 0
    if not are_alike or not is_sound(found.socket, found.token):
        raise TransportError("the source's CUDA IPC endpoint has malformed pieces")
    return _Pieces(found.socket, found.token, found.num)
