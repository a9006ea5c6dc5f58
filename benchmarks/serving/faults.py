"""Worker processes that can be killed, stopped, cut off and drained, for chaos.py.

Each worker sits behind a proxy of its own, at an address that stays when the worker is replaced: routers and other
workers dial the proxy. So a partition cuts its gRPC both from the router and from its peers; what NIXL reads goes past
the proxy, as RDMA goes past a broken management network.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import worker_pb2
from diptych.workers.common.errors import DiptychError, WorkerLost

WORKER_MODULE = "diptych.workers.server.worker"
CHUNK_BYTES = 1 << 16
START_S = 120.0
QUIET_S = 30.0  # for a worker to have let go of everything, once nobody asks anything of it


class Proxy:
    """Forwards TCP to `port`, which may change. What is cut stays open and silent, as when a cable is pulled."""

    def __init__(self) -> None:
        self.port = 0  # of the worker behind it
        self.address = ""
        self._passes = {"to": asyncio.Event(), "from": asyncio.Event()}
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self.mend()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def cut(self, *directions: str) -> None:
        """`to` the worker, `from` it, or both."""
        for direction in directions:
            self._passes[direction].clear()

    def mend(self) -> None:
        for passes in self._passes.values():
            passes.set()

    def break_connections(self) -> None:
        """Both ends live on; whoever was connected must dial again."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.mend()
        self.break_connections()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._passes["to"].wait()  # a SYN is lost, too
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(self._pump("to", reader, far_writer), self._pump("from", far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}

    async def _pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._passes[direction].wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@dataclass(slots=True, eq=False)
class Worker:
    """Member of the cluster: a proxy, and the process that is behind it now."""

    role: str
    command: Sequence[str]
    proxy: Proxy = field(default_factory=Proxy)
    incarnation: str = ""
    is_afflicted: bool = False
    process: asyncio.subprocess.Process | None = None

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.incarnation, self.proxy.address, self.role, self.role)

    @property
    def direct_address(self) -> str:
        return f"127.0.0.1:{self.proxy.port}"

    async def start(self) -> None:
        """A new process, at the old address. Raises RuntimeError if it does not come up."""
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.role} worker ended with {await self.process.wait()} before it was ready")
        self.is_ready(line)

    def is_ready(self, line: str | bytes) -> None:
        """Take note of what its process says of itself."""
        ready = json.loads(line)
        self.incarnation = ready["incarnation"]
        self.proxy.port = int(ready["address"].rpartition(":")[2])

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL: no goodbye. Idempotent."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def drain(self, timeout_s: float) -> bool:
        """Ask it to take nothing new and wait until it holds nothing. False: it still did, or did not say."""
        control = await WorkerControl.open(self.direct_address, None)
        try:
            await control.drain()
            async with asyncio.timeout(timeout_s):
                while not await control.is_drained():
                    await asyncio.sleep(0.05)
        except (TimeoutError, WorkerLost):
            return False
        finally:
            await control.close()
        return True

    async def quiet_state(self) -> worker_pb2.WorkerState:
        """Its books, as soon as they say that it holds nothing; or as they are after QUIET_S."""
        control = await WorkerControl.open(self.direct_address, None)
        try:
            state = await control.state()
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    while num_held(state):
                        await asyncio.sleep(0.1)
                        state = await control.state()
            return state
        finally:
            await control.close()


def num_held(state: worker_pb2.WorkerState) -> int:
    """Count what a worker without requests should not hold."""
    load = state.load
    num_requests = load.num_running + load.num_waiting + state.num_open_handoffs
    num_blocks = load.num_leased_blocks + load.num_quarantined_blocks + state.num_unaccounted_blocks
    return num_requests + num_blocks + load.num_blocks - load.num_free_blocks


def worker_command(model: str, role: str, flags: Sequence[str], module: str = WORKER_MODULE) -> list[str]:
    return [sys.executable, "-m", module, "--model", model, "--role", role, *flags]


async def leaked(workers: Sequence[Worker]) -> dict[str, int]:
    """Return what is held by workers that have no requests any more, by role and number; empty if nothing is."""
    found: dict[str, int] = {}
    for number, worker in enumerate(workers):
        try:
            held = num_held(await worker.quiet_state())
        except DiptychError as e:
            found[f"{worker.role}-{number}: {e}"] = -1
        else:
            if held:
                found[f"{worker.role}-{number}"] = held
    return found
