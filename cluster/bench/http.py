"""HTTP/1.1 client for many streamed answers at once: one asyncio protocol for each connection, parsed by httptools.

Bytes of a body are passed on as they arrive, with the time of their arrival, so that little of the client's own delay
counts as the server's. Connections are reused, as clients of model servers do.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult

import httptools

from ... import __version__

MAX_ERROR_BYTES = 1 << 20
OnBody = Callable[[bytes, float], None]  # part of a body, and time of its arrival by time.perf_counter()


@dataclass(frozen=True, slots=True)
class Response:
    """Answer to a request. `body`: empty where its bytes were passed on."""

    status: int
    body: bytes


class ClientConnection(asyncio.Protocol):
    """Connection for one request at a time. Raises ConnectionError where the server closes it or sends no HTTP."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Response] | None = None
        self._on_body: OnBody | None = None
        self._collected = bytearray()
        self._now = 0.0
        self._is_framed = False
        self.got_bytes = False  # of the answer that is being read

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, request: bytes, on_body: OnBody) -> Response:
        """`on_body` gets the body of an answer with status 200; another body is in the Response."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._on_body, self._is_framed, self.got_bytes = on_body, False, False
        self._collected.clear()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = self._on_body = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if exc is None and self.got_bytes and not self._is_framed:
            self.on_message_complete()  # a body without a length ends with its connection
        else:
            reason = exc or ConnectionResetError("the server closed the connection before its answer ended")
            self._done.set_exception(reason)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(ConnectionError(f"the server does not speak HTTP/1: {e}"))

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._is_framed = self._is_framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None and self._parser.get_status_code() == 200:
            try:
                self._on_body(body, self._now)
            except ValueError as e:
                self._fail(ConnectionError(f"the answer cannot be read: {e}"))
        elif len(self._collected) < MAX_ERROR_BYTES:
            self._collected += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue: the answer follows
            return
        if self._done is not None and not self._done.done():
            self._done.set_result(Response(status, bytes(self._collected)))
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class HttpClient:
    """HTTP client of one server. `url`: scheme, host and port are used."""

    def __init__(self, url: SplitResult, headers: Mapping[str, str]) -> None:
        """Raises ValueError for an invalid port."""
        self._host = url.hostname or "127.0.0.1"
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        lines = {"Host": url.netloc.rpartition("@")[2], "User-Agent": f"diptych-bench/{__version__}", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[ClientConnection] = []

    async def get(self, path: str) -> Response:
        pieces: list[bytes] = []
        request = f"GET {path} HTTP/1.1\r\n{self._headers}\r\n".encode()
        response = await self._call(request, lambda body, _: pieces.append(body))
        return Response(response.status, response.body or b"".join(pieces))

    async def post(self, path: str, body: bytes, on_body: OnBody) -> Response:
        head = (
            f"POST {path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._call(head.encode() + body, on_body)

    async def _call(self, request: bytes, on_body: OnBody) -> Response:
        """Send a request. Raises OSError (which includes ConnectionError, ssl.SSLError and failed name look-ups)."""
        while kept := self._kept():
            try:
                return await self._over(kept, request, on_body)
            except ConnectionError:
                # A server may close an idle connection while it is reused. An answer that has begun is not retried.
                if kept.got_bytes:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(ClientConnection, self._host, self._port, ssl=self._ssl)
        return await self._over(connection, request, on_body)

    async def _over(self, connection: ClientConnection, request: bytes, on_body: OnBody) -> Response:
        response = await connection.call(request, on_body)
        if connection.is_open:
            self._idle.append(connection)
        return response

    def _kept(self) -> ClientConnection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
