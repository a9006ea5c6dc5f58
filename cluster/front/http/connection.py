"""HTTP connection: uvicorn's protocol, bounded in bytes and time before its client has sent a key.

    opened ──first byte──> head ──complete──> body, answer ──answered──> idle ──first byte──> head ...
       │ header_timeout_s    │ header_timeout_s: 408                        │ idle_timeout_s
       └── closed            └── max_header_bytes: 431                      └── closed

A client that reads nothing for `send_timeout_s` is disconnected. A request that is answered before its whole body has
come is the last one of its connection, and its answer says so: further data is dropped.
"""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from starlette.types import Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ..limits import ConnectionLimits

# In a call's state:
CUT = "cut"  # ends its connection at once, with unsent data
CLIENT = "client"  # the ClientPresence of its connection
HAS_BODY = "has_body"  # present once the whole body has come

MAX_HEADERS = 100
MAX_PIPELINED = 8  # requests that came before an earlier one was answered
LINGER_S = 2.0  # time in which further data is read, so that the client gets the answer and no reset
LINGER_BYTES = 4 << 20
HIGH_WATER_BYTES = 64 << 10  # of unsent data, beyond which the application waits for the client
_Data = bytes | bytearray | memoryview
MIN_PROGRESS_BYTES = HIGH_WATER_BYTES  # bytes that a client must read in send_timeout_s, if this many wait

_MESSAGES = {
    HTTPStatus.BAD_REQUEST: "this is not an HTTP/1.1 request: check the client, and whether it should speak TLS",
    HTTPStatus.REQUEST_TIMEOUT: "the request's headers did not arrive in time: send them at once",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the request's line and headers are too large: send fewer and shorter",
    HTTPStatus.TOO_MANY_REQUESTS: "this address has too many connections open: use fewer, and keep them alive",
    HTTPStatus.SERVICE_UNAVAILABLE: "too many connections are open: try again later",
}


class Slot(Protocol):
    """Entry of a connection in its listener."""

    def wait(self) -> None:
        """The connection waits for a request: it may be closed for another one."""
        ...

    def work(self) -> None: ...
    def leave(self) -> None: ...
    def refused(self, status: int) -> None:
        """An answer was sent without the application."""
        ...


class ClientPresence:
    """Presence of a connection's client, and the tasks that are cancelled when it leaves."""

    def __init__(self) -> None:
        self.is_gone = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def add(self, task: "asyncio.Task[Any]") -> None:
        """Cancel `task` when the client leaves: at once, if it has left already."""
        if self.is_gone:
            task.cancel()
        else:
            self._tasks.add(task)

    def discard(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)

    def leave(self) -> None:
        self.is_gone = True
        for task in self._tasks:
            task.cancel()


class AnswerTransport(asyncio.Transport):
    """Transport that uvicorn uses: `close` asks the connection, which closes within a bound. The head of an answer is
    sent together with the first part of its body: each write to a socket costs as much as the work for a token."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._is_closing = False
        self._close = close
        self._held: _Data = b""
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        if not self._is_closing:
            self.flush()
            self._is_closing = True
            self._close()

    def hold_next(self) -> None:
        """Hold the next write until the one after it, or until the event loop's next turn."""
        self.flush()
        self.write = self._hold

    def flush(self) -> None:
        """Send what is held. Idempotent."""
        self.write = self._transport.write
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def _hold(self, data: _Data) -> None:
        self._held = data
        self.write = self._write_both
        asyncio.get_running_loop().call_soon(self.flush)

    def _write_both(self, data: _Data) -> None:
        held, self._held = self._held, b""
        self.write = self._transport.write
        self._transport.writelines((held, data))


class _TooLarge(Exception):
    """Raised in a callback of the parser, which ends the parsing."""


class ServerConnection(HttpToolsProtocol):
    def __init__(self, config: Config, server_state: ServerState, limits: ConnectionLimits, slot: Slot) -> None:
        self._client = ClientPresence()
        super().__init__(config, server_state, {CUT: self.cut, CLIENT: self._client})
        self.timeout_keep_alive = limits.idle_timeout_s  # it is used only by call_later
        self._limits = limits
        self._slot = slot
        self._raw: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the head, or of the closing
        self._stall: asyncio.TimerHandle | None = None  # while the client does not read
        self._in_head = self._in_body = self._is_lingering = False
        self._may_stay_open = True  # after the answer to the request whose head came last
        self._has_begun_head = False  # in the data that is parsed now
        self._num_head_bytes = 0  # of whole header fields
        self._num_unused_bytes = 0  # parsed since the last complete head or request, without the body
        self._num_body_bytes = 0
        self._num_discarded = 0

    def cut(self) -> None:
        """End the connection at once."""
        if self._raw is not None:
            self._raw.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self._answers = AnswerTransport(transport, self._leave)
        super().connection_made(self._answers)
        self._slot.wait()
        self._arm(self._limits.header_timeout_s, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stall, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._raw = None
        super().connection_lost(exc)
        self._client.leave()
        self._slot.leave()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            self._discard(len(data))
            return
        assert self.parser is not None
        self._num_unused_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as e:
            too_large = isinstance(e.__context__, _TooLarge)
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_large else HTTPStatus.BAD_REQUEST)
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # the connection closes after its answer; nothing behind it is parsed
        else:
            self._num_unused_bytes = max(self._num_unused_bytes, 0)
            # Within a body: sizes of chunks, and trailers.
            if self._num_unused_bytes > self._limits.max_header_bytes + self._num_body_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            elif self._has_begun_head and self._in_head:  # most heads come whole, and need no timer
                self._arm(self._limits.header_timeout_s, self._on_late_head)
        self._has_begun_head = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooLarge
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._in_head = self._has_begun_head = True
        self._num_head_bytes = self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._num_head_bytes += len(url)
        if self._num_head_bytes > self._limits.max_header_bytes:
            raise _TooLarge
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which is not used
        self._num_head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._num_head_bytes > self._limits.max_header_bytes or len(self.headers) >= MAX_HEADERS:
            raise _TooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._num_unused_bytes = 0
        self._disarm()
        self._slot.work()
        if not self._is_answering:
            self._answers.hold_next()
        super().on_headers_complete()
        if self.scope["http_version"] < "1.1":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign]
        # An answer that begins before the whole body has come says that it is the last one.
        self._may_stay_open = self.cycle.keep_alive
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_unused_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._num_unused_bytes = self._num_body_bytes = 0
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._may_stay_open
        self.cycle.scope["state"][HAS_BODY] = True  # type: ignore[typeddict-item]
        if not self.pipeline:
            self.flow.resume_reading()  # a large body may have paused it: otherwise a client that leaves is not seen
        super().on_message_complete()

    def shutdown(self) -> None:
        self._may_stay_open = False
        super().shutdown()

    def on_response_complete(self) -> None:
        if self._in_body and not self.pipeline:
            self.transport.close()
        super().on_response_complete()
        if not self.pipeline and self.cycle.response_complete:
            self._slot.wait()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _on_late_head(self) -> None:
        if self._is_answering:  # head of the next request, before the answer to this one
            self._arm(self._limits.header_timeout_s, self._on_late_head)
        elif self._in_head or self._num_unused_bytes:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus) -> None:
        if self._is_answering:
            is_broken = status == HTTPStatus.BAD_REQUEST and self._in_body
            if not is_broken or self.pipeline or self.cycle.response_started:
                self.cut()
                return
            # The call waits for the body that is broken: it ends as if the client had left, and writes nothing.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._in_body = False  # nothing more of it is read
        else:
            self._in_head = True  # another head may follow
        self._slot.refused(status)
        self.transport.write(refusal(status))
        self.transport.close()

    def _leave(self) -> None:
        """Send the waiting data and close: at once, or after LINGER_S in which further data is read."""
        raw = self._raw
        if raw is None:
            return
        self._unset_keepalive_if_required()
        if (self._in_head or self._in_body) and raw.can_write_eof() and not raw.is_closing():
            self._is_lingering = True
            raw.write_eof()
            raw.resume_reading()
            self._arm(LINGER_S, self._close_or_cut)
        else:
            self._close_or_cut()

    def _close_or_cut(self) -> None:
        self._disarm()
        if self._raw is not None:
            self._raw.close()
            self._watch_sending()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > LINGER_BYTES and self._raw is not None:
            self._raw.pause_reading()

    def _watch_sending(self) -> None:
        """Disconnect the client where it reads too little of the waiting data."""
        if self._stall is not None:
            self._stall.cancel()
        if self._raw is not None and (waiting := self._raw.get_write_buffer_size()):
            self._stall = self.loop.call_later(self._limits.send_timeout_s, self._check_sending, waiting)

    def _check_sending(self, waited: int) -> None:
        assert self._raw is not None
        waiting = self._raw.get_write_buffer_size()
        if waiting and waiting > waited - MIN_PROGRESS_BYTES:
            self.cut()
        else:
            self._watch_sending()

    def _arm(self, after_s: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(after_s, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """Return the `send` of a call by HTTP/1.0, which knows no chunks: an answer without a length ends with its
    connection (RFC 9112, section 6.1)."""
    send, has_length = cycle.send, True

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


def refusal(status: HTTPStatus) -> bytes:
    """Answer to a connection that is then closed."""
    kind = "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else kind
    error: dict[str, Any] = {"message": _MESSAGES[status], "type": kind, "param": None, "code": None}
    body = json.dumps({"error": error}).encode()
    retry = b"retry-after: 1\r\n" if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE} else b""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n"
    )
    return head.encode() + retry + b"\r\n" + body
