"""What a supervisor makes of failures and of a fleet that it finds, in a cluster that has run for days."""

import pytest

from diptych.cluster.control import plan
from diptych.cluster.control.startup import losses
from diptych.workers.common.errors import CheckpointError, WorkerLost

from ...support.supervised import FakeLauncher, is_ready, supervising


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
