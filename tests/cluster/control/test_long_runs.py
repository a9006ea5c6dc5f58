"""What a supervisor makes of failures and of a fleet that it finds, in a cluster that has run for days."""

import asyncio

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.control import plan, supervisor
from diptych.cluster.control.startup import losses
from diptych.cluster.control.supervisor import Supervisor
from diptych.workers.common.errors import CheckpointError, WorkerLost
from diptych.workers.common.tls import TlsFiles

from ...support.supervised import TOKEN, FakeLauncher, is_ready, supervising


async def test_a_worker_that_lives_ends_the_row_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails days later is the first of a row, and mended at once; its error is no news again."""
    launcher = FakeLauncher(errors=[WorkerLost("boom")] * 3)
    async with supervising(launcher, mixed={"replicas": 1}) as world:
        before = await world.until(lambda s: is_ready(s) and s.pools[2].num_failures == 3)
        monkeypatch.setattr(plan, "STABLE_S", 0.0)
        after = await world.until(lambda s: s.pools[2].num_failures == 0)
        assert after.pools[2].last_error.endswith("boom")
        assert losses(before, after) == []
        monkeypatch.setattr(plan, "STABLE_S", 1000.0)
        await launcher.processes["mixed-4"].die(WorkerLost("bang"))
        status = await world.until(lambda s: s.pools[2].last_error.endswith("bang"))
        assert (status.pools[2].num_failures, status.pools[2].retry_in_s) == (1, 0.0)
        assert losses(after, status) == ["mixed: lost mixed-4: bang"]


async def test_a_pool_that_the_autoscaler_changes_keeps_its_error_and_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a person who asks again does not want to wait."""
    launcher = FakeLauncher(errors=[None] + [WorkerLost("boom")] * 3)
    async with supervising(launcher, mixed={"replicas": 1, "min_replicas": 1, "max_replicas": 4}) as world:
        await world.until(is_ready)
        decided = {"mixed": 2}
        monkeypatch.setattr(world.supervisor._controller, "replicas", lambda *_: dict(decided))
        await world.until(lambda s: s.pools[2].num_failures == 3)
        decided["mixed"] = 1
        await world.until(lambda s: s.pools[2].target == 1)
        pool = world.supervisor.status().pools[2]
        assert (pool.num_failures, pool.last_error.rpartition(" ")[2]) == (3, "boom")


async def test_a_new_supervisor_without_a_valid_certificate_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it has expired, or the clock is off: workers serve on by the connections that they have, and routers by
    their last view."""
    monkeypatch.setattr(supervisor, "ADOPT_S", 0.1)
    settings = {"pools": {"mixed": {"replicas": 2}}}
    async with supervising(mixed={"replicas": 2}) as world:
        await world.until(is_ready)
        successor = Supervisor(build({"model": "fake", **settings}), world.launcher, TOKEN, TlsFiles("a", "b", "c"))
        running = asyncio.create_task(successor.run())
        watching = asyncio.create_task(successor.watch_fleet(0))
        for _ in range(100):
            await asyncio.sleep(0.01)
            assert not any(process.is_dead for process in world.launcher.processes.values())
        assert not watching.done(), "routers are told nothing"
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
        await successor._routers.stop()


async def test_a_start_that_fails_after_all_was_lost_is_tried_again() -> None:
    """As after a power cut: Ray brings the supervisor back, and the folder with the checkpoint is not mounted yet."""
    launcher, pools = FakeLauncher(), {"mixed": {"replicas": 1}}
    async with supervising(launcher, **pools) as world:
        await world.until(lambda s: is_ready(s) and launcher.recall() is not None)
        await world.leave(end=False)
        await launcher.processes["mixed-1"].die(WorkerLost("SIGKILL"))
        launcher.processes.clear()
        launcher.errors = [CheckpointError("there is no such folder")]
        async with supervising(launcher, **pools) as successor:
            status = await successor.until(lambda s: bool(s.pools[2].num_failures) and (is_ready(s) or bool(s.failure)))
            assert (status.failure, status.state) == (None, "ready")
