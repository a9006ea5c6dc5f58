"""What may happen to a worker's network or process, one thing at a time, on one cluster that lives through all of it.

benchmarks/serving/chaos.py does the same at random, and without a pause."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import faults
from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.forked import ForkedProcess, fork_command

ROOT = Path(__file__).parents[2]
ROLES = ("prefill", "prefill", "decode", "decode")
NUM_TOKENS = 120
LENGTHS = (3, 40, 90, 300)
WHILE_PREFILLING = 1  # the first token: other prompts are being computed, or pulled
WHILE_DECODING = len(LENGTHS) * 4 * NUM_TOKENS // 10
LONG = 1000  # tokens: answers that outlive a drain
Cases = list[tuple[list[int], list[int]]]

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


@dataclass
class ForkedWorker(faults.Worker):
    """A worker whose process need not import anything, see support/forked.py."""

    forked: ForkedProcess | None = None

    @property
    def is_alive(self) -> bool:
        return self.forked is not None and self.forked.poll() is None

    async def start(self) -> None:
        _, _, module, *flags = self.command
        main, env = importlib.import_module(module).main, os.environ | {"OMP_NUM_THREADS": "1"}
        self.forked = await asyncio.to_thread(fork_command, main, flags, env)
        async with asyncio.timeout(faults.START_S):
            line = await asyncio.to_thread(self.forked.stdout.readline)
        assert line, f"the {self.role} worker ended before it was ready"
        self.is_ready(line)

    def send(self, number: signal.Signals) -> None:
        assert self.forked is not None
        self.forked.send_signal(number)

    async def kill(self) -> None:
        if self.forked is not None and not self.forked.stdout.closed:
            self.forked.kill()
            await asyncio.to_thread(self.forked.wait)
            self.forked.stdout.close()


class Cluster:
    """Two pools of two workers behind proxies, and a router."""

    def __init__(self, model: Path, transport: str, speculation: Sequence[str], module: str) -> None:
        """speculation: flags of the workers. module: what runs in their processes."""
        flags = ["--dtype", "float32", "--threads", "1", "--lease-s", "1.5", "--transports", transport]
        flags += ["--chunk-tokens", "64", "--kv-memory-bytes", str(64 << 20), *speculation]
        commands = [faults.worker_command(str(model), role, flags, module) for role in ROLES]
        self.workers = [ForkedWorker(role, command) for role, command in zip(ROLES, commands, strict=True)]
        self.router = Router(RoutingConfig(worker_timeout_s=1.5, max_attempts=5))

    def announce(self) -> None:
        self.router.update_fleet([w.info for w in self.workers])

    def is_up(self, worker: Any) -> bool:
        return any(s.is_up for s in self.router.workers() if s.info.incarnation == worker.incarnation)

    async def all_up(self) -> None:
        while not all(self.is_up(w) for w in self.workers):
            await asyncio.sleep(0.02)

    async def restart(self, worker: faults.Worker) -> None:
        await worker.kill()
        await worker.start()  # at the same address, as another incarnation
        self.announce()

    def value(self, name: str) -> float:
        """Sum of a metric's series that the router shows."""
        lines = self.router.metrics().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def answer(
        self, number: int, prompt: list[int], on_token: Callable[[], None] = lambda: None, num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        tokens: list[int] = []
        async for delta in self.router.stream(Request(f"request-{number}", tuple(prompt), sampling, timeout_s=60.0)):
            for token_id in delta.token_ids:
                tokens.append(token_id)
                on_token()
        return tokens

    async def check(self, cases: Cases, fault: Callable[[], Awaitable[None]], strike_at: int) -> None:
        """Send all prompts at once; `fault` begins when this many tokens have arrived. Every answer must be exact."""
        num_out, striking = 0, asyncio.Event()

        def count() -> None:
            nonlocal num_out
            num_out += 1
            if num_out == strike_at:
                striking.set()

        async def strike() -> None:
            await striking.wait()
            await fault()

        calls = [self.answer(i, prompt, count, len(tokens)) for i, (prompt, tokens) in enumerate(cases)]
        answers, _ = await asyncio.gather(asyncio.gather(*calls), strike())
        assert answers == [tokens for _, tokens in cases]


@asynccontextmanager
async def running(
    model: Path,
    transport: str,
    speculation: Sequence[str] = ("--speculation", "ngram"),
    module: str = faults.WORKER_MODULE,
) -> AsyncIterator[Cluster]:
    cluster = Cluster(model, transport, speculation, module)
    try:
        await asyncio.gather(*(w.proxy.start() for w in cluster.workers))
        await asyncio.gather(*(w.start() for w in cluster.workers))
        await cluster.router.start()
        cluster.announce()
        await cluster.all_up()
        yield cluster
    finally:
        await cluster.router.stop()
        await asyncio.gather(*(w.kill() for w in cluster.workers))
        await asyncio.gather(*(w.proxy.close() for w in cluster.workers))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cases]:
    path = make_checkpoint(tmp_path_factory.mktemp("ladder") / "llama", "llama", seed=5)
    return path, untied_prompts(path, seed=21, lengths=LENGTHS * 4, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize(
    ("transport", "moments"),  # (which worker, after how many tokens)
    [
        ("grpc", [(0, WHILE_PREFILLING)]),
        ("nixl", [(2, WHILE_PREFILLING)]),
        ("shared_memory", [(2, WHILE_DECODING)]),
        pytest.param("grpc", [(2, WHILE_PREFILLING), (2, WHILE_DECODING)], marks=pytest.mark.long),
        pytest.param("nixl", [(0, WHILE_PREFILLING), (2, WHILE_DECODING)], marks=pytest.mark.long),
        pytest.param("shared_memory", [(0, WHILE_PREFILLING), (2, WHILE_PREFILLING)], marks=pytest.mark.long),
    ],
)
async def test_every_fault_leaves_every_answer_exact(
    transport: str, moments: list[tuple[int, int]], checkpoint: tuple[Path, Cases]
) -> None:
    path, cases = checkpoint
    async with running(path, transport) as cluster:

        async def cut(worker: Any, *directions: str) -> None:
            """For longer than the lease and the router's patience."""
            worker.proxy.cut(*directions)
            while cluster.is_up(worker):
                await asyncio.sleep(0.05)
            worker.proxy.mend()

        async def breaks(worker: Any) -> None:
            worker.proxy.break_connections()

        async def pause(worker: Any) -> None:
            worker.send(signal.SIGSTOP)
            while cluster.is_up(worker):
                await asyncio.sleep(0.05)
            worker.send(signal.SIGCONT)

        for victim, strike_at in moments:
            worker = cluster.workers[victim]
            for fault in (
                lambda w=worker: breaks(w),
                lambda w=worker: cut(w, "to"),
                lambda w=worker: cut(w, "from"),
                lambda w=worker: cut(w, "to", "from"),
                lambda w=worker: pause(w),
                lambda w=worker: cluster.restart(w),
            ):
                await cluster.check(cases, fault, strike_at)
                await cluster.all_up()
        await check_drain(cluster, cases)
        assert await faults.leaked(cluster.workers) == {}


async def check_drain(cluster: Cluster, cases: Cases) -> None:
    """A decode worker drains: it is empty long before its requests end elsewhere, and nothing is computed again."""
    prompts = [prompt for prompt, _ in cases[::2]]
    undisturbed = await asyncio.gather(*(cluster.answer(i, p, num_tokens=LONG) for i, p in enumerate(prompts)))
    leaving = cluster.workers[-1]
    control = await WorkerControl.open(leaving.direct_address, None)
    num_left = 0

    async def drain() -> None:
        nonlocal num_left
        await control.drain()
        while not await control.is_drained():
            await asyncio.sleep(0.02)
        num_left = cluster.router.health().num_requests

    num_resumes = cluster.value("diptych_request_resumes_total")
    await cluster.check(list(zip(prompts, undisturbed, strict=True)), drain, WHILE_DECODING)
    assert num_left > 0
    assert cluster.value("diptych_request_migrations_total") > 0
    assert cluster.value("diptych_request_resumes_total") == num_resumes
    await control.close()


def test_chaos() -> None:
    """The script itself, for a short while."""
    command = [sys.executable, "-m", "benchmarks.serving.chaos", "--seconds", "6", "--seed", "7", "--json"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    assert result.stdout, "see the captured errors"
    report = json.loads(result.stdout)
    assert result.returncode == 0, report
    assert report["num_requests"] > 0 and sum(report["faults"].values()) > 0
    assert report["failed"] == {}
