"""Accepts the HTTP port's connections, in bounded numbers: in all, and from one address.

Where all places are taken, a new connection gets that of the one which has waited longest for its client's next
request. What is refused is answered 429 or 503 where no TLS is spoken, and closed.
"""

import asyncio
import errno
import ipaddress
import resource
import socket
import ssl
from collections import Counter
from contextlib import suppress
from http import HTTPStatus

from uvicorn import Config
from uvicorn.server import ServerState

from .connection_limits import ConnectionLimits
from .http_connection import Connection, refusal
from .http_metrics import HttpMetrics

# No descriptor, or no memory for a socket: for the moment.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
PAUSE_S = 0.1  # where there is none, and none can be closed
SPARE_DESCRIPTORS = 256  # for the links to workers, gRPC, files
IPV6_HOST_BITS = 64  # an IPv6 client owns a network of so many bits, and all addresses in it


class Listener:
    """Accepts from `sock` until `stop`; its connections live on."""

    def __init__(
        self, sock: socket.socket, config: Config, state: ServerState, limits: ConnectionLimits, metrics: HttpMetrics
    ) -> None:
        self._sock = sock
        self._config = config
        self._state = state
        self._limits = limits
        self._max_connections = allow_descriptors(limits.max_connections + SPARE_DESCRIPTORS) - SPARE_DESCRIPTORS
        self.metrics = metrics
        self._places: set[_Place] = set()
        self._num_from: Counter[str] = Counter()
        self._waiting: dict[_Place, None] = {}  # longest first
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    def wait(self, place: "_Place") -> None:
        if place in self._places:
            self._waiting[place] = None

    def work(self, place: "_Place") -> None:
        self._waiting.pop(place, None)

    def forget(self, place: "_Place") -> None:
        if place in self._places:
            self._places.remove(place)
            self._waiting.pop(place, None)
            self._num_from[place.origin] -= 1
            if not self._num_from[place.origin]:
                del self._num_from[place.origin]
            self.metrics.connected(len(self._places))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # whoever is connected has a turn between any two who connect
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
        elif len(self._places) >= self._max_connections and not self._make_room():
            self._turn_away(sock, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            place = _Place(self, origin)
            self._places.add(place)
            self._num_from[origin] += 1
            self.metrics.connected(len(self._places))
            place.opening = asyncio.create_task(self._open(sock, place))
            self._opening.add(place.opening)
            place.opening.add_done_callback(self._opening.discard)
            place.wait()

    async def _open(self, sock: socket.socket, place: "_Place") -> None:
        """Shake hands, where TLS is spoken, and let the connection live."""
        connection = Connection(self._config, self._state, self._limits, place)
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
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            sock.close()
            self.forget(place)
        else:
            place.connection = connection

    def _make_room(self) -> bool:
        place = next(iter(self._waiting), None)
        if place is None:
            return False
        self.forget(place)
        place.close()
        return True

    def _turn_away(self, sock: socket.socket, status: HTTPStatus) -> None:
        self.metrics.refused(status)
        with sock, suppress(OSError):
            if self._config.ssl is None:
                sock.send(refusal(status))


class _Place:
    """A Place of a Listener."""

    def __init__(self, listener: Listener, origin: str) -> None:
        self.origin = origin
        self.opening: asyncio.Task[None] | None = None
        self.connection: Connection | None = None
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
    """What is counted as one address: of IPv6 a client's network."""
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
    """Let this process open so many files and sockets; how many of them it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return max(soft, allowed)
