"""Measures what clients that hardly read their answers cost a router, and the ordinary clients beside them.

    python -m benchmarks.serving.slow_readers [--readers 10000] [--tokens 200] [--clients 8] [--seconds 20]

The router and the worker are those of front_door.py: real ones, over a runner that computes nothing. Each reader asks
for a stream, on a socket with little room; half of them read nothing, half a byte a second. The limits of connections
and requests, which would refuse most of them, are raised for this. Printed are, before, while and after they are there:

    router      resident memory of the router's process, MiB; `most` is its greatest value
    kernel      memory of the machine's TCP sockets, MiB: unread data waits there first
    gap         milliseconds between two tokens of an ordinary client: median, 99th percentile, greatest

Needs a limit of open files (ulimit -n) beyond twice --readers for the machine, beyond --readers for a process.
"""

import argparse
import asyncio
import contextlib
import json
import os
import select
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil

from diptych.cluster.front.http.listener import allow_descriptors

from .front_door import PROMPT, Served

STEP_S = 0.005
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RECEIVE_BYTES = 4096  # of a reader's socket
SETTLED_S = 120.0  # most time until the router has ended the readers' requests
SPARE = 512  # descriptors of this process besides the readers'


@dataclass(frozen=True)
class Memory:
    router_mib: float
    kernel_mib: float


def memory(router_pid: int) -> Memory:
    sockets = next(line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:"))
    pages = int(sockets.split("mem ")[1].split()[0])
    return Memory(psutil.Process(router_pid).memory_info().rss / 2**20, pages * PAGE_BYTES / 2**20)


def asks(tokens: int, salt: str) -> bytes:
    """HTTP request of a stream of `tokens`."""
    body = json.dumps({
        "model": "fake", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True,
        "cache_salt": salt, "timeout_s": 600,
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Readers:
    """Sockets on which streams were asked for."""

    def __init__(self, port: int, number: int, request: bytes) -> None:
        self._sockets: list[socket.socket] = []
        with ExitStack() as opened:
            for _ in range(number):
                sock = opened.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
                sock.connect(("127.0.0.1", port))
                sock.sendall(request)
                sock.setblocking(False)
                self._sockets.append(sock)
            self._opened = opened.pop_all()

    def statuses(self) -> dict[str, int]:
        """Number of those that read nothing by the status of their answers; "" where none has come."""
        found: dict[str, int] = {}
        for sock in self._sockets[1::2]:
            try:
                status = sock.recv(12, socket.MSG_PEEK).decode()[9:] or "closed"
            except BlockingIOError:
                status = ""
            except OSError:
                status = "reset"
            found[status] = found.get(status, 0) + 1
        return found

    def wait(self, seconds: float) -> None:
        """Wait until each has the beginning of an answer, or `seconds` have passed."""
        poll = select.poll()
        waiting = {sock.fileno() for sock in self._sockets}
        for number in waiting:
            poll.register(number, select.POLLIN)
        until = time.monotonic() + seconds
        while waiting and time.monotonic() < until:
            for number, _ in poll.poll(1000):
                waiting.discard(number)
                poll.unregister(number)

    async def read(self) -> None:
        """Read a byte a second from every second one, for ever."""
        while True:
            for sock in self._sockets[::2]:
                with contextlib.suppress(OSError):
                    sock.recv(1)
            await asyncio.sleep(1)

    def close(self) -> None:
        self._opened.close()


async def gaps(port: int, seconds: float, salt: str) -> list[float]:
    """Seconds between the tokens of one ordinary client, which asks again and again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request, until, found = asks(64, salt), time.monotonic() + seconds, list[float]()
    while time.monotonic() < until:
        writer.write(request)
        last = None
        while b"[DONE]" not in (line := await reader.readline()):
            assert line, "the router has closed the connection"
            if line.startswith(b"data: "):
                now = time.perf_counter()
                if last is not None:
                    found.append(now - last)
                last = now
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return found


async def phase(name: str, served: Served, clients: int, seconds: float, readers: Readers | None = None) -> None:
    """Run ordinary clients for so long, and print what they saw."""
    reading = asyncio.create_task(readers.read()) if readers is not None else None
    most = [memory(served.router_pid)]
    asking = asyncio.gather(*(gaps(served.port, seconds, f"client {i}") for i in range(clients)))
    while not (await asyncio.wait((asking,), timeout=0.5))[0]:
        most.append(memory(served.router_pid))
    if reading is not None:
        reading.cancel()
    found = sorted(gap * 1e3 for one in asking.result() for gap in one)
    last = most[-1]
    print(f"{name:7} router {last.router_mib:6.0f} MiB (most {max(m.router_mib for m in most):6.0f})   "
          f"kernel {last.kernel_mib:6.0f} (most {max(m.kernel_mib for m in most):6.0f})   "
          f"gap {statistics.median(found):5.1f} ms, p99 {found[len(found) * 99 // 100]:6.1f}, most {found[-1]:6.1f}   "
          f"{len(found)} tokens", flush=True)  # fmt: skip


def requests_of(port: int) -> int:
    return int(json.loads(urlopen(f"http://127.0.0.1:{port}/health").read())["requests"])


def ended(port: int) -> Iterator[float]:
    """Times at which the router still had requests."""
    began = time.monotonic()
    while requests_of(port):
        yield time.monotonic() - began
        assert time.monotonic() - began < SETTLED_S, "the router still has requests of clients that left"
        time.sleep(0.1)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--readers", type=int, default=10_000)
    p.add_argument("--tokens", type=int, default=200, help="of a reader's answer")
    p.add_argument("--clients", type=int, default=8)
    p.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    p.add_argument("--send-timeout-s", type=float, default=600.0, help="the router's: long, so that readers stay")
    a = p.parse_args()
    wanted = a.readers + SPARE
    assert allow_descriptors(wanted) >= wanted, f"ulimit -n is too low: at least {wanted} are needed"
    most = a.readers + 1000
    limits = {"max_requests": most, "max_connections": most, "max_connections_per_address": most}
    served = Served(STEP_S, settings={**limits, "send_timeout_s": a.send_timeout_s})
    try:
        asyncio.run(phase("before", served, a.clients, a.seconds))
        began = time.monotonic()
        readers = Readers(served.port, a.readers, asks(a.tokens, "readers"))
        asyncio.run(phase("opening", served, a.clients, a.seconds, readers))
        readers.wait(SETTLED_S)
        print(f"{time.monotonic() - began:.0f} s after the first of {a.readers} readers: answers {readers.statuses()}, "
              f"{requests_of(served.port)} requests at the router", flush=True)  # fmt: skip
        asyncio.run(phase("during", served, a.clients, a.seconds, readers))
        readers.close()
        took_s = max(ended(served.port), default=0.0)
        print(f"requests ended {took_s:.1f} s after the readers left", flush=True)
        asyncio.run(phase("after", served, a.clients, a.seconds))
    finally:
        served.close()


if __name__ == "__main__":
    main()
