"""Routers that are kept: started, and started again when they are lost."""

import pytest

from diptych.cluster.common.handles import RouterStarted
from diptych.cluster.control import worker_watch
from diptych.cluster.control.status import StartFailure
from diptych.workers.common.errors import CheckpointError, DiptychError, InternalError, WorkerLost

from ...support.supervised import FakeLauncher, FakeRouter, is_ready, supervising


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("no tokenizer"), "no tokenizer"),
        (InternalError("a bug"), "router-1: a bug"),  # an internal error names the router where it happened
    ],
)
async def test_a_router_that_fails_while_starting_ends_the_start(error: DiptychError, message: str) -> None:
    async with supervising(FakeLauncher(router_errors=[error]), mixed={"replicas": 1}) as world:
        status = await world.until(lambda s: s.failure is not None)
        assert status.failure == StartFailure(type(error).__name__, message)
        assert status.state == "failed"
        assert len(world.launcher.routers) == 1


async def test_a_router_that_is_lost_while_starting_is_counted() -> None:
    async with supervising(
        FakeLauncher(router_errors=[WorkerLost("killed"), WorkerLost("killed again")]), mixed={"replicas": 1}
    ) as world:
        status = await world.until(lambda s: any(r.num_failures == 2 for r in s.routers))
        assert (status.failure, status.routers[0].last_error) == (None, "killed again")
        status = await world.until(is_ready)
        assert status.routers[0].num_failures == 0


async def test_a_lost_router_is_started_again() -> None:
    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        world.launcher.routers[0].death.set_result(WorkerLost("SIGKILL"))
        status = await world.until(lambda s: bool(s.routers[0].last_error) and is_ready(s))
        assert status.routers[0].last_error == "SIGKILL"
        first, second = world.launcher.routers
        assert first.before is None
        assert second.before == await first.start()


async def test_a_router_whose_start_raises_what_nobody_foresaw_is_started_again() -> None:
    class Failing(FakeLauncher):
        async def router(self, router_id: str, before: RouterStarted | None) -> FakeRouter:
            if not self.num_refused:
                self.num_refused += 1
                raise RuntimeError("Ray lost its connection")
            return await super().router(router_id, before)

        num_refused = 0

    async with supervising(Failing(), mixed={"replicas": 1}) as world:
        status = await world.until(is_ready)
        assert "Ray lost its connection" in status.routers[0].last_error
        assert len(world.launcher.routers) == 1


async def test_a_router_that_hangs_is_replaced_where_it_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "TICK_S", 0.01)

    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        world.launcher.routers[0].is_stopped = True
        status = await world.until(lambda s: bool(s.routers[0].last_error) and is_ready(s))
        assert "it did not answer for" in status.routers[0].last_error
        first, second = world.launcher.routers
        assert first.is_killed and second.before == await second.start()
