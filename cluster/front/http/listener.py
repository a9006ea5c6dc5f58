"""Accepts connections to the HTTP port, in bounded numbers: in all, and from one address.

Each has a slot. Where all are taken, the connection that has waited longest for its client's next request is closed,
and the new one gets its slot. A refused connection is answered 429 or 503 where no TLS is spoken, and closed.
"""

import asyncio
import errno
import ipaddress
import resource
import socket
from collections import Counter
from contextlib import suppress
from http import HTTPStatus

from uvicorn import Config
from uvicorn.server import ServerState

from ..limits import ConnectionLimits
from .connection import ServerConnection, refusal
from .metrics import HttpMetrics

# No file descriptor or no memory for a socket at the moment.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
PAUSE_S = 0.1  # between two tries, where no connection can be closed
SPARE_DESCRIPTORS = 256  # for the links to workers, gRPC, files
IPV6_HOST_BITS = 64  # of the network that one IPv6 client has


class Listener:
    """Listener that accepts from `sock` until `stop`. Its connections stay open."""

    def __init__(
        self, sock: socket.socket, config: Config, state: ServerState, limits: ConnectionLimits, metrics: HttpMetrics
    ) -> None:
        self._sock = sock
        self._config = config
        self._state = state
        self._limits = limits
        self._max_connections = allow_descriptors(limits.max_connections + SPARE_DESCRIPTORS) - SPARE_DESCRIPTORS
        self.metrics = metrics
        self._slots: set[_Slot] = set()
        self._num_from: Counter[str] = Counter()
        self._waiting: dict[_Slot, None] = {}  # longest first
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    def wait(self, slot: "_Slot") -> None:
        if slot in self._slots:
            self._waiting[slot] = None

    def work(self, slot: "_Slot") -> None:
        self._waiting.pop(slot, None)

    def forget(self, slot: "_Slot") -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            self._waiting.pop(slot, None)
            self._num_from[slot.origin] -= 1
            if not self._num_from[slot.origin]:
                del self._num_from[slot.origin]
            self.metrics.connected(len(self._slots))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # let open connections run between two new ones
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as e:
                if e.errno in _EXHAUSTED and not self._make_room():
                    await asyncio.sleep(PAUSE_S)
                continue
            self._admit(sock, origin_of(address[0]))

    def _admit(self, sock: socket.socket, origin: str) -> None:
        if self._num_from[origin] >= self._limits.max_connections_per_address:
            self._turn_away(sock, HTTPStatus.TOO_MANY_REQUESTS)
        elif len(self._slots) >= self._max_connections and not self._make_room():
            self._turn_away(sock, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            slot = _Slot(self, origin)
            self._slots.add(slot)
            self._num_from[origin] += 1
            self.metrics.connected(len(self._slots))
            slot.opening = asyncio.create_task(self._open(sock, slot))
            self._opening.add(slot.opening)
            slot.opening.add_done_callback(self._opening.discard)
            slot.wait()

    async def _open(self, sock: socket.socket, slot: "_Slot") -> None:
        """Do the TLS handshake, if there is one, and start the connection."""
        connection = ServerConnection(self._config, self._state, self._limits, slot)
        loop = asyncio.get_running_loop()
        try:
            if self._config.ssl is None:
                await loop.connect_accepted_socket(lambda: connection, sock)
            else:
                await loop.connect_accepted_socket(
                    lambda: connection,
                    sock,
                    ssl=self._config.ssl,
                    ssl_handshake_timeout=self._limits.header_timeout_s,
                    ssl_shutdown_timeout=self._limits.header_timeout_s,
                )
        except (OSError, asyncio.CancelledError):
            sock.close()
            self.forget(slot)
        else:
            slot.connection = connection

    def _make_room(self) -> bool:
        slot = next(iter(self._waiting), None)
        if slot is None:
            return False
        self.forget(slot)
        slot.close()
        return True

    def _turn_away(self, sock: socket.socket, status: HTTPStatus) -> None:
        self.metrics.refused(status)
        with sock, suppress(OSError):
            if self._config.ssl is None:
                sock.send(refusal(status))


class _Slot:
    """Slot of one connection of a Listener."""

    def __init__(self, listener: Listener, origin: str) -> None:
        self.origin = origin
        self.opening: asyncio.Task[None] | None = None
        self.connection: ServerConnection | None = None
        self._listener = listener

    def wait(self) -> None:
        self._listener.wait(self)

    def work(self) -> None:
        self._listener.work(self)

    def leave(self) -> None:
        self._listener.forget(self)

    def refused(self, status: int) -> None:
        self._listener.metrics.refused(status)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.cut()
        elif self.opening is not None:
            self.opening.cancel()


def origin_of(address: str) -> str:
    """Name under which connections of an address are counted; for IPv6, its network."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), 128 - IPV6_HOST_BITS), strict=False).network_address)


def allow_descriptors(wanted: int) -> int:
    """Raise this process's limit of open files and sockets to `wanted`, and return what it may open of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return max(soft, allowed)
