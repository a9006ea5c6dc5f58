"""Listening: ports in use, several processes on one port, and a stop that lets open calls end."""

import asyncio
import json
import socket

import httpx
import pytest

from diptych.cluster.front.grpc.api import InferenceServer
from diptych.cluster.front.http.api import make_app
from diptych.cluster.front.http.server import bind, serve_http
from diptych.workers.common.errors import ConfigError, PortInUse, WorkerLost

from ....support.front import Echo, Served, front_door, served


async def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}: it is in use. Choose another port"):
            bind("127.0.0.1", port)

        async def main() -> None:
            with pytest.raises(PortInUse, match=f"cannot listen on 127.0.0.1:{port}"):
                await InferenceServer(front_door(Echo())).start("127.0.0.1", port)

        await main()


def test_a_host_that_is_not_ours_is_named() -> None:
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind(host, 0)


def test_routers_of_one_machine_share_a_port() -> None:
    with bind("127.0.0.1", 0, reuse_port=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port, reuse_port=True) as second:
            assert second.getsockname()[1] == port
        with pytest.raises(PortInUse):
            bind("127.0.0.1", port)


async def test_a_stop_lets_open_calls_end() -> None:
    source = Echo(laps=1)

    async def main() -> str:
        stop = asyncio.Event()
        sock = bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        serving = asyncio.create_task(serve_http(make_app(front_door(source)), sock, stop, grace_s=30))
        source.gate_after = 1
        source.gate.clear()
        async with httpx.AsyncClient() as client:
            body = {"prompt": "abc", "stream": True}
            async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                first = await anext(lines)
                stop.set()
                source.gate.set()
                rest = [line async for line in lines if line]
            await serving
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{port}/health")
        assert rest[-1] == "data: [DONE]"
        return "".join(json.loads(e[6:])["choices"][0]["text"] for e in [first, *rest[:-1]])

    assert await main() == "abc"


def call_by_1_0(server: Served, method: str, path: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of the answer to a client of HTTP/1.0 (`ab`, an old proxy), which reads to the connection's end."""
    head = f"{method} {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as sock:
        sock.sendall(head.encode() + body)
        got = b"".join(iter(lambda: sock.recv(65536), b""))
    head_bytes, _, rest = got.partition(b"\r\n\r\n")
    return head_bytes.lower(), rest


def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    with served(Echo(laps=1)) as server:
        body = json.dumps({"prompt": "abc", "stream": True}).encode()
        head, events = call_by_1_0(server, "POST", "/v1/completions", body)
        assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
        parts = events.decode().split("\n\n")
        assert all(part.startswith("data: ") for part in parts[:-1]) and parts[-2:] == ["data: [DONE]", ""]
        assert "".join(json.loads(part[6:])["choices"][0]["text"] for part in parts[:-2]) == "abc"
        server.source.fail = lambda made: WorkerLost("gone") if made == 1 else None
        _, events = call_by_1_0(server, "POST", "/v1/completions", body)
        assert b"worker_lost" in events and events.startswith(b"data: ") and events.endswith(b"\n\n")
        server.source.fail = lambda _: None
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/none"),
            ("HEAD", "/version"),
        ):
            head, whole = call_by_1_0(server, method, path, b'{"prompt": "abc"}' if method == "POST" else b"")
            assert b"content-length: " in head and b"transfer-encoding" not in head
            assert whole == b"" if method == "HEAD" else json.loads(whole)
