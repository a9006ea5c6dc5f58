"""Routers as the picker watches them, over real sockets."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from diptych.cluster.common.config import TlsConfig
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.picker import watch
from diptych.cluster.picker.choice import RouterView
from diptych.cluster.picker.watch import RouterAccess, Routers, endpoint_of, read_address
from diptych.workers.common.errors import ConfigError
from diptych.workers.common.tls import SERVER_NAME, make_identity

from ...support.front import Echo, served

LIMIT_S = 60.0
LOAD = (
    b'{"router": "t", "ready": true, "requests": 1, "max_requests": 2, "mean_s": 1,'
    b'"level": {"ttft_s": 1, "tpot_s": 1}, "now": null, "idle": null}'
)


@asynccontextmanager
async def watching(*names: str, access: RouterAccess | None = None) -> AsyncIterator[Routers]:
    routers = Routers(names, access or RouterAccess())
    await routers.start()
    try:
        await asyncio.wait_for(routers.synced(), LIMIT_S)
        yield routers
    finally:
        await routers.stop()


async def until(routers: Routers, is_so: Callable[[list[RouterView]], bool]) -> list[RouterView]:
    async with asyncio.timeout(LIMIT_S):
        while not is_so(views := routers.views()):
            await asyncio.sleep(0.01)
    return views


def endpoint(url: str) -> str:
    return url.removeprefix("http://")


async def test_a_router_tells_its_load_until_it_ends() -> None:
    source = Echo()
    with ExitStack() as stack:
        address = endpoint(stack.enter_context(served(source)).url)
        async with watching(address) as routers:
            [view] = routers.views()
            assert (view.endpoint, view.is_ready, view.outlook) == (address, True, source.outlook())
            routers.sent(address)
            await until(routers, lambda views: views[0].num_sent == 0)  # the next report has it
            source.ready = False
            [view] = await until(routers, lambda views: not views[0].is_ready)
            assert view.is_reachable
            source.ready = True
            await until(routers, lambda views: views[0].is_ready)
            routers.doubt(address)
            assert not routers.views()[0].is_ready, "it is asked first"
            await until(routers, lambda views: views[0].is_ready)
            await asyncio.to_thread(stack.close)
            await until(routers, lambda views: not views[0].is_reachable)


async def test_a_router_that_comes_back_is_used_again() -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        async with watching(address) as routers:
            assert not routers.views()[0].is_reachable
            held.listen()
            held.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(LIMIT_S):
                connection, _ = await loop.sock_accept(held)
                await loop.sock_recv(connection, 4096)
                answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(LOAD), LOAD)
                await loop.sock_sendall(connection, answer)
            [view] = await until(routers, lambda views: views[0].is_ready)
            assert view.outlook.num_requests == 1
            connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nload",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10000000\r\n\r\n" + b"[" * 200_000,
        b"no HTTP\r\n\r\n",
        b"",
    ],
)
async def test_what_is_no_router_is_not_used(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        async with watching(f"{host}:{port}") as routers:
            assert not routers.views()[0].is_reachable


async def test_the_key_is_sent_and_a_wrong_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    access = AccessPolicy(KeyRing("the API key"), metrics_key="the metrics key")
    with served(Echo(), access=access) as router:
        address = endpoint(router.url)
        for key, is_ready in (("the metrics key", True), ("the API key", True), ("another", False), (None, False)):
            async with watching(address, access=RouterAccess(key)) as routers:
                assert routers.views()[0].is_ready == is_ready
    assert "the key is refused" in caplog.text


async def test_routers_may_speak_tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tls")
    made = make_identity("test")
    for name in ("ca", "cert", "key"):
        (folder / name).write_bytes(getattr(made, name))
    tls = TlsConfig(cert=str(folder / "cert"), key=str(folder / "key"))
    context = ssl.create_default_context(cafile=str(folder / "ca"))
    with served(Echo(), tls=tls) as router:
        address = endpoint(router.url)
        async with watching(address, access=RouterAccess(tls=context, name=SERVER_NAME)) as routers:
            assert routers.views()[0].is_ready
        async with watching(address, access=RouterAccess(tls=context)) as routers:
            assert not routers.views()[0].is_ready, "its certificate has another name"


async def test_all_addresses_of_a_name_are_routers_and_those_that_leave_it_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]
    resolved = asyncio.Event()
    real = asyncio.get_running_loop().getaddrinfo

    async def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "routers.test":
            return await real(host, *args, **kwargs)
        if not addresses:
            resolved.set()
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with served(Echo()) as router:
        port = endpoint(router.url).rpartition(":")[2]
        async with watching(f"routers.test:{port}") as routers:
            known = {view.endpoint: view.is_reachable for view in routers.views()}
            assert known == {f"127.0.0.1:{port}": True, f"127.0.0.2:{port}": False}
            addresses.pop()
            await until(routers, lambda views: [view.endpoint for view in views] == [f"127.0.0.1:{port}"])
            addresses.clear()
            await asyncio.wait_for(resolved.wait(), LIMIT_S)
            assert [view.is_ready for view in routers.views()] == [True], "a name that fails leads to where it led"


async def test_a_doubt_lasts_until_a_question_that_was_asked_after_it_is_answered() -> None:
    asked: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                may_answer = asyncio.Event()
                await asked.put(may_answer)
                await may_answer.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(LOAD), LOAD))
        writer.close()

    async def question() -> asyncio.Event:
        return await asyncio.wait_for(asked.get(), LIMIT_S)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        routers = Routers([f"{host}:{port}"], RouterAccess())
        await routers.start()
        (await question()).set()
        await asyncio.wait_for(routers.synced(), LIMIT_S)
        before = await question()
        assert routers.views()[0].is_ready
        routers.doubt(f"{host}:{port}")
        before.set()
        after = await question()
        assert not routers.views()[0].is_ready, "the answer is to an older question, the next one has none yet"
        after.set()
        (await question()).set()
        assert routers.views()[0].is_ready
        await routers.stop()


@pytest.mark.parametrize(("error", "is_answer"), [(socket.EAI_AGAIN, False), (socket.EAI_NONAME, True)])
async def test_a_name_server_that_does_not_answer_yet_is_waited_for(
    error: int, is_answer: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "RESOLVE_S", 0.01)
    tries: asyncio.Queue[bool] = asyncio.Queue()
    works = asyncio.Event()

    async def resolve(*_: Any, **__: Any) -> Any:
        await tries.put(works.is_set())
        if not works.is_set():
            raise socket.gaierror(error, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    async def tried(worked: bool) -> None:
        while await asyncio.wait_for(tries.get(), LIMIT_S) != worked:
            pass

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    routers = Routers(["routers.test:1"], RouterAccess())
    await routers.start()
    for _ in range(3):
        await tried(worked=False)
    assert (routers.is_synced, routers.views()) == (is_answer, [])
    assert len([r for r in caplog.records if "cannot resolve" in r.message]) == 1, "it is told once"
    works.set()
    await tried(worked=True)
    await asyncio.wait_for(routers.synced(), LIMIT_S)
    await until(routers, lambda views: len(views) == 1)
    await routers.stop()


def test_addresses_are_read_and_written() -> None:
    assert read_address("diptych-routers:8000") == ("diptych-routers", 8000)
    assert read_address("[::1]:80") == ("::1", 80)
    assert endpoint_of("::1", 80) == "[::1]:80"
    for wrong in ("routers", "routers:", ":80", "routers:http", "routers:0", "routers:65536", "[]:80"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            read_address(wrong)
    with pytest.raises(ConfigError, match="no router is named"):
        Routers([], RouterAccess())
