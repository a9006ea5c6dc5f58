"""Scaling under load, by a real supervisor, router and workers in one process: sequences move, nothing is resumed."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.common.role import Role
from diptych.workers.testing.fake_runner import fake_output

from ...support.supervised import TIMEOUT_S, TOKEN, FakeLauncher, World, is_ready, supervising

STEP_S = 0.01
LASTING = 100  # tokens left to make: no sequence ends before it can be moved
ROOMY = 1 << 12  # blocks
NUM_USERS = 12  # half of them want answers that last, half have always just asked
# Nobody is given up for being late: this machine may do other things for a while.
CONFIG = replace(RoutingConfig(), worker_timeout_s=TIMEOUT_S, hello_timeout_s=TIMEOUT_S)


@dataclass
class Users:
    """Each asks, reads the whole answer, and asks again. An answer that is wrong, or an error, ends the test."""

    router: Router
    num_done: int = 0
    is_over: bool = False
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, number: int) -> None:
        rng = random.Random(number)
        while not self.is_over:
            prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 30))]
            num_tokens = rng.randint(300, 400) if number % 2 else rng.randint(2, 8)
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
            asked = Request(f"{number}-{self.num_done}", tuple(prompt), sampling, timeout_s=TIMEOUT_S)
            heard = [t async for delta in self.router.stream(asked) for t in delta.token_ids]
            assert heard == fake_output(prompt, num_tokens)
            self.num_done += 1
            self.progress.set()

    async def until_done(self, number: int) -> None:
        """Until `number` more requests have ended."""
        goal = self.num_done + number
        while self.num_done < goal:
            self.progress.clear()
            await self.progress.wait()

    async def until_each_decodes(self) -> None:
        """Until every decode worker has a sequence that lasts."""

        def busy() -> set[str]:
            return {r.worker for r in self.router._migrations._movable() if r.num_remaining > LASTING}

        while not {w.info.incarnation for w in self.router.workers() if w.role is Role.DECODE} <= busy():
            await asyncio.sleep(STEP_S)


@asynccontextmanager
async def under_load(world: World) -> AsyncIterator[Users]:
    router = Router(CONFIG, TOKEN)

    async def follow() -> None:
        version = 0
        while True:
            version, workers = await world.supervisor.watch_fleet(version)
            router.update_fleet(workers)

    await router.start()
    users = Users(router)
    follower = asyncio.create_task(follow())
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_USERS):
            group.create_task(users.run(number))
        yield users
        users.is_over = True
    follower.cancel()
    await router.stop()


async def scale(world: World, **replicas: int) -> None:
    """Until the targets are reached and those that leave have left."""
    world.supervisor.scale(replicas)
    await world.until(lambda status: status.is_settled)


def counted(router: Router, name: str) -> float:
    lines = router.metrics().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def num_failed_handoffs(launcher: FakeLauncher) -> int:
    """Over all workers that ever were."""
    return sum(process.service._load.num_handoffs_failed for process in launcher.processes.values())


def check_nothing_was_resumed(world: World, users: Users) -> None:
    assert counted(users.router, "diptych_request_resumes_total") == 0
    assert num_failed_handoffs(world.launcher) == 0
    outcomes = [line for line in users.router.metrics().decode().splitlines() if "diptych_requests_total{" in line]
    assert all("stop" in line or "length" in line for line in outcomes), outcomes


@pytest.mark.slow
async def test_a_planned_change_moves_sequences_and_resumes_nothing() -> None:
    async with supervising(
        FakeLauncher(step_s=STEP_S, num_blocks=ROOMY), prefill={"replicas": 1}, decode={"replicas": 1}
    ) as world:
        await world.until(is_ready)
        async with under_load(world) as users:
            await users.until_done(10)
            await scale(world, prefill=2, decode=2)
            await users.until_done(30)
            await users.until_each_decodes()
            await scale(world, prefill=1, decode=1)
            await users.until_done(10)
        check_nothing_was_resumed(world, users)
        assert counted(users.router, "diptych_request_migrations_total") >= 1


async def test_the_first_prefill_worker_comes_and_the_last_one_goes_and_nothing_is_resumed() -> None:
    async with supervising(
        FakeLauncher(step_s=STEP_S, num_blocks=ROOMY), prefill={"replicas": 0}, decode={"replicas": 1}
    ) as world:
        await world.until(is_ready)
        async with under_load(world) as users:
            await users.until_done(10)
            await scale(world, prefill=1)
            await users.until_done(20)
            await scale(world, prefill=0)
            await users.until_done(10)
        check_nothing_was_resumed(world, users)
