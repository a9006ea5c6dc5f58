"""The router moves KV between real workers in one process; tokens can be computed by hand, and every block is accounted
for at the end."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import auth_metadata, open_channel
from diptych.workers.testing.fake_runner import fake_output

from .test_router_with_workers import (
    CONFIG,
    TIMEOUT_S,
    TOKEN,
    Cluster,
    LiveWorker,
    answer,
    check_answers,
    cluster,
    prompts,
    request,
    start_worker,
)

STEP_S = 0.01
UNENDING = 20_000  # tokens: a test fails long before steps of STEP_S have generated this many
MORE = 20  # tokens that a client still receives after it has received enough
ROOMY: dict[str, Any] = {"step_s": STEP_S, "num_blocks": 1 << 13, "max_context": UNENDING + 100}
# Nobody is given up for being late: this machine may do other things for a while.
PATIENT: dict[str, Any] = ROOMY | {
    "config": replace(CONFIG, worker_timeout_s=TIMEOUT_S, hello_timeout_s=TIMEOUT_S),
    "lease_s": TIMEOUT_S,
}


class Audience:
    """Clients of endless answers. They stay until the test has finished its checks."""

    def __init__(self, running: Cluster, asked: list[list[int]]) -> None:
        self._router = running.router
        self._has_seen = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen(prompt)) for prompt in asked]

    async def leave(self) -> None:
        """Each after a few tokens more. What they heard is right so far."""
        assert not any(task.done() for task in self._tasks)
        self._has_seen.set()
        await asyncio.gather(*self._tasks)

    async def _listen(self, prompt: list[int]) -> None:
        heard: list[int] = []
        num_more = MORE
        async with aclosing(self._router.stream(request(prompt, UNENDING))) as deltas:
            async for delta in deltas:
                heard += delta.token_ids
                num_more -= len(delta.token_ids) if self._has_seen.is_set() else 0
                if num_more <= 0:
                    break
        assert heard == fake_output(prompt, len(heard))


async def drain(worker: LiveWorker) -> None:
    """Drain a worker on a separate stream, as the supervisor does. Returns when the worker reports that it drains."""
    async with open_channel(worker.info.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(TOKEN))
        await call.write(worker_pb2.RouterMessage(drain=worker_pb2.Drain()))
        async for message in call:
            if message.load.draining:
                call.cancel()
                return


async def runs(worker: LiveWorker, num_sequences: int) -> None:
    """Return when this many sequences decode there, so their KV has arrived."""
    async with open_channel(worker.info.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        while True:
            state = await stub.GetState(worker_pb2.GetStateRequest(), metadata=auth_metadata(TOKEN))
            if state.load.num_running >= num_sequences:
                return
            await asyncio.sleep(0.01)


async def loads(workers: list[LiveWorker]) -> list[worker_pb2.LoadReport]:
    return [(await w.settled_state()).load for w in workers]


def count(running: Cluster, name: str) -> float:
    lines = running.router.metrics().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def busy_with(running: Cluster, worker: LiveWorker, num_requests: int, num_tokens: int = 50) -> None:
    """Return when this many sequences are there, and this many tokens were delivered."""
    while not any(w.info == worker.info and w.num_in_flight >= num_requests for w in running.router.workers()) or (
        count(running, "diptych_generation_tokens_total") < num_tokens
    ):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("roles", [("prefill", "decode", "decode"), ("mixed", "mixed")], ids="+".join)
async def test_a_worker_that_drains_is_emptied_and_nothing_is_computed_twice(roles: tuple[str, ...]) -> None:
    async with cluster(*roles, **PATIENT) as running:
        asked = prompts(12, 30, seed=1)
        audience = Audience(running, asked)
        leaving = running.workers[-1]
        await runs(leaving, 4)
        await drain(leaving)
        await leaving.settled_state()
        await audience.leave()
        assert count(running, "diptych_request_migrations_total") > 3
        assert count(running, "diptych_request_resumes_total") == 0
        reports = await loads(running.workers)
        assert sum(load.num_preemptions for load in reports) == 0
        assert sum(load.num_prefill_tokens for load in reports) <= sum(map(len, asked))
        assert reports[-1].num_migrated_out == count(running, "diptych_request_migrations_total")


async def test_workers_drain_one_after_the_other_under_load() -> None:
    """A sequence moves more than once."""
    roles = ("prefill", "decode", "decode", "decode")
    async with cluster(*roles, **PATIENT) as running:
        audience = Audience(running, prompts(9, 30, seed=2))
        for worker in running.of("decode")[:2]:
            await runs(worker, 1)
            await drain(worker)
            await worker.settled_state()
        await audience.leave()
        reports = await loads(running.workers)
        assert all(load.num_migrated_out for load in reports[1:3])
        assert count(running, "diptych_request_resumes_total") == 0


@pytest.mark.parametrize("victim", ["source", "sink"])
async def test_a_worker_killed_while_sequences_move_costs_no_token(victim: str) -> None:
    async with cluster("prefill", "decode", "decode", "decode", **ROOMY) as running:
        audience = Audience(running, prompts(20, 30, seed=3))
        source, sink, _ = running.of("decode")
        await running.busy(source)
        drained = asyncio.create_task(drain(source))
        while not any(driver.state.moving() for driver in running.router._drivers):
            await asyncio.sleep(0)
        await running.lose(source if victim == "source" else sink)
        await asyncio.gather(drained, return_exceptions=True)  # its stream may break with the worker
        await audience.leave()


async def test_a_worker_short_of_blocks_gives_sequences_away_instead_of_preempting_them() -> None:
    # From being short of blocks to being without any it is eight steps: long enough for a loaded machine too.
    async with cluster("mixed", step_s=0.08, num_blocks=96) as running:
        spare = await start_worker("mixed", 0.08)
        asked = [[7 + i] * (70 + i) for i in range(4)]  # 96 blocks hold 384 tokens; they grow to 446
        answers = asyncio.create_task(check_answers(running.router, asked, max_tokens=40))
        await busy_with(running, running.workers[0], 4, num_tokens=16)
        running.workers.append(spare)
        running.announce()
        await answers
        reports = await loads(running.workers)
        assert 1 <= reports[0].num_migrated_out <= 2
        assert [load.num_preemptions for load in reports] == [0, 0]
        assert count(running, "diptych_request_resumes_total") == 0


async def test_the_next_turn_pulls_what_the_decode_worker_wrote() -> None:
    async with cluster("prefill", "decode", step_s=0.02) as running:
        prompt = [5, 6, 7] * 90
        said = await answer(running.router, prompt, 40)
        assert said == fake_output(prompt, 40)
        await loads(running.workers)
        turn = [*prompt, *said, 8, 9]
        assert await answer(running.router, turn, 5) == fake_output(turn, 5)
        reports = await loads(running.workers)
        assert reports[0].num_prefixes_pulled == 1
        assert reports[0].num_prefill_tokens < len(prompt) + 40
