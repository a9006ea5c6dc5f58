"""A router process with its front door on a thread, over workers whose messages a test decides."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.placement.router_process import RouterProcess
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import worker_pb2
from diptych.workers.common.event_loop import new_event_loop
from diptych.workers.common.request import FinishReason

from .scripted_worker import ScriptedWorker

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TOKEN = "the cluster's token"
WAIT_S = 30.0
VOCAB_SIZE = 2048  # of the tiny model
WORD = 300  # a token that is a word
T = TypeVar("T")


class NamedWorker(ScriptedWorker):
    """Scripted worker with a name, as the supervisor gives one."""

    def __init__(self, role: str, name: str) -> None:
        super().__init__(role, TOKEN)
        self.name = name
        assert self.hello is not None
        self.hello.model.vocab_size = VOCAB_SIZE
        self.hello.model.max_context_tokens = 4096

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.incarnation, f"127.0.0.1:{self.port}", self.role, self.role, self.name)

    def first_token(self, handle: int) -> None:
        """Make the token at position 0, with its timings."""
        timings = [worker_pb2.SequenceTimings(entry=0, queue_s=0.002, compute_s=0.02)]
        self.tokens(handle, [WORD], timings=timings, cached=[worker_pb2.CachedTokens(entry=0, num_tokens=0)])

    def pulled_tokens(self, handle: int, num: int, finish: FinishReason | None = None) -> None:
        """Make `num` tokens from position 1 on, with the timings of a hand-off."""
        handoff = worker_pb2.HandoffTimings(
            announce_to_pull_s=0.002,
            pull_s=0.008,
            last_segment_s=0.003,
            release_s=0.004,
            num_bytes=1 << 20,
            transport="nixl",
        )
        timings = [worker_pb2.SequenceTimings(entry=0, queue_s=0.001, compute_s=0.01, handoff=handoff)]
        self.tokens(handle, [WORD] * num, start=1, finish=finish, timings=timings)


class WatchedRouter:
    """A running router. Its coroutines run on a loop of their own; `call` waits for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: RouterProcess, http_port: int) -> None:
        self._loop, self.process = loop, process
        self.url = f"http://127.0.0.1:{http_port}"
        self.workers: list[NamedWorker] = []

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def do(self, act: Callable[[], object]) -> None:
        """Call a function on the loop, and wait for it."""

        async def work() -> None:
            act()

        self.call(work())

    def list_workers(self) -> None:
        """Tell the router of all workers in `workers`, as the supervisor does."""
        self.do(lambda: self.process.update_fleet([worker.info for worker in self.workers]))

    def add_worker(self, role: str, name: str) -> NamedWorker:
        worker = NamedWorker(role, name)
        self.call(worker.start())
        self.workers.append(worker)
        self.list_workers()
        return worker


@contextmanager
def watched(names: Sequence[str] = ("prefill-1", "decode-2"), **router: object) -> Generator[WatchedRouter]:
    """A router with settings, over one worker for each name, which begins with its role."""
    settings = {"http_port": 0, "grpc_port": 0, "worker_timeout_s": 60} | router
    config = build(
        {"model": str(TINY), "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}, "router": settings}
    )
    ready, found, stop = threading.Event(), list[WatchedRouter](), asyncio.Event()

    async def main() -> None:
        process = RouterProcess(Deployment(config, TOKEN, is_local=True))
        started = await process.start()
        found.append(WatchedRouter(asyncio.get_running_loop(), process, started.http_port))
        ready.set()
        await stop.wait()
        await process.stop()
        for worker in found[0].workers:
            await worker.kill()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        for name in names:
            found[0].add_worker(name.partition("-")[0], name)
        yield found[0]
    finally:
        found[0].do(stop.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()
