"""KV between processes of one machine and one user: the sink maps the source's memory file read-only, and copies.

    connect   once a source process: receive the descriptor of its file (file_server.py), check and map it
    read      on one thread: parts of PART_BYTES, those of several reads in turn
    the source ends, or `forget`: reads from it fail, then it is unmapped

The source has no part in a read, as with NIXL: blocks are protected by the lease, and by the release that must be
answered "held" before what was read is used. What is mapped outlives the process that wrote it, so a read of a source
that has died ends; what it brought is never released, and so thrown away.
"""

import asyncio
import ctypes
import logging
import mmap
import os
import socket
import stat
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ...kernels.cpu.blocks import copy_runs
from ...kernels.cpu.library import StaleLibrary, Team
from ...kernels.cpu.load import library
from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.layout import Copies, Region
from ..kv.pool_file import SHARED_MEMORY, is_fixed
from .base import KVReader, Source, Transport
from .copy_budget import CopyBudget
from .file_server import FileServer, is_sound, receive_files
from .machine import this_machine
from .runs import parts_of
from .tracked_reader import TrackedReader

PART_BYTES = 16 << 20  # bytes copied between two checks of other work

log = logging.getLogger("diptych.transport")


@dataclass(frozen=True, slots=True)
class _Pool:
    """A peer's pool, as the peer published it."""

    socket: str
    token: bytes
    num_bytes: int


class _Mapping:
    """A peer's memory file, mapped. Unmapped on the thread that copies alone."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Raises TransportError for a file that cannot be mapped safely."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < num_bytes or not is_fixed(fd):
            raise TransportError(f"the source passed no sealed memory file of {num_bytes:,} bytes")
        try:
            self._mapping = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as e:
            raise TransportError(f"the source's memory cannot be mapped: {e}") from e
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _madvise_huge(self._mapping)
        self.address: int = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self.is_gone = False  # set on the loop: no copy begins any more

    def close(self) -> None:
        self._mapping.close()


@dataclass(slots=True, eq=False)
class _MappedPeer:
    pool: _Pool
    mapping: "asyncio.Task[tuple[_Mapping, socket.socket]]"


@dataclass(slots=True, eq=False)
class _Copying:
    """A read under way."""

    source: _Mapping
    into: Region
    parts: deque[Copies]
    future: "Future[None]"


class SharedMemoryReader(TrackedReader):
    def __init__(self, transport: "SharedMemoryTransport", pool: _Pool, mapping: _Mapping) -> None:
        super().__init__()
        self._transport, self._pool, self._mapping = transport, pool, mapping

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        if (copies.remote + copies.lengths).max(initial=0) > self._pool.num_bytes:
            raise TransportError("the source announced a block that it does not have")
        await self.wait_for(copies.num_bytes, self._transport.start(self._mapping, copies, into))


class SharedMemoryTransport(Transport):
    """`pool`: ours. If it is no memory file, others cannot read it so; we can read theirs. Raises TransportError where
    there is no host memory to read into, nor memory files."""

    name = SHARED_MEMORY

    def __init__(self, pool: Region) -> None:
        if not hasattr(os, "memfd_create") or pool.view is None:
            raise TransportError("this worker's KV is in device memory, or the system has no memory files")
        self._own = pool
        self._server: FileServer | None = None
        self._peers: dict[str, _MappedPeer] = {}
        self._budget = CopyBudget()
        self._team = _one_thread()
        self._threads = ThreadPoolExecutor(1, "diptych-shared-memory")
        self._is_closing = False

    def suits(self, request: kv_pb2.SubscribeRequest) -> bool:
        return self._own.file is not None and request.machine == this_machine()

    def is_described(self, opened: kv_pb2.Opened) -> bool:
        return opened.HasField("shared_memory")

    def publish(self, opened: kv_pb2.Opened) -> None:
        """Listen from the first sink on. Called on the loop. Where that fails the sink takes another transport."""
        assert self._own.file is not None
        if self._server is None:
            try:
                self._server = FileServer(self._own.file.reader_fd)
            except OSError as e:
                log.warning("no other process can be given our KV pool's memory: %s", e)
                return
        opened.shared_memory.CopyFrom(
            kv_pb2.SharedMemoryEndpoint(
                socket=self._server.name, token=self._server.token, num_bytes=self._own.num_bytes
            )
        )

    async def connect(self, source: Source) -> KVReader:
        pool, incarnation = _checked(source.opened.shared_memory), source.opened.source_incarnation
        if self._is_closing:
            raise TransportError("the worker is stopping")
        peer = self._peers.get(incarnation)
        if peer is None or peer.pool != pool:
            self.forget(incarnation)
            peer = self._peers[incarnation] = _MappedPeer(pool, asyncio.create_task(self._map(incarnation, pool)))
            peer.mapping.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([peer.mapping])
        if peer.mapping.cancelled():
            raise TransportError("the connection to the source is closed")
        if peer.mapping.exception() is not None and self._peers.get(incarnation) is peer:
            del self._peers[incarnation]
        mapping, _ = peer.mapping.result()
        return SharedMemoryReader(self, pool, mapping)

    def share_memory(self, is_computing: bool) -> None:
        self._budget.is_sharing = is_computing

    def forget(self, incarnation: str) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is None or peer.mapping.cancel() or peer.mapping.cancelled():  # not mapped, nor will it be
            return
        if peer.mapping.exception() is None:
            mapping, line = peer.mapping.result()
            asyncio.get_running_loop().remove_reader(line)
            line.close()
            mapping.is_gone = True
            self._threads.submit(mapping.close)

    async def close(self) -> None:
        self._is_closing = True
        connecting = [peer.mapping for peer in self._peers.values()]
        for incarnation in list(self._peers):
            self.forget(incarnation)
        await asyncio.gather(*connecting, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
            self._server = None
        await asyncio.to_thread(self._threads.shutdown)

    async def _map(self, incarnation: str, pool: _Pool) -> tuple[_Mapping, socket.socket]:
        line, [fd] = await receive_files(pool.socket, pool.token)
        try:
            mapping = _Mapping(fd, pool.num_bytes)
        except TransportError:
            line.close()
            raise
        finally:
            os.close(fd)
        asyncio.get_running_loop().add_reader(
            line, self.forget, incarnation
        )  # the source sends nothing: readable means ended
        return mapping, line

    def start(self, source: _Mapping, copies: Copies, into: Region) -> "Future[None]":
        """Start a read. The future cannot be cancelled: bytes may land until it is done. On the loop; raises
        TransportError."""
        if source.is_gone:
            raise TransportError("the connection to the source is closed")
        read = _Copying(source, into, deque(parts_of(copies, PART_BYTES)), Future())
        read.future.set_running_or_notify_cancel()
        self._threads.submit(self._advance, read)
        return read.future

    def _advance(self, read: _Copying) -> None:
        """Copy one part, and queue for the next; called on the thread."""
        try:
            if read.source.is_gone:
                raise TransportError("the connection to the source is closed")
            if wait_s := self._budget.wait_s():
                time.sleep(wait_s)
                self._budget.wait_s()
            if read.parts:
                _copy(self._team, read.parts.popleft(), read.into.address, read.source.address)
                self._budget.copied()
            if read.parts:
                self._threads.submit(self._advance, read)  # RuntimeError: the transport is closing
            else:
                read.future.set_result(None)
        except RuntimeError as e:
            read.future.set_exception(TransportError(f"the worker is stopping: {e}"))
        except Exception as e:  # noqa: BLE001 - raised where it is waited for
            read.future.set_exception(e)


def _copy(team: Team | None, copies: Copies, target: int, source: int) -> None:
    """Copy runs between two regions that begin at these addresses. Python's lock is free meanwhile."""
    targets, sources = copies.local + target, copies.remote + source
    if team is None:
        for row in zip(targets.tolist(), sources.tolist(), copies.lengths.tolist(), strict=True):
            ctypes.memmove(*row)
        return
    for length in np.unique(copies.lengths).tolist():
        alike = copies.lengths == length
        copy_runs(team, targets[alike], sources[alike], length)


def _one_thread() -> Team | None:
    """A team of the thread that calls it; None without compiled kernels."""
    try:
        compiled = library()
    except StaleLibrary as e:
        log.info("KV is copied without the compiled kernels: %s", e)
        return None
    return Team(compiled, 1) if compiled is not None else None


def _madvise_huge(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as e:
        log.debug("no huge pages for the source's memory: %s", e)


def _checked(message: kv_pb2.SharedMemoryEndpoint) -> _Pool:
    if not is_sound(message.socket, message.token) or not 0 < message.num_bytes < 1 << 62:
        raise TransportError("the source's shared memory endpoint is malformed")
    return _Pool(message.socket, message.token, message.num_bytes)
