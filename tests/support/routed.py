"""A router and a worker, each in a process of its own, whose event loop's processor time is watched.

The worker's runner computes nothing. What is told of the router's loop is the most processor time between two turns of
it: time that other calls wait, whatever else the machine does.
"""

import asyncio
import multiprocessing as mp
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.front.limits import RequestLimits
from diptych.cluster.placement.router_process import RouterProcess
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import inference_pb2
from diptych.workers.common.event_loop import new_event_loop
from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeRow, FakeStep

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
TOKEN = "the cluster's token"
VOCAB_SIZE, CONTEXT = 2048, 131_072
FIRST_TOKEN = 300  # of those that are words or parts of words
POLL_S = 0.001
LASTING_TOKENS = 100_000  # of answers that only have to last: they take LASTING_STEP_S a token
LASTING_STEP_S = 0.05
MESSAGE_BYTES = RequestLimits().max_message_bytes - 256  # nearly all that is allowed
MESSAGES = [inference_pb2.ChatMessage(role="u")] * (MESSAGE_BYTES // 5)
LARGEST_MESSAGE = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=MESSAGES)).SerializeToString()


class InstantRunner(FakeRunner):
    """Computes nothing: always the same token, with the requested number of likely tokens."""

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        if any(row.sequence.request.sampling.max_tokens == LASTING_TOKENS for row in step.rows):
            time.sleep(LASTING_STEP_S)
        if step.prompt_logprobs is not None:
            step.prompt_logprobs += [(row.sequence, _prompt_logprobs(row)) for row in step.rows if row.prompt_end]
        return [_token(row) for row in step.rows if row.samples]


def _token(row: object) -> SampledToken:
    sequence = row.sequence  # type: ignore[attr-defined]
    num_top = sequence.request.sampling.logprobs
    if num_top is None:
        return SampledToken(sequence, FIRST_TOKEN)
    top = tuple((FIRST_TOKEN + i, -0.5 - i) for i in range(num_top))
    return SampledToken(sequence, FIRST_TOKEN, -0.5, top)


def _prompt_logprobs(row: FakeRow) -> PromptLogprobs:
    num, num_top = row.prompt_end - row.prompt_first, row.sequence.request.sampling.prompt_logprobs or 0
    top_ids = np.tile(np.arange(FIRST_TOKEN, FIRST_TOKEN + num_top, dtype=np.int32), (num, 1))
    logprobs = np.full(num, -0.5, np.float32)
    return PromptLogprobs(row.prompt_first, logprobs, np.ones(num, np.int32), top_ids, -top_ids.astype(np.float32))


class LoopTime:
    """Processor time of the longest turn of the loop that it is made on, to within POLL_S.

    It wakes every POLL_S, so that an idle loop costs nothing: what it measures is a turn and at most POLL_S before it.
    """

    def __init__(self) -> None:
        self._worst_s, self._last = 0.0, time.thread_time()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._add()

    def _add(self) -> None:
        now = time.thread_time()
        self._worst_s, self._last = max(self._worst_s, now - self._last), now

    def take(self) -> tuple[float, float]:
        """The longest turn (s) since the last call, and how long (s) the largest message takes here and now."""
        self._add()
        worst_s, self._worst_s = self._worst_s, 0.0
        begun = time.thread_time()
        inference_pb2.GenerateRequest.FromString(LARGEST_MESSAGE)
        self._last = time.thread_time()
        return worst_s, self._last - begun


async def serve_worker(pipe: Connection, stop: asyncio.Event) -> None:
    runner = InstantRunner(num_blocks=40_000, block_size=16, vocab_size=VOCAB_SIZE, max_context=CONTEXT)
    service = WorkerService(WorkerConfig.of("fake", auth_token=TOKEN, transports=("grpc",)), runner)
    where = await service.start()
    pipe.send((where.address, where.incarnation))
    await stop.wait()
    await service.stop()


async def serve_router(pipe: Connection, stop: asyncio.Event, address: str, incarnation: str) -> None:
    # FakeRunner computes a whole context in Python, and keeps its own loop from answering for seconds.
    router = {"http_port": 0, "grpc_port": 0, "worker_timeout_s": 60}
    config = build({"model": str(TINY), "pools": {"mixed": {"replicas": 1}}, "router": router})
    process = RouterProcess(Deployment(config, TOKEN, is_local=True))
    process.update_fleet([WorkerInfo(incarnation, address, role="mixed", pool="mixed")])
    started = await process.start()
    loop_time = LoopTime()

    def answer() -> None:
        try:
            pipe.recv()
        except EOFError:
            stop.set()
            return
        pipe.send(loop_time.take())

    loop = asyncio.get_running_loop()
    loop.remove_reader(pipe.fileno())
    loop.add_reader(pipe.fileno(), answer)
    pipe.send((started.http_port, started.grpc_port))
    await stop.wait()
    await process.stop()


def run_process(serve: Callable[..., object], pipe: Connection, *args: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
        await serve(pipe, stop, *args)  # type: ignore[misc]

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


def start_process(serve: Callable[..., object], *args: object) -> tuple[mp.process.BaseProcess, Connection]:
    """Start a process that serves until its end of the pipe tells it to stop; return it, and our end."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_process, args=(serve, theirs, *args))
    sys.path.insert(0, str(ROOT))  # the process imports the file of `serve` by its name
    try:
        process.start()
    finally:
        sys.path.remove(str(ROOT))
    theirs.close()
    return process, ours


@dataclass(frozen=True)
class Routed:
    http_port: int
    grpc_port: int
    pid: int
    pipe: Connection

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def worst_loop(self) -> tuple[float, float]:
        """Longest turn of the loop (s) since the last call; how long (s) grpc takes for the parts of the largest
        message, which it makes on that loop, now: the speed of this machine beside its other work."""
        self.pipe.send(None)
        return self.pipe.recv()

    def memory(self, name: str = "VmRSS") -> int:
        """Bytes that the router's process holds; "VmHWM": that it held at most since `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{name}:"))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextmanager
def routed() -> Generator[Routed]:
    with routed_by(1) as [it]:
        yield it


@contextmanager
def routed_by(num_routers: int) -> Generator[list[Routed]]:
    """Run so many routers of one worker."""
    started: list[tuple[mp.process.BaseProcess, Connection]] = []

    def start(serve: Callable[..., object], *args: object) -> tuple[int, Connection]:
        process, ours = start_process(serve, *args)
        started.append((process, ours))
        assert process.pid is not None
        return process.pid, ours

    try:
        _, pipe = start(serve_worker)
        address, incarnation = pipe.recv()
        begun = [start(serve_router, address, incarnation) for _ in range(num_routers)]
        found = [Routed(*pipe.recv(), pid, pipe) for pid, pipe in begun]
        for it in found:
            while httpx.get(f"{it.url}/health").status_code != 200:
                pass
        yield found
    finally:
        for process, pipe in reversed(started):
            pipe.close()  # ends it, unless a test has
            process.join(20)
            process.kill()
            process.join()
            process.close()
