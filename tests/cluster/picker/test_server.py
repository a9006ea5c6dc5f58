"""The picker's gRPC server by a client that speaks as Envoy's filter does. tests/e2e/test_gateway.py has a real one."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cluster.picker import watch
from diptych.cluster.picker.messages import DESTINATION, Request, Response
from diptych.cluster.picker.server import SERVICE, PickerConfig, PickerServer
from diptych.proto import envoy_ext_proc_pb2_grpc
from diptych.workers.common.errors import PortInUse
from diptych.workers.common.tls import SERVER_NAME, make_identity

from ...support.front import Echo, served

LIMIT_S = 60.0
Stub = envoy_ext_proc_pb2_grpc.ExternalProcessorStub
Probe = health_pb2.HealthCheckResponse


@asynccontextmanager
async def picker(config: PickerConfig) -> AsyncIterator[tuple[PickerServer, int, int]]:
    server = PickerServer(config)
    port, health_port = await server.start("127.0.0.1", 0, 0)
    assert health_port is not None
    try:
        yield server, port, health_port
    finally:
        await server.stop(0)


@asynccontextmanager
async def stub(port: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Stub(channel)


async def exchange(stub: Any, messages: Iterable[Request]) -> list[Response]:
    """Answers to messages that are sent whether they are answered or not."""
    call = stub.Process(timeout=LIMIT_S)
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return [answer async for answer in call]


def request(path: str, *chunks: bytes, ends: bool = True) -> list[Request]:
    head = Request()
    for name, value in ((":method", "POST"), (":path", path)):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    found = [head]
    for i, chunk in enumerate(chunks):
        found.append(Request())
        found[-1].request_body.body = chunk
        found[-1].request_body.end_of_stream = ends and i + 1 == len(chunks)
    return found


@pytest.fixture
def router() -> Any:
    with served(Echo()) as it:
        yield it.url.removeprefix("http://")


async def test_streams_are_answered_side_by_side(router: str) -> None:
    async with picker(PickerConfig((router,), has_tls=False)) as (server, port, _), stub(port) as it:
        await asyncio.wait_for(server.policy.routers.synced(), LIMIT_S)
        kept = exchange(it, request("/v1/responses", b"{", b"}"))
        passed = exchange(it, request("/v1/completions", b"a" * 100_000, b"b"))
        for answers, sizes in zip(await asyncio.gather(kept, passed), ([2], [100_000, 1]), strict=True):
            assert answers[0].dynamic_metadata["envoy.lb"][DESTINATION] == router
            bodies = [answer.request_body.response.body_mutation.streamed_response.body for answer in answers[1:]]
            assert [len(body) for body in bodies] == sizes


async def test_requests_that_compute_nothing_pass_full_routers_and_do_not_count() -> None:
    source = Echo()
    full = replace(source.outlook(), num_requests=1, max_requests=1)
    source.outlook = lambda: full  # type: ignore[method-assign]
    with served(source) as router:
        config = PickerConfig((router.url.removeprefix("http://"),), has_tls=False)
        async with picker(config) as (server, port, _), stub(port) as it:
            await asyncio.wait_for(server.policy.routers.synced(), LIMIT_S)
            sent: list[str] = []
            server.policy.routers.sent = sent.append  # type: ignore[method-assign]
            [answer] = await exchange(it, request("/v1/responses/resp_1/cancel"))
            assert answer.HasField("request_headers")
            [answer] = await exchange(it, request("/v1/completions"))
            assert (answer.immediate_response.status.code, sent) == (429, [])
            full = replace(full, max_requests=2)
            async with asyncio.timeout(LIMIT_S):
                while not (await exchange(it, request("/v1/completions")))[0].HasField("request_headers"):
                    pass
            assert len(sent) == 1


async def test_health_is_told_with_and_without_tls(router: str) -> None:
    """Before every router was asked the picker is alone alive."""
    made = make_identity("test")
    config = PickerConfig(("127.0.0.1:1", router), certificate=(made.cert, made.key))
    credentials = grpc.ssl_channel_credentials(made.ca)
    async with picker(config) as (server, port, health_port):
        options = [("grpc.ssl_target_name_override", SERVER_NAME)]
        async with (
            grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as secure,
            grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as plain,
        ):
            stubs = [health_pb2_grpc.HealthStub(channel) for channel in (secure, plain)]

            async def status(name: str) -> set[int]:
                asked = health_pb2.HealthCheckRequest(service=name)
                return {(await stub.Check(asked, timeout=LIMIT_S)).status for stub in stubs}

            assert await status("liveness") == {Probe.SERVING}
            await asyncio.wait_for(server.policy.routers.synced(), LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                while await status("readiness") != {Probe.SERVING}:
                    await asyncio.sleep(0.01)
            assert await status(SERVICE) == await status("") == {Probe.SERVING}


async def test_readiness_waits_for_what_the_routers_tell() -> None:
    config = PickerConfig(("127.0.0.1:1",), has_tls=False)
    server = PickerServer(config)
    server.policy.routers._follow = asyncio.Event().wait  # type: ignore[method-assign]  # it never gets an answer
    port, _ = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        it = health_pb2_grpc.HealthStub(channel)
        found = [
            (await it.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)).status
            for name in ("liveness", "readiness", SERVICE)
        ]
        assert found == [Probe.SERVING, Probe.NOT_SERVING, Probe.NOT_SERVING]
    await server.stop(0)


async def test_a_body_that_does_not_end_in_time_is_answered(router: str) -> None:
    config = PickerConfig((router,), has_tls=False, body_timeout_s=0.2)
    async with picker(config) as (_, port, _), stub(port) as it:
        call = it.Process(timeout=LIMIT_S)
        for message in request("/v1/responses", b"{", ends=False):
            await call.write(message)
        answer = await call.read()
        assert answer.immediate_response.status.code == 408
        assert await call.read() is grpc.aio.EOF


async def test_who_does_not_speak_as_envoy_gets_an_error(router: str) -> None:
    async with picker(PickerConfig((router,), has_tls=False)) as (_, port, _), stub(port) as it:
        for wrong in ([Request()], request("/a", b"a")[1:], request("/v1/responses") * 2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await exchange(it, wrong)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await exchange(it, []) == [], "a stream that says nothing"


async def test_kept_bodies_are_forgotten_with_their_streams(router: str) -> None:
    config = replace(PickerConfig((router,), has_tls=False), max_kept_bytes=550_000)
    async with picker(config) as (server, port, _), stub(port) as it:
        await asyncio.wait_for(server.policy.routers.synced(), LIMIT_S)
        for _ in range(3):
            [first, *_] = await exchange(it, request("/v1/responses", b"x" * 100_000))
            assert first.HasField("request_headers")
            call = it.Process(timeout=LIMIT_S)
            for message in request("/v1/responses", b"x" * 100_000, ends=False):
                await call.write(message)
            call.cancel()
            async with asyncio.timeout(LIMIT_S):  # the server learns of it a moment later
                while (await exchange(it, request("/v1/responses", b"x" * 100_000)))[0].HasField("immediate_response"):
                    pass


async def test_a_port_in_use_is_told() -> None:
    async with picker(PickerConfig(("127.0.0.1:1",))) as (_, port, _):
        with pytest.raises(PortInUse):
            await PickerServer(PickerConfig(("127.0.0.1:1",))).start("127.0.0.1", port)


async def test_open_streams_go_on_while_the_picker_ends(router: str) -> None:
    server = PickerServer(PickerConfig((router,), has_tls=False))
    port, _ = await server.start("127.0.0.1", 0)
    await asyncio.wait_for(server.policy.routers.synced(), LIMIT_S)
    async with stub(port) as it:
        call = it.Process(timeout=LIMIT_S)
        await call.write(request("/v1/completions", b"a")[0])
        assert (await call.read()).HasField("request_headers")
        stopping = asyncio.create_task(server.stop(LIMIT_S))
        await asyncio.sleep(0)
        answer = Request()
        answer.response_body.body = b"text"
        await call.write(answer)
        assert (await call.read()).response_body.response.body_mutation.streamed_response.body == b"text"
        assert not stopping.done()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, LIMIT_S)


async def test_a_router_that_answers_bit_by_bit_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENT_S", 0.3)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.append(task)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await reader.read(1)  # the end, when it is given up
        writer.close()

    answering: list[asyncio.Task[None]] = []
    dripping = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with dripping:
        host, port = dripping.sockets[0].getsockname()
        async with picker(PickerConfig((f"{host}:{port}",))) as (server, _, _):
            await asyncio.wait_for(server.policy.routers.synced(), LIMIT_S)
            assert not server.policy.routers.views()[0].is_reachable
        await asyncio.wait_for(asyncio.gather(*answering), LIMIT_S)
