"""Users of a supervised cluster in this process: a real router follows the supervisor, and each user's answers are
checked."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.common.role import Role
from diptych.workers.testing.fake_runner import fake_output

from .supervised import TIMEOUT_S, TOKEN, FakeLauncher, World

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
    weights: set[int] = field(default_factory=lambda: {0})  # of the models whose answers are right
    num_done: int = 0
    is_over: bool = False
    seen: set[int] = field(default_factory=set[int])  # weights by which users were answered
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, number: int) -> None:
        rng = random.Random(number)
        while not self.is_over:
            prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 30))]
            num_tokens = rng.randint(300, 400) if number % 2 else rng.randint(2, 8)
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
            asked = Request(f"{number}-{self.num_done}", tuple(prompt), sampling, timeout_s=TIMEOUT_S)
            heard = [t async for delta in self.router.stream(asked) for t in delta.token_ids]
            answers = {weights: fake_output(prompt, num_tokens, weights=weights) for weights in self.weights}
            assert heard in answers.values()
            self.seen.update(weights for weights, answer in answers.items() if answer == heard)
            self.num_done += 1
            self.progress.set()

    async def until_done(self, number: int) -> None:
        """Wait until `number` more requests have ended."""
        goal = self.num_done + number
        while self.num_done < goal:
            self.progress.clear()
            await self.progress.wait()

    async def until_each_decodes(self) -> None:
        """Wait until every decode worker has a sequence that lasts."""

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


def counted(router: Router, name: str) -> float:
    lines = router.metrics().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def num_failed_handoffs(launcher: FakeLauncher) -> int:
    """Count them over all workers that ever were."""
    return sum(process.service._load.num_handoffs_failed for process in launcher.processes.values())


def check_nothing_was_resumed(world: World, users: Users) -> None:
    assert counted(users.router, "diptych_request_resumes_total") == 0
    assert num_failed_handoffs(world.launcher) == 0
    outcomes = [line for line in users.router.metrics().decode().splitlines() if "diptych_requests_total{" in line]
    assert all("stop" in line or "length" in line for line in outcomes), outcomes
