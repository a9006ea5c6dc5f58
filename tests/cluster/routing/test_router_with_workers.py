"""The router over real workers in one process: real engines, real hand-offs, hand-computable tokens.

A token is the sum of what is read back from the KV memory, so KV that was lost, torn or mixed up gives a wrong one.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import auth_metadata, open_channel
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.common.tls import LinkTls
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner, fake_output
from diptych.workers.testing.fake_stream import FakeStep

TIMEOUT_S = 60.0
TOKEN = "the cluster's token"
CALM: dict[str, Any] = {"lease_s": TIMEOUT_S}  # no lease ends while the machine has other work
CONFIG = RoutingConfig(reconnect_s=0.02, max_reconnect_s=0.1)


@dataclass
class LiveWorker:
    service: WorkerService
    info: WorkerInfo
    runner: FakeRunner

    async def kill(self) -> None:
        """Its server closes every stream at once; its engine ends."""
        await self.service.stop(grace_s=0.0)

    async def settled_state(self, tls: LinkTls | None = None) -> worker_pb2.WorkerState:
        """The state once nothing runs, or is on its way, any more. `tls`: the worker's."""
        async with open_channel(self.info.address, tls) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            while True:
                state = await stub.GetState(worker_pb2.GetStateRequest(), metadata=auth_metadata(TOKEN))
                load = state.load
                if not (load.num_running or load.num_waiting or load.num_leased_blocks or state.num_open_handoffs):
                    return state
                await asyncio.sleep(0.01)


@dataclass
class Cluster:
    router: Router
    workers: list[LiveWorker]

    def of(self, role: str) -> list[LiveWorker]:
        return [w for w in self.workers if w.info.role == role]

    def announce(self) -> None:
        self.router.update_fleet([w.info for w in self.workers])

    async def busy(self, worker: LiveWorker) -> None:
        """Returns once several requests are on that worker and it has computed a step. It computes no other before."""
        stream, is_busy = worker.runner.stream, threading.Event()
        compute = stream._compute

        def wait_and_compute(step: FakeStep) -> list[SampledToken]:
            if worker.runner.num_steps:
                is_busy.wait()
            return compute(step)

        stream._compute = wait_and_compute
        try:
            while not (
                any(w.info == worker.info and w.num_in_flight > 3 for w in self.router.workers())
                and worker.runner.num_steps
            ):
                await asyncio.sleep(0.002)
        finally:
            is_busy.set()
            stream._compute = compute

    async def lose(self, worker: LiveWorker) -> None:
        """The worker ends, and the supervisor reports it."""
        self.workers.remove(worker)
        await worker.kill()
        self.announce()


async def start_worker(
    role: str, step_s: float, *, num_blocks: int = 1024, max_context: int = 512, weights: int = 0, **settings: object
) -> LiveWorker:
    """`weights`: of the model; other ones are of an upgrade."""
    config = WorkerConfig.of(
        model="fake",
        role=role,
        chunk_tokens=8,
        lease_s=2.0,
        transports=("grpc",),
        auth_token=TOKEN,
    )
    kind = type("RunnerOfWeights", (FakeRunner,), {"weights": weights})
    runner = kind(num_blocks=num_blocks, max_context=max_context, step_s=step_s)
    service = WorkerService(config.changed(**settings), runner)  # type: ignore[arg-type]
    where = await service.start()
    return LiveWorker(service, WorkerInfo(where.incarnation, where.address, role, role, generation=weights), runner)


@asynccontextmanager
async def cluster(
    *roles: str, config: RoutingConfig = CONFIG, step_s: float = 0.0, **settings: Any
) -> AsyncIterator[Cluster]:
    """Workers and a router; afterwards every worker alive accounts for every block."""
    router = Router(config, TOKEN)
    async with AsyncExitStack() as stack:
        workers: list[LiveWorker] = []
        for role in roles:
            worker = await start_worker(role, step_s, **settings)
            workers.append(worker)
        running = Cluster(router, workers)
        stack.push_async_callback(lambda: asyncio.gather(*(w.kill() for w in running.workers)))
        stack.push_async_callback(router.stop)
        running.announce()
        await router.start()
        while not all(w.is_up for w in router.workers()):
            await asyncio.sleep(0.002)
        yield running
        assert router.health().num_requests == 0
        assert all(w.num_in_flight == 0 for w in router.workers())
        for worker in running.workers:
            state = await worker.settled_state()
            assert state.num_unaccounted_blocks == 0
            assert (state.load.num_leased_blocks, state.load.num_quarantined_blocks) == (0, 0)
            assert state.load.num_free_blocks == state.load.num_blocks


def request(prompt: list[int], max_tokens: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(f"request-{prompt[0]}", tuple(prompt), sampling, timeout_s=TIMEOUT_S)


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    random_ = random.Random(seed)
    return [[random_.randrange(1, 1000) for _ in range(random_.randint(1, longest))] for _ in range(count)]


async def answer(router: Router, prompt: list[int], max_tokens: int) -> list[int]:
    return [t async for delta in router.stream(request(prompt, max_tokens)) for t in delta.token_ids]


async def check_answers(router: Router, asked: list[list[int]], max_tokens: int) -> None:
    found = await asyncio.gather(*(answer(router, prompt, max_tokens) for prompt in asked))
    assert found == [fake_output(prompt, max_tokens) for prompt in asked]


@pytest.mark.parametrize(
    "roles",
    [
        ("mixed",),
        ("prefill", "decode"),
        ("prefill", "prefill", "decode", "decode"),
        ("prefill",),
        ("decode", "decode"),
        ("mixed", "decode"),
    ],
    ids="+".join,
)
async def test_every_shape_of_fleet_gives_the_same_tokens(roles: tuple[str, ...]) -> None:
    async with cluster(*roles, **CALM) as running:
        await check_answers(running.router, prompts(12, 60, seed=1), max_tokens=12)
        await check_answers(running.router, prompts(12, 60, seed=1), max_tokens=12)  # now with warm caches
        if "prefill" in roles and "decode" in roles:
            loads = [(await w.settled_state()).load for w in running.of("decode")]
            assert sum(load.num_handoffs_received for load in loads) >= 20
            assert sum(load.num_handoffs_failed for load in loads) == 0


async def test_two_hundred_requests_at_once() -> None:
    async with cluster("prefill", "prefill", "decode", "decode") as running:
        await check_answers(running.router, prompts(200, 40, seed=2), max_tokens=10)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_killed_under_load_costs_no_token(role: str) -> None:
    async with cluster("prefill", "prefill", "decode", "decode", step_s=0.002) as running:
        asked = prompts(40, 60, seed=3)
        answers = asyncio.create_task(check_answers(running.router, asked, max_tokens=40))
        victim = running.of(role)[0]
        await running.busy(victim)
        await running.lose(victim)
        await answers
        assert b"diptych_request_resumes_total 0.0" not in running.router.metrics()


async def test_a_pool_that_dies_and_comes_back() -> None:
    """1P1D: first its decode worker goes, then its prefill worker; new ones come later."""
    async with cluster("prefill", "decode", step_s=0.002) as running:
        asked = prompts(20, 60, seed=4)
        answers = asyncio.create_task(check_answers(running.router, asked, max_tokens=60))
        for role in ("decode", "prefill"):
            (victim,) = running.of(role)
            await running.busy(victim)
            await running.lose(victim)
            running.workers.append(await start_worker(role, 0.002))
            running.announce()
        await answers


async def test_clients_that_leave_free_their_blocks() -> None:
    async with cluster("prefill", "decode", step_s=0.002) as running:

        async def leave_after(prompt: list[int], num_tokens: int) -> None:
            seen = 0
            async with aclosing(running.router.stream(request(prompt, 100))) as stream:
                async for delta in stream:
                    seen += len(delta.token_ids)
                    if seen >= num_tokens:
                        return

        asked = [[7 + i] * 50 for i in range(30)]
        await asyncio.gather(*(leave_after(prompt, i % 4) for i, prompt in enumerate(asked)))
        await check_answers(running.router, asked[:3], max_tokens=5)


async def test_a_worker_that_leaves_finishes_its_requests() -> None:
    async with cluster("mixed", "mixed", step_s=0.002) as running:
        asked = prompts(20, 30, seed=6)
        answers = asyncio.create_task(check_answers(running.router, asked, max_tokens=30))
        leaving = running.workers[0]
        await running.busy(leaving)
        running.router.update_fleet([running.workers[1].info])
        await answers
        assert b"diptych_request_resumes_total 0.0" in running.router.metrics()
        assert (await leaving.settled_state()).load.num_decode_tokens > 0
