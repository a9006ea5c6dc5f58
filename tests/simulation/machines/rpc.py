"""grpc.aio as the code under test uses it, over network.py: real stubs and real servicers meet here.

A stream delivers in order or breaks. Calls are unordered among each other. A unary call may be lost, be answered late,
or be carried out twice. Each side of a call learns of its end in its own time.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, NoReturn

import grpc
import grpc.aio

from ..faults.faults import Weather
from .clock import ProcessLoop, SimFuture, Timer
from .network import Connection, Network

LINK_BREAKS_S = 3.0  # after its start, at most, where a stream breaks
HANDOFF_BREAKS_S = 0.3
BACKOFF_S = 1.0  # of a channel that could not connect
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
OK: Status = (grpc.StatusCode.OK, "", ())


class Pipe:
    """Direction of a call: in order, however the packets travel."""

    def __init__(self, network: Network, src: ProcessLoop, dst: ProcessLoop, receive: Callable[[Any], None]) -> None:
        self._network, self._src, self._dst, self._receive = network, src, dst, receive
        self._items: deque[Any] = deque()
        self.is_open = True

    def send(self, item: Any) -> None:
        if self.is_open:
            self._items.append(item)
            self._network.send(self._src, self._dst.name, self._arrive)

    def _arrive(self) -> None:
        self._network.deliver(self._dst, self._next)

    def _next(self) -> None:
        if self._items:
            item = self._items.popleft()
            if self.is_open:
                self._receive(item)


class _Abort(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class SimContext:
    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        raise _Abort((code, details, tuple(trailing_metadata)))


class SimServer:
    """Server with which a WorkerService registers itself. One for each process."""

    def __init__(self, network: Network, on_release: Callable[[str, str], None]) -> None:
        self.network = network
        self.on_release = on_release
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.process = loop
        self.handlers: dict[str, Any] = {}
        self.calls: dict[ServerCall, None] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self) -> None:
        self.network.servers[self.process.name] = self

    async def stop(self, grace: float) -> None:
        if self.network.servers.get(self.process.name) is self:
            del self.network.servers[self.process.name]
        for call in list(self.calls):
            call.cancel("the server is stopping")
        for connection in list(self.network.connections):
            if connection.server is self:
                connection.server_breaks("the server is stopping")
        await asyncio.sleep(0)


class ServerCall:
    def __init__(self, server: SimServer, call: "ClientCall", connection: Connection) -> None:
        self._server = server
        self.path, self.request = call.path, call.request
        self._handler = server.handlers[call.path]
        self._connection = connection
        self.down = Pipe(server.network, server.process, call.process, call.receive)
        self._inbox: deque[Any] = deque()
        self._waiter: SimFuture | None = None
        self._is_pull = call.path.endswith("/Pull")
        self._task = server.process.create_task(self._serve(call.request))
        server.calls[self] = None
        connection.server_ends[id(self)] = self.cancel

    def receive(self, item: Any) -> None:
        if item is _CANCEL:
            self.cancel("cancelled by the client")
            return
        self._inbox.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, why: str) -> None:
        self.down.is_open = False
        self._task.cancel()

    async def _serve(self, request: Any) -> None:
        handler, status = self._handler, OK
        try:
            if handler.request_streaming:
                await self._stream(handler.stream_stream(self._requests(), SimContext()))
            elif handler.response_streaming:
                await self._stream(handler.unary_stream(request, SimContext()))
            else:
                answer = await handler.unary_unary(request, SimContext())
                if self.path.endswith("/Release") and answer.held:
                    self._server.on_release(request.handoff_id, request.sink_incarnation)
                self.down.send(answer)
        except _Abort as e:
            status = e.status
        except asyncio.CancelledError:
            status = (grpc.StatusCode.CANCELLED, "the server cancelled the call", ())
        finally:
            self._server.calls.pop(self, None)
            self._connection.server_ends.pop(id(self), None)
        self.down.send(status)

    async def _stream(self, messages: AsyncIterator[Any]) -> None:
        network = self._server.network
        src, dst = self._server.process.name, self._connection.client.name
        async for message in messages:
            if self._is_pull:
                message.data = network.carry(message.data, src, dst)
            self.down.send(message)
            if self._is_pull:  # flow control: the bytes take their time
                await asyncio.sleep(network.delay(src, dst))

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            self._waiter = self._server.process.create_future()
            await self._waiter


_CANCEL = object()


class ClientCall:
    """Every kind of call, from its client's side."""

    def __init__(self, channel: "SimChannel", path: str, request: Any, timeout: float | None, loses: str = "") -> None:
        self.channel = channel
        self._loses = loses
        self.process = channel.process
        self.path = path
        self.request = request
        self._status: Status | None = None
        self._is_cancelled = False
        self._inbox: deque[Any] = deque()
        self._waiter: SimFuture | None = None
        self._up: Pipe | None = None
        self._unsent: list[Any] = []
        self._timer: Timer | None = None
        if timeout is not None:
            self._timer = self.process.call_later(timeout, self._expire)
        self._connection = channel.connection()
        if self._connection is None:
            self.process.call_soon(self._fail, "connection refused (backing off)")
        else:
            self._connection.client_ends[id(self)] = self._fail
            if self._connection.is_up:
                self._start()
            else:
                self._connection.on_up.append(self._start)

    def _start(self) -> None:
        connection = self._connection
        assert connection is not None and connection.server is not None
        if self._status is not None or self._loses == "request":
            return
        server, network = connection.server, self.channel.network
        served: list[ServerCall] = []

        def receive(item: Any) -> None:
            if connection.server_knows:
                return  # it came after the connection's end
            if not served:
                served.append(ServerCall(server, self, connection))
            else:
                served[0].receive(item)

        self._up = Pipe(network, self.process, server.process, receive)
        self._up.send(self.request)
        for item in self._unsent:
            self._up.send(item)
        weather = self.channel.weather
        if network.rng.random() < weather.stream_break and self.path.endswith(weather.STREAMS):
            within_s = LINK_BREAKS_S if self.path.endswith("/Link") else HANDOFF_BREAKS_S
            network.clock.after(network.rng.random() * within_s, self._break)

    def _break(self) -> None:
        """The stream is reset while both processes run; each notices it at a different time."""
        network, up = self.channel.network, self._up
        if self._status is None and up is not None:
            self.channel.trouble()
            network.clock.after(network.rng.random() * 0.5, network.deliver, self.process, self._fail, "stream reset")
            network.clock.after(network.rng.random() * 0.5, up.send, _CANCEL)

    def receive(self, item: Any) -> None:
        if self._loses == "answer":
            return
        if isinstance(item, tuple):
            self._end(item)
        else:
            self._inbox.append(item)
            self._wake()

    def _fail(self, why: str) -> None:
        self._end((grpc.StatusCode.UNAVAILABLE, why, ()))

    def _expire(self) -> None:
        self._tell_server()
        self._end((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _tell_server(self) -> None:
        if self._status is None and self._up is not None:
            self._up.send(_CANCEL)

    def _end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.client_ends.pop(id(self), None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> bool:
        self._tell_server()
        self._is_cancelled = self._status is None
        self._end((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
        return self._is_cancelled

    async def read(self) -> Any:
        while not self._inbox:
            if self._status is not None:
                if self._is_cancelled:
                    raise asyncio.CancelledError
                if self._status[0] is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self.error()
            self._waiter = self.process.create_future()
            await self._waiter
        return self._inbox.popleft()

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._up is None:
            self._unsent.append(message)
        else:
            self._up.send(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._end(OK)

    async def code(self) -> grpc.StatusCode:
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        assert self._status is not None
        return self._status[1]

    def error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        code, details, trailing = self._status
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class SimChannel:
    """A channel of the process that runs now."""

    def __init__(self, network: Network, weather: Weather, address: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.network = network
        self.weather = weather
        self.process = loop
        self._host = address.partition(":")[0]
        self._connection: Connection | None = None
        self._backs_off_until = 0.0
        self._is_closed = False

    def connection(self) -> Connection | None:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        old = self._connection
        if old is not None and old.client_knows:
            if not old.is_up:
                self._backs_off_until = self.network.clock.now + BACKOFF_S
            self._connection = None
        if self._connection is None:
            if self.network.clock.now < self._backs_off_until:
                return None
            self._connection = Connection(self.network, self.process, self._host)
        return self._connection

    def trouble(self) -> None:
        self.network.trouble(self.process.name, self._host)

    async def close(self) -> None:
        self._is_closed = True
        if self._connection is not None:
            self._connection.client_breaks("the channel was closed")

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Awaitable[Any]]:
        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> ClientCall:
            weather, rng = self.weather, self.network.rng
            if rng.random() < weather.lose_call:
                self.trouble()
                one = ClientCall(self, path, request, timeout, loses=rng.choice(("request", "answer")))
                self.network.clock.after(rng.random(), self.network.deliver, self.process, one._fail, "lost")
                return one
            if rng.random() < weather.double_call:
                self.trouble()
                ClientCall(self, path, request, timeout)
            return ClientCall(self, path, request, timeout)

        return call

    def unary_stream(self, path: str, **_: Any) -> Callable[..., ClientCall]:
        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> ClientCall:
            return ClientCall(self, path, request, timeout)

        return call

    def stream_stream(self, path: str, **_: Any) -> Callable[..., ClientCall]:
        def call(timeout: float | None = None, metadata: Any = None) -> ClientCall:
            return ClientCall(self, path, None, timeout)

        return call
