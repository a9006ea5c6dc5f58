"""The one thread of a process that talks to NIXL: it owns the agent, its peers and the reads under way.

    idle                       sleeps until a command comes
    hand-offs of ours open     makes progress every SERVE_POLL_S: else peers cannot connect nor, on some links, read
    reads under way            polls them; each has at most MAX_POSTED transfers of POST_BYTES posted. While the engine
                               computes, only a part of the time goes into copying (copy_budget.py)

Within a machine NIXL copies inside `post`, without the interpreter's lock: a post is large enough for the Python around
it not to count, and small enough for a command, or another read, not to wait long.
A read's future is done only when no byte of it can land any more: every transfer has ended, or the connection is cut.
"""

import logging
import os
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..common.errors import DiptychError, TransportError
from ..kv.device_kv import CudaDriver
from ..kv.layout import Copies, Offsets, Region
from .copy_budget import CopyBudget
from .nixl_agent import Endpoint, memory_type
from .runs import parts_of

POST_BYTES = 16 << 20
MAX_POSTED = 4  # simultaneous transfers of one read
MAX_PEERS = 256
SERVE_POLL_S = 0.001
READ_POLL_S = 0.0001
# UCX knows no token: over TCP it lets whoever dials write to any address. So it never listens. Within a machine its
# messages go through shared memory (files of mode 0600 without a name; sysv's would be open to the group), bytes by
# process_vm_readv, which the kernel grants to the same user alone. On a machine with GPUs NIXL insists on "cuda".
TLS_WITHIN_MACHINE = "posix,cma,self,cuda"
TLS_RDMA = "ib"  # whoever is on the fabric can also read and write registered memory
UCX_FIXED = {
    "UCX_POSIX_ERROR_HANDLING": "y",  # NIXL asks for transports that notice a peer's end
    # UCX's own look at its peers ends the process (a segmentation fault) where one is killed while it connects. Reads
    # from a dead peer fail without it, and its connection is cut when the hand-off's stream breaks.
    "UCX_KEEPALIVE_INTERVAL": "inf",
}
UCX_SETTINGS = {
    "UCX_LOG_LEVEL": "fatal",  # what fails is raised, and logged by us
    "UCX_CMA_SEG_SIZE": "16m",  # bytes a system call copies at most: of 512 KiB, as UCX has it, the calls are seen
    # Of GPUs without NVLink UCX copies through the host unless told otherwise, 5,000 times slower within one GPU.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_CMA_TX_QUOTA": "32",  # copies between two checks of other work: matters for small copies
}

log = logging.getLogger("diptych.nixl")


@dataclass(slots=True, eq=False)
class _NixlPeer:
    incarnation: str
    endpoints: tuple[Endpoint, ...]  # of each piece of its pool


@dataclass(slots=True, eq=False)
class _Read:
    peer: _NixlPeer
    endpoint: Endpoint
    into: Region
    to_post: deque[Copies]
    future: "Future[None]"
    posted: deque[Any] = field(default_factory=deque[Any])


class NixlThread:
    """A NixlAgent of this process. Starts at once. Raises ImportError or TransportError where NIXL is not usable."""

    def __init__(self, regions: Sequence[Region], driver: CudaDriver | None = None, *, has_rdma: bool) -> None:
        """regions: that it registers, first the one that peers read. driver: of the device that regions are on: UCX
        registers and copies its memory in the thread's context."""
        self._agent_name, self._metadata = f"diptych-{uuid.uuid4()}", b""
        self.budget = CopyBudget()
        self._regions = regions
        self._driver, self._has_rdma = driver, has_rdma
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: dict[str, _NixlPeer] = {}
        self._reads: list[_Read] = []
        self._registered: list[Any] = []
        self._is_serving = False
        self._is_stopping = False
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="diptych-nixl", daemon=True)
        self._thread.start()
        ready.result()

    @property
    def endpoint(self) -> Endpoint:
        own = self._regions[0]
        kind = memory_type(own)
        return Endpoint(self._agent_name, self._metadata, own.address, own.num_bytes, own.device_id, kind)

    def connect(self, incarnation: str, endpoints: Sequence[Endpoint]) -> "Future[None]":
        return self._call(lambda: self._add_peer(incarnation, tuple(endpoints)))

    def read(self, incarnation: str, piece: int, copies: Copies, into: Region | None = None) -> "Future[None]":
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._put(lambda: self._start_read(incarnation, piece, copies, into or self._regions[0], future))
        return future

    def forget(self, incarnation: str) -> "Future[None]":
        return self._call(lambda: self._drop_peer(incarnation, "the connection was given up"))

    def serve(self, is_serving: bool) -> None:
        def switch() -> None:
            self._is_serving = is_serving

        self._put(switch)

    def stop(self) -> None:
        def switch() -> None:
            self._is_stopping = True

        self._put(switch)
        self._thread.join()

    def _call(self, command: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                command()
            except DiptychError as e:
                future.set_exception(e)
            else:
                future.set_result(None)

        self._put(run)
        return future

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if not self._thread.is_alive():
            self._run_commands(wait=0)  # nothing is left to act on: each fails, or has nothing to do

    def _run(self, ready: "Future[None]") -> None:
        try:
            if self._driver is not None:
                self._driver.enter_thread()
            self._open_agent()
        except (ImportError, TransportError) as e:
            ready.set_exception(e)
            return
        except Exception as e:  # not foreseen, but who waits for the thread must not wait for ever
            log.exception("NIXL's thread could not start")
            ready.set_exception(TransportError(f"NIXL does not work on this machine: {e!r}"))
            return
        ready.set_result(None)
        wait = None
        while not self._is_stopping:
            try:
                wait = self._turn(wait)
            except Exception as e:
                log.exception("NIXL's thread failed by our own fault; its connections are cut")
                self._drop_all(repr(e))
        self._drop_all("the worker is stopping")
        for registered in self._registered:
            self._quietly(partial(self._agent.deregister_memory, registered))
        del self._agent

    def _turn(self, wait: float | None) -> float | None:
        """Run the loop once, after at most `wait` for a command; return how long to wait before the next."""
        self._run_commands(wait)
        if self._is_serving:
            self._progress()
        if not self._reads:
            return SERVE_POLL_S if self._is_serving else None
        if wait_s := self.budget.wait_s():
            return min(wait_s + READ_POLL_S, SERVE_POLL_S)
        if not self._advance_all():
            return READ_POLL_S
        self.budget.copied()
        return 0

    def _run_commands(self, wait: float | None) -> None:
        try:
            self._commands.get(timeout=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _open_agent(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        for name, value in UCX_SETTINGS.items():
            os.environ.setdefault(name, value)
        # This overrides the environment, which may allow TCP.
        tls = f"{TLS_WITHIN_MACHINE},{TLS_RDMA}" if self._has_rdma else TLS_WITHIN_MACHINE
        os.environ.update(UCX_FIXED, UCX_TLS=tls)
        from nixl import _api as nixl

        named = [e for e in vars(vars(nixl)["nixlBind"]).values() if isinstance(e, type) and issubclass(e, Exception)]
        self._errors: tuple[type[Exception], ...] = (*named, RuntimeError, ValueError)
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl.nixl_agent(self._agent_name, config)
            for own in self._regions:
                row = (own.address, own.num_bytes, own.device_id, "")
                self._registered.append(self._agent.register_memory([row], memory_type(own)))
            self._metadata = self._agent.get_agent_metadata()
        except self._errors as e:
            raise TransportError(f"NIXL does not work on this machine: {e!r}") from e

    def _progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except self._errors as e:
            log.debug("NIXL could not make progress: %r", e)

    def _quietly(self, release: Callable[[], object]) -> None:
        try:
            release()
        except self._errors as e:
            log.debug("NIXL could not release: %r", e)

    def _add_peer(self, incarnation: str, endpoints: tuple[Endpoint, ...]) -> None:
        if self._is_stopping:
            raise TransportError("the worker is stopping")
        known = self._peers.get(incarnation)
        if known is not None and known.endpoints == endpoints:
            self._peers[incarnation] = self._peers.pop(incarnation)  # the most recently used is last
            return
        self._drop_peer(incarnation, "the source changed its endpoint")
        with ExitStack() as unless_added:
            for endpoint in endpoints:
                self._add_agent(endpoint)
                unless_added.callback(self._remove_agent, endpoint)
            unless_added.pop_all()
        self._peers[incarnation] = _NixlPeer(incarnation, endpoints)
        busy = {read.peer.incarnation for read in self._reads} | {incarnation}
        for idle in [i for i in self._peers if i not in busy][: max(len(self._peers) - MAX_PEERS, 0)]:
            self._drop_peer(idle, "it was not used for long")

    def _add_agent(self, endpoint: Endpoint) -> None:
        try:
            name = _text(self._agent.add_remote_agent(endpoint.metadata))
            if name != endpoint.agent_name:
                raise TransportError(
                    f"the source's NIXL metadata names {name!r}, but its endpoint names {endpoint.agent_name!r}"
                )
        except self._errors as e:
            raise TransportError(f"the source's NIXL endpoint cannot be used: {e!r}") from e

    def _remove_agent(self, endpoint: Endpoint) -> None:
        self._quietly(lambda: self._agent.remove_remote_agent(endpoint.agent_name))

    def _drop_peer(self, incarnation: str, why: str) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        ended = [read for read in self._reads if read.peer is peer]
        self._reads = [read for read in self._reads if read.peer is not peer]
        # Closes the connections immediately, even with running transfers; only then are their handles invalid.
        for endpoint in peer.endpoints:
            self._remove_agent(endpoint)
        for read in ended:
            for handle in read.posted:
                self._quietly(handle.release)
        self._progress()
        for read in ended:
            read.future.set_exception(TransportError(f"a NIXL read failed: {why}"))

    def _drop_all(self, why: str) -> None:
        for incarnation in list(self._peers):
            self._drop_peer(incarnation, why)

    def _start_read(self, incarnation: str, piece: int, copies: Copies, into: Region, future: "Future[None]") -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            future.set_exception(TransportError("the connection to the source is gone"))
            return
        self._reads.append(_Read(peer, peer.endpoints[piece], into, deque(parts_of(copies, POST_BYTES)), future))

    def _advance_all(self) -> bool:
        """Advance all reads once; True if any could be."""
        has_moved = False
        for read in list(self._reads):
            if self._peers.get(read.peer.incarnation) is not read.peer:
                continue  # dropped a moment ago, by another read's error
            try:
                has_moved |= self._advance(read)
            except (TransportError, *self._errors) as e:
                # Errors of UCX are errors of a connection: cut it, so that nothing more can land.
                self._drop_peer(read.peer.incarnation, repr(e))
        return has_moved

    def _advance(self, read: _Read) -> bool:
        num_posted = num_ended = 0
        if read.to_post and len(read.posted) < MAX_POSTED:
            handle = self._transfer_of(read, read.to_post.popleft())
            read.posted.append(handle)
            _is_done(self._agent.transfer(handle))
            num_posted = 1
        for _ in range(len(read.posted)):
            handle = read.posted.popleft()
            read.posted.append(handle)
            if _is_done(self._agent.check_xfer_state(handle)):
                read.posted.pop().release()
                num_ended += 1
        if not read.to_post and not read.posted:
            self._reads.remove(read)
            read.future.set_result(None)
        return num_posted + num_ended > 0

    def _transfer_of(self, read: _Read, copies: Copies) -> Any:
        own, far = read.into, read.endpoint

        def descriptors(base: int, offsets: Offsets, device_id: int, memory: str) -> Any:
            rows = np.empty((len(offsets), 3), dtype=np.uint64)
            rows[:, 0] = base + offsets.astype(np.uint64)
            rows[:, 1] = copies.lengths
            rows[:, 2] = device_id
            return self._agent.get_xfer_descs(rows, memory)

        local = descriptors(own.address, copies.local, own.device_id, memory_type(own))
        remote = descriptors(far.base_address, copies.remote, far.device_id, far.memory)
        return self._agent.initialize_xfer("READ", local, remote, far.agent_name)


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise TransportError("NIXL reported an error")
    return state == "DONE"


def _text(name: str | bytes) -> str:
    """Decode a name. NIXL's annotation says str; it gives bytes."""
    return name if isinstance(name, str) else name.decode(errors="replace")
