"""Listening: ports in use, several processes on one port, and a stop that lets open calls end."""

import asyncio
import json

import httpx
import pytest

from diptych.cluster.front.grpc.api import InferenceServer
from diptych.cluster.front.http.api import make_app
from diptych.cluster.front.http.server import bind, serve_http
from diptych.workers.common.errors import ConfigError, PortInUse

from ....support.front import Echo, front_door


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
