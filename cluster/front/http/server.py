"""Server of the HTTP port. The port is bound early, so that a port in use is found before anything starts."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from ....workers.common.errors import ConfigError, PortInUse
from ...common.config import TlsConfig
from ..limits import ConnectionLimits
from .listener import Listener
from .metrics import HttpMetrics

BACKLOG = 2048
SEND_BUFFER_BYTES = (
    256 << 10
)  # in the kernel, for each connection: its default is 4 MiB for a client that does not read


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Listen on host:port (0: the kernel chooses). `reuse_port`: several processes share the port, and the kernel
    spreads their connections. Raises PortInUse, ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}: {e.strerror}. Is it an address of this machine?") from e
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # inherited by accepted connections
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"cannot listen on {host}:{port}: it is in use. Choose another port, or 0 for any free one"
            ) from e
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}. Choose another address or port") from e
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn's server over a Listener. It finishes open calls when it stops."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, metrics: HttpMetrics) -> None:
        super().__init__(config)
        self._limits = limits
        self._metrics = metrics

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # signals are handled by the process, not by one of its listeners

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self.servers = []  # of uvicorn
        (sock,) = sockets
        self._listener = Listener(sock, self.config, self.server_state, self._limits, self._metrics)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._listener.stop()
        await super().shutdown(sockets)


async def serve_http(
    app: ASGIApp,
    sock: socket.socket,
    stop: asyncio.Event,
    *,
    grace_s: float = 10.0,
    tls: TlsConfig | None = None,
    limits: ConnectionLimits | None = None,
    metrics: HttpMetrics | None = None,
) -> None:
    """Serve until `stop` is set; then take no new call, give open ones `grace_s` to end, and close the socket.
    `metrics`: counts connections, and answers that did not come from `app`."""
    config = uvicorn.Config(
        app,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config, limits or ConnectionLimits(), metrics or HttpMetrics())
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
