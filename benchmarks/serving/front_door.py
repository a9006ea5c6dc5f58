"""Measures the work around an engine: the real router, front door and worker service over a runner that computes
nothing.

    python -m benchmarks.serving.front_door [--streams 16 32] [--step-ms 5] [--seconds 4] [--repeat 3] [--json FILE]
    python -m benchmarks.serving.front_door --profile router|worker  (cProfile of its event loop, 16 streams)

Three processes, as `diptych serve --mixed 1` has them, without Ray: the router (HTTP), the worker (gRPC service and
engine thread), and the client here, on raw sockets, whose CPU is not counted. Each stream sends one completion of
`--tokens` tokens after the other. Printed for each number of streams, of the repetition with the least CPU a token:

    paced     a step takes --step-ms: CPU seconds that 1,000 tokens cost, by process (the worker's engine thread apart)
    flat out  a step takes no time: tokens/s

and of single requests with one token, one after the other: their median latency, and CPU a request.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing as mp
import pstats
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.placement.router_process import RouterProcess
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.workers.common.event_loop import new_event_loop
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from ..common.cpu_time import threads_s

TINY = Path(__file__).parents[2] / "examples" / "tiny"
PROMPT = "A diptych is two panels joined by one hinge. " * 10
FIRST_TOKEN, LAST_TOKEN = 300, 1300  # of the vocabulary: words and parts of words
TOKEN = "benchmark"
NUM_SINGLE = 200
WARM_UP_S = 1.0


class InstantRunner(FakeRunner):
    """Computes nothing: token after token of the vocabulary, `step_s` a step."""

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        if self.step_s:
            time.sleep(self.step_s)
        span = LAST_TOKEN - FIRST_TOKEN
        return [
            SampledToken(row.sequence, FIRST_TOKEN + len(row.token_ids) * 7 % span) for row in step.rows if row.samples
        ]


async def serve_worker(pipe: Connection, stop: asyncio.Event, step_s: float) -> None:
    runner = InstantRunner(num_blocks=8192, block_size=16, vocab_size=2048, max_context=2048, step_s=step_s)
    service = WorkerService(WorkerConfig.of("fake", auth_token=TOKEN, transports=("grpc",)), runner)
    where = await service.start()
    engine = next(t.native_id for t in threading.enumerate() if t.name == "diptych-engine")
    pipe.send((where.address, where.incarnation, engine))
    await stop.wait()
    await service.stop()


async def serve_router(
    pipe: Connection, stop: asyncio.Event, address: str, incarnation: str, settings: Mapping[str, object]
) -> None:
    router = {"http_port": 0, "grpc_port": 0, **settings}
    config = build({"model": str(TINY), "pools": {"mixed": {"replicas": 1}}, "router": router})
    process = RouterProcess(Deployment(config, TOKEN, is_local=True))
    process.update_fleet([WorkerInfo(incarnation, address, role="mixed", pool="mixed")])
    started = await process.start()
    pipe.send(started.http_port)
    await stop.wait()
    await process.stop()


def run_process(serve: Callable[..., object], pipe: Connection, profile: bool, *args: object) -> None:
    """A process's main: `serve` until the pipe is closed at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
        await serve(pipe, stop, *args)  # type: ignore[misc]

    profiler = cProfile.Profile()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if profile:
            profiler.runcall(runner.run, main())
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        else:
            runner.run(main())


def is_ready(port: int) -> bool:
    try:
        return urlopen(f"http://127.0.0.1:{port}/health").status == 200
    except HTTPError:  # 503
        return False


class Served:
    """A worker and a router, until `close`."""

    def __init__(self, step_s: float, profile: str = "", settings: Mapping[str, object] | None = None) -> None:
        """`settings`: of the router."""
        self._context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[mp.process.BaseProcess] = []
        self.worker_pid, (address, incarnation, self._engine) = self._start(serve_worker, profile == "worker", step_s)
        self.router_pid, self.port = self._start(
            serve_router, profile == "router", address, incarnation, settings or {}
        )  # fmt: skip
        while not is_ready(self.port):
            time.sleep(0.05)

    def _start(self, serve: Callable[..., object], profile: bool, *args: object) -> tuple[int, object]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=run_process, args=(serve, theirs, profile, *args))
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)
        assert process.pid is not None
        return process.pid, ours.recv()

    def cpu_s(self) -> dict[str, float]:
        worker = threads_s(self.worker_pid)
        engine = worker.pop(self._engine)
        return {"router": sum(threads_s(self.router_pid).values()), "service": sum(worker.values()), "engine": engine}

    def close(self) -> None:
        for pipe, process in zip(reversed(self._pipes), reversed(self._processes), strict=True):
            pipe.close()
            process.join(20)
            process.kill()


async def complete(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_tokens: int) -> None:
    """Stream a completion on an open connection."""
    body = json.dumps({
        "model": "fake", "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    status = await reader.readuntil(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200"), status + await reader.read(1000)
    answer = await reader.readuntil(b"data: [DONE]\n\n")
    await reader.readuntil(b"0\r\n\r\n")
    assert f'"completion_tokens":{num_tokens},'.encode() in answer, answer


async def streams(port: int, number: int, num_tokens: int, seconds: float) -> tuple[int, float]:
    """`number` clients for so long: (tokens, seconds until the last was done)."""
    began, done = time.perf_counter(), 0

    async def client() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while time.perf_counter() - began < seconds:
            await complete(reader, writer, num_tokens)
            done += num_tokens
        writer.close()

    await asyncio.gather(*(client() for _ in range(number)))
    return done, time.perf_counter() - began


@dataclass(frozen=True)
class Row:
    streams: int
    tokens_per_s: float
    ms_per_1000_tokens: dict[str, float]  # CPU, by part

    @property
    def total_ms(self) -> float:
        return sum(self.ms_per_1000_tokens.values())


def measure(served: Served, number: int, num_tokens: int, seconds: float) -> Row:
    before = served.cpu_s()
    done, took_s = asyncio.run(streams(served.port, number, num_tokens, seconds))
    after = served.cpu_s()
    return Row(number, done / took_s, {part: (after[part] - before[part]) / done * 1e6 for part in after})


async def single(port: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    found: list[float] = []
    for _ in range(NUM_SINGLE):
        began = time.perf_counter()
        await complete(reader, writer, 1)
        found.append(time.perf_counter() - began)
    writer.close()
    return found


def show(name: str, row: Row) -> None:
    parts = "  ".join(f"{part} {ms:6.1f}" for part, ms in row.ms_per_1000_tokens.items())
    print(f"{name:9} {row.streams:3} streams: {row.tokens_per_s:8.0f} tokens/s   CPU ms per 1,000 tokens: "
          f"{row.total_ms:6.1f} = {parts}", flush=True)  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--streams", type=int, nargs="+", default=[16, 32])
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--step-ms", type=float, default=5.0)
    p.add_argument("--seconds", type=float, default=4.0)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--profile", choices=("router", "worker"), default="")
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    results: dict[str, object] = {}
    for name, step_s in (("paced", a.step_ms / 1e3), ("flat out", 0.0)):
        served = Served(step_s, a.profile)
        try:
            measure(served, a.streams[0], a.tokens, WARM_UP_S)
            for number in a.streams[:1] if a.profile else a.streams:
                rows = [measure(served, number, a.tokens, a.seconds) for _ in range(a.repeat)]
                best = min(rows, key=lambda row: row.total_ms)
                show(name, best)
                results[f"{name} {number}"] = asdict(best)
            if not step_s:
                before = sum(served.cpu_s().values())
                latencies = asyncio.run(single(served.port))
                cpu_ms = (sum(served.cpu_s().values()) - before) / NUM_SINGLE * 1e3
                single_ms, least_ms = statistics.median(latencies) * 1e3, min(latencies) * 1e3
                print(f"one token, one request at a time: median {single_ms:.2f} ms, least {least_ms:.2f} ms, "
                      f"CPU {cpu_ms:.2f} ms a request")  # fmt: skip
                results["single"] = {"median_ms": single_ms, "least_ms": least_ms, "cpu_ms": cpu_ms}
        finally:
            served.close()
        if a.profile:
            return
    if a.json:
        a.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
