"""Two prefill and two decode workers under steady load, while every second something happens to one of them.

    python -m benchmarks.serving.chaos [--seconds 120] [--seed 1] [--transport nixl] [--json]

SIGKILL (and a new process at the same address), SIGSTOP for a while, the network cut towards the worker, from it or
both ways for a while, every connection broken with both ends alive, or drained and replaced. One worker of each pool is
always left alone, so no request may fail. Router and workers have the attempts, time-outs and leases that a cluster of
`diptych serve` has. Every answer, greedy or sampled with a seed, is compared token for token with what one worker alone
said before; at the end the workers' books are compared. Exits with 1 unless there were no wrong tokens, no failed
requests, no hangs and no leaked block; failed requests are counted by cause.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig

from .faults import Worker, leaked, worker_command

MODEL = str(Path(__file__).parents[2] / "examples" / "tiny")
ROLES = ("prefill", "prefill", "decode", "decode")
NUM_CASES = 48
REQUEST_TIMEOUT_S = 60.0
HANG_S = REQUEST_TIMEOUT_S + 10.0
ROUTING = RoutingConfig()
# How long a worker is stopped or cut off: shorter and longer than its lease and the router's patience.
AWAY_S = (0.3, 1.2 * max(WorkerConfig.of(MODEL).handoff.lease_s, ROUTING.worker_timeout_s))


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answer: tuple[int, ...] = ()


@dataclass
class Report:
    seconds: float
    seed: int
    transport: str
    num_requests: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_hung: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    leaked: dict[str, int] = field(default_factory=dict[str, int])
    num_resumes: int = 0
    num_migrations: int = 0
    latencies_s: list[float] = field(default_factory=list[float])

    @property
    def is_clean(self) -> bool:
        return not (self.num_wrong or self.failed or self.num_hung or self.leaked)


# The load


def make_cases(seed: int) -> list[Case]:
    """Prompts of 2 to 500 tokens, some of which begin alike; half of them greedy, half sampled with a seed."""
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(3, 1000) for _ in range(200)) for _ in range(4)]
    cases: list[Case] = []
    for number in range(NUM_CASES):
        stem = rng.choice(stems)[: rng.choice([0, 0, 64, 200])]
        prompt = stem + tuple(rng.randrange(3, 1000) for _ in range(rng.randint(2, 300)))
        temperature = 0.0 if number % 2 else 0.8
        sampling = SamplingParams(
            temperature=temperature, seed=rng.randrange(1 << 32), max_tokens=rng.randint(8, 120), ignore_eos=True
        )
        cases.append(Case(prompt, sampling))
    return cases


async def ask(router: Router, case: Case, number: int) -> tuple[int, ...]:
    tokens: list[int] = []
    async for delta in router.stream(Request(f"request-{number}", case.prompt, case.sampling, REQUEST_TIMEOUT_S)):
        tokens += delta.token_ids
    return tuple(tokens)


async def client(router: Router, cases: Sequence[Case], seed: int, end: float, report: Report) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        case = rng.choice(cases)
        start = time.monotonic()
        report.num_requests += 1
        try:
            async with asyncio.timeout(HANG_S):
                tokens = await ask(router, case, report.num_requests)
        except DiptychError as e:
            report.failed[f"{type(e).__name__}: {e.message[:160]}"] += 1
        except TimeoutError:
            report.num_hung += 1
        else:
            report.num_tokens += len(tokens)
            report.num_wrong += tokens != case.answer
            report.latencies_s.append(time.monotonic() - start)


# The faults


class Chaos:
    """`after` a fault the worker's place is healthy again; `changed` is called when its process is another."""

    def __init__(self, workers: Sequence[Worker], changed: Callable[[], None], seed: int, report: Report) -> None:
        self._workers = workers
        self._changed = changed
        self._rng = random.Random(seed)
        self._report = report
        self._running: set[asyncio.Task[None]] = set()
        self._kinds: dict[str, Callable[[Worker], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "cut to": lambda w: self._cut(w, "to"),
            "cut from": lambda w: self._cut(w, "from"),
            "cut both": lambda w: self._cut(w, "to", "from"),
            "break": self._break,
            "drain": self._drain,
        }

    async def run(self, end: float, interval_s: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(interval_s)
            self._strike()
        if self._running:
            await asyncio.wait(self._running)
        for task in self._running:
            task.result()

    def _strike(self) -> None:
        able = [w for w in self._workers if not w.is_afflicted and self._has_healthy_mate(w)]
        if not able:
            return
        worker, kind = self._rng.choice(able), self._rng.choice(list(self._kinds))
        self._report.faults[kind] += 1
        worker.is_afflicted = True
        task = asyncio.create_task(self._afflict(worker, kind))
        self._running.add(task)
        task.add_done_callback(self._forget)

    def _has_healthy_mate(self, worker: Worker) -> bool:
        return any(w.role == worker.role and w is not worker and not w.is_afflicted for w in self._workers)

    def _forget(self, task: asyncio.Task[None]) -> None:
        if task.exception() is None:
            self._running.discard(task)

    async def _afflict(self, worker: Worker, kind: str) -> None:
        await self._kinds[kind](worker)
        await asyncio.sleep(ROUTING.worker_timeout_s)  # for routers to have found it again
        worker.is_afflicted = False

    def _away_s(self) -> float:
        return self._rng.uniform(*AWAY_S)

    async def _kill(self, worker: Worker) -> None:
        await worker.kill()
        await self._replace(worker)

    async def _replace(self, worker: Worker) -> None:
        await worker.start()
        self._changed()

    async def _stop(self, worker: Worker) -> None:
        worker.send(signal.SIGSTOP)
        await asyncio.sleep(self._away_s())
        worker.send(signal.SIGCONT)

    async def _cut(self, worker: Worker, *directions: str) -> None:
        worker.proxy.cut(*directions)
        await asyncio.sleep(self._away_s())
        worker.proxy.mend()

    async def _break(self, worker: Worker) -> None:
        worker.proxy.break_connections()

    async def _drain(self, worker: Worker) -> None:
        await worker.drain(REQUEST_TIMEOUT_S)
        worker.send(signal.SIGTERM)
        assert worker.process is not None
        await worker.process.wait()
        await self._replace(worker)


# The run


@asynccontextmanager
async def started(workers: Sequence[Worker]) -> AsyncIterator[None]:
    try:
        await asyncio.gather(*(worker.proxy.start() for worker in workers))
        await asyncio.gather(*(worker.start() for worker in workers))
        yield
    finally:
        await asyncio.gather(*(worker.kill() for worker in workers))
        await asyncio.gather(*(worker.proxy.close() for worker in workers))


@asynccontextmanager
async def routed(fleet: Callable[[], list[WorkerInfo]]) -> AsyncIterator[Router]:
    router = Router(ROUTING)
    await router.start()
    router.update_fleet(fleet())
    try:
        yield router
    finally:
        await router.stop()


async def answered(cases: Sequence[Case], flags: Sequence[str]) -> list[Case]:
    """Return the cases with the answers of a worker alone, one request at a time."""
    lone = Worker("mixed", worker_command(MODEL, "mixed", flags))
    async with started([lone]), routed(lambda: [lone.info]) as router:
        answers = [await ask(router, case, number) for number, case in enumerate(cases)]
    return [Case(c.prompt, c.sampling, answer) for c, answer in zip(cases, answers, strict=True)]


async def run(seconds: float, seed: int, transport: str, num_clients: int, interval_s: float) -> Report:
    flags = ["--dtype", "float32", "--threads", "1", "--transports", transport]
    flags += ["--kv-memory-bytes", str(256 << 20), "--chunk-tokens", "64"]
    report = Report(seconds, seed, transport)
    cases = await answered(make_cases(seed), flags)
    workers = [Worker(role, worker_command(MODEL, role, flags)) for role in ROLES]
    async with started(workers), routed(lambda: [w.info for w in workers]) as router:
        chaos = Chaos(workers, lambda: router.update_fleet([w.info for w in workers]), seed, report)
        end = time.monotonic() + seconds
        clients = [client(router, cases, seed + n, end, report) for n in range(num_clients)]
        await asyncio.gather(chaos.run(end, interval_s), *clients)
        report.leaked = await leaked(workers)
        for line in router.metrics().decode().splitlines():
            if line.startswith("diptych_request_resumes_total"):
                report.num_resumes = int(float(line.split()[-1]))
            if line.startswith("diptych_request_migrations_total"):
                report.num_migrations = int(float(line.split()[-1]))
    return report


def show(report: Report) -> None:
    print(f"{report.num_requests} requests, {report.num_tokens} tokens in {report.seconds:g} s over {report.transport}")
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(report.faults.items())))
    print(f"wrong answers {report.num_wrong}, hung {report.num_hung}, failed {report.failed.total()}")
    for cause, count in report.failed.most_common():
        print(f"  {count} x {cause}")
    print(f"resumed {report.num_resumes}, migrated {report.num_migrations}; leaked: {report.leaked or 'nothing'}")
    if len(report.latencies_s) > 1:
        cuts = statistics.quantiles(report.latencies_s, n=100)
        print(f"request latency: median {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, worst {max(report.latencies_s):.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", default="auto", help="auto, nixl or grpc")
    parser.add_argument("--clients", type=int, default=8, help="requests in flight")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between faults")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report = asyncio.run(run(given.seconds, given.seed, given.transport, given.clients, given.interval))
    if given.json:
        print(json.dumps(vars(report)))
    else:
        show(report)
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
