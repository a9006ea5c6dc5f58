"""Measures a load generator's time for each streamed event: diptych bench's own HTTP client, beside aiohttp and httpx.

    python -m benchmarks.serving.load_generator [--streams 64] [--events 200] [--gap-ms 20] [--repeat 5]

A server in a process of its own sends each stream one event of a completion every --gap-ms. The clients take turns. A
figure is the median of the repetitions: CPU of the client's process for an event, and for a call of one event.
aiohttp and httpx are measured where they are installed.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from diptych.cluster.bench.http import HttpClient
from diptych.cluster.bench.openai import EventReader
from diptych.cluster.bench.types import Reply
from diptych.workers.common.event_loop import new_event_loop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHOICE = {"index": 0, "text": " word", "finish_reason": None, "logprobs": None}
EVENT = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [CHOICE]}
Post = Callable[[str, EventReader], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def serve(pipe: Connection, gap_s: float) -> None:
    """Answer each call with as many events as its path says, until the pipe ends."""
    event = chunk(b"data: " + json.dumps(EVENT).encode() + b"\n\n")
    last = chunk(b"data: [DONE]\n\n") + chunk(b"")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(length)
            num_events = int(head.split()[1][1:])
            writer.write(HEAD)
            for i in range(num_events):
                writer.write(event)
                if i < num_events - 1:
                    await asyncio.sleep(gap_s)
            writer.write(last)

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.poll, None)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


async def own(stack: AsyncExitStack, url: str, _: int) -> Post:
    client = HttpClient(urlsplit(url), {})
    stack.callback(client.close)

    async def post(path: str, reader: EventReader) -> None:
        await client.post(path, b"{}", reader.feed)

    return post


async def aiohttp(stack: AsyncExitStack, url: str, num_streams: int) -> Post:
    import aiohttp

    session = await stack.enter_async_context(
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=num_streams))
    )

    async def post(path: str, reader: EventReader) -> None:
        async with session.post(path, data=b"{}") as response:
            async for data in response.content.iter_any():
                reader.feed(data, time.perf_counter())

    return post


async def httpx(stack: AsyncExitStack, url: str, num_streams: int) -> Post:
    import httpx

    limits = httpx.Limits(max_connections=num_streams, max_keepalive_connections=num_streams)
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, limits=limits, timeout=60))

    async def post(path: str, reader: EventReader) -> None:
        async with client.stream("POST", path, content=b"{}") as response:
            async for data in response.aiter_bytes():
                reader.feed(data, time.perf_counter())

    return post


async def measure(client: Callable[..., Awaitable[Post]], url: str, num_streams: int, num_events: int) -> float:
    """Microseconds of CPU for an event."""
    async with AsyncExitStack() as stack:
        post = await client(stack, url, num_streams)

        async def stream() -> None:
            reader = EventReader(Reply(time.perf_counter(), num_input=1))
            await post(f"/{num_events}", reader)
            assert len(reader.reply.token_at) == num_events

        await asyncio.gather(*(stream() for _ in range(num_streams)))  # connections are open from here on
        began = time.process_time()
        await asyncio.gather(*(stream() for _ in range(num_streams)))
        return (time.process_time() - began) / num_streams / num_events * 1e6


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--streams", type=int, default=64)
    p.add_argument("--events", type=int, default=200)
    p.add_argument("--gap-ms", type=float, default=20.0)
    p.add_argument("--repeat", type=int, default=5)
    a = p.parse_args()
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(theirs, a.gap_ms / 1e3))
    process.start()
    clients = [own, *(client for client in (aiohttp, httpx) if find_spec(client.__name__))]
    found: dict[str, tuple[list[float], list[float]]] = {client.__name__: ([], []) for client in clients}
    url = f"http://127.0.0.1:{ours.recv()}"
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        for _ in range(a.repeat):
            for client in clients:
                for num_events, values in zip((a.events, 1), found[client.__name__], strict=True):
                    values.append(runner.run(measure(client, url, a.streams, num_events)))
    ours.close()
    process.terminate()
    process.join()
    for name, (an_event, a_call) in found.items():
        of = statistics.median
        print(f"{name:8} {of(an_event):7.1f} us an event, {of(a_call):7.1f} us a call of one")


if __name__ == "__main__":
    main()
