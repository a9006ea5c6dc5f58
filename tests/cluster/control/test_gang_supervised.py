"""Gangs as the supervisor keeps them: counted as one, scaled, lost, taken over and blamed as a whole."""

import pytest

from diptych.cluster.control import worker_watch
from diptych.cluster.control.plan import Phase
from diptych.cluster.control.status import StartFailure
from diptych.cluster.control.worker_record import newest_reports
from diptych.workers.common.errors import CheckpointError, PeerLost, RankLost, WorkerLost
from diptych.workers.testing.fake_runner import fake_output

from ...support.supervised import TIMEOUT_S, FakeLauncher, World, generate, is_ready, supervising

ECHO = "worker 1 of the 2 that share experts ended: all of them end with it, to be started again"
MIXED = {"mixed": {"replicas": 1, "data_parallel": 2}}


async def test_a_gang_counts_as_one_and_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "LAST_WORDS_S", 0.0)

    async with supervising(prefill={"replicas": 1}, decode={"replicas": 1, "data_parallel": 2}) as world:
        status = await world.until(is_ready)
        assert [w.worker_id for w in status.workers] == ["prefill-1", "decode-2.0", "decode-2.1"]
        assert (status.pools[1].target, status.pools[1].num_ready) == (1, 1)
        before = {info.address for info in (await world.fleet()).values()}
        await world.launcher.processes["decode-2.1"].die(WorkerLost("SIGKILL"))
        # The others leave while the new ones come.
        status = await world.until(lambda s: is_ready(s) and "decode-2.0" not in {w.worker_id for w in s.workers})
        assert sorted(w.worker_id for w in status.workers) == ["decode-3.0", "decode-3.1", "prefill-1"]
        assert status.pools[1].num_failures == 1
        assert status.pools[1].last_error == "decode-2.1: SIGKILL"
        assert len(before & {info.address for info in (await world.fleet()).values()}) == 1
        assert world.launcher.num_started == 5
        await world.until(lambda s: s.is_settled)
        assert world.launcher.processes["decode-2.0"].is_dead  # it was ended
        assert world.launcher.places == {"prefill-1", "decode-3"}


async def test_gangs_are_scaled_as_a_whole_and_leave_when_all_of_one_are_done() -> None:
    async with supervising(FakeLauncher(step_s=0.1), **MIXED) as world:
        await world.until(is_ready)
        world.supervisor.scale({"mixed": 2})
        status = await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 2)
        assert sorted(w.worker_id for w in status.workers) == ["mixed-1.0", "mixed-1.1", "mixed-2.0", "mixed-2.1"]
        [address] = [w.address for w in status.workers if w.worker_id == "mixed-1.1"]
        [other] = [w.address for w in status.workers if w.worker_id == "mixed-2.0"]
        assert address and other
        tokens, more = (generate(each, [3, 4], max_tokens=8) for each in (address, other))
        answer, rest = [await anext(tokens)], [await anext(more)]
        world.supervisor.scale({"mixed": 1})
        status = await world.until(lambda s: s.pools[2].num_draining == 1)
        draining = sorted(w.worker_id for w in status.workers if w.phase == "draining")
        assert draining in (["mixed-1.0", "mixed-1.1"], ["mixed-2.0", "mixed-2.1"])
        answer += [token async for token in tokens]
        rest += [token async for token in more]
        assert answer == rest == fake_output([3, 4], 8)
        status = await world.until(lambda s: s.is_settled)
        assert not set(draining) & {w.worker_id for w in status.workers} and len(status.workers) == 2


async def test_a_gang_of_which_a_member_starts_is_not_in_the_reports_yet() -> None:
    async with supervising(**MIXED) as world:
        await world.until(is_ready)
        workers = world.supervisor._workers
        assert [len(found) for found in newest_reports(workers.values()).values()] == [2]
        workers["mixed-1.1"].phase = Phase.STARTING
        assert newest_reports(workers.values()) == {}
        workers["mixed-1.1"].phase = Phase.READY


async def test_a_new_supervisor_takes_over_a_gang() -> None:
    async with supervising(**MIXED) as world:
        await world.until(is_ready)
        before = await world.fleet()
        successor = World(world.launcher, {"pools": MIXED})
        try:
            status = await successor.until(lambda s: s.is_settled and s.pools[2].num_ready == 1)
            assert [w.worker_id for w in status.workers] == ["mixed-1.0", "mixed-1.1"]
            assert set(before) == set(await successor.fleet())
            assert world.launcher.num_started == 2
        finally:
            await successor.leave(end=False)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_new_supervisor_ends_what_is_left_of_a_gang(rank: int) -> None:
    launcher = FakeLauncher()
    left = await launcher.worker(f"mixed-1.{rank}", "mixed")
    await left.start()
    world = World(launcher, {"pools": MIXED})
    try:
        status = await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 1)
        assert [w.worker_id for w in status.workers] == ["mixed-2.0", "mixed-2.1"]
        assert status.pools[2].num_failures == 0
        assert list(launcher.processes) == [f"mixed-1.{rank}", "mixed-2.0", "mixed-2.1"], "it was not completed"
        assert left.is_dead
        assert launcher.places == {"mixed-2"}
    finally:
        await world.leave()
    assert not launcher.places


async def test_a_cause_is_told_instead_of_its_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "LAST_WORDS_S", TIMEOUT_S)

    async with supervising(**MIXED) as world:
        await world.until(is_ready)
        first, second = (world.launcher.processes[f"mixed-1.{rank}"] for rank in (0, 1))
        await first.die(PeerLost(ECHO))
        await world.until(lambda s: s.pools[2].last_error == f"mixed-1.0: {ECHO}")
        assert not second.is_dead
        await second.die(RankLost("worker 1 failed in a step (a bug)"))
        status = await world.until(lambda s: is_ready(s) and "(a bug)" in s.pools[2].last_error)
        assert status.pools[2].last_error == "mixed-1.1: worker 1 failed in a step (a bug)"
        assert status.pools[2].num_failures == 1
        await world.until(lambda s: s.is_settled)
        assert world.launcher.places == {"mixed-2"}


async def test_an_echo_is_not_told_instead_of_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_watch, "LAST_WORDS_S", TIMEOUT_S)

    async with supervising(**MIXED) as world:
        await world.until(is_ready)
        first, second = (world.launcher.processes[f"mixed-1.{rank}"] for rank in (0, 1))
        await first.die(WorkerLost("out of memory"))
        await world.until(lambda s: bool(s.pools[2].last_error))
        await second.die(PeerLost(ECHO))
        status = await world.until(lambda s: s.is_settled)
        assert status.pools[2].last_error == "mixed-1.0: out of memory"
        assert f"lost mixed-1.1: {ECHO}" in caplog.messages


async def test_settings_that_one_of_a_gang_refuses_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "LAST_WORDS_S", TIMEOUT_S)

    async with supervising(
        FakeLauncher(errors=[PeerLost(ECHO), CheckpointError("a shard is missing")]), **MIXED
    ) as world:
        status = await world.until(lambda s: s.failure is not None)
        assert status.failure == StartFailure("CheckpointError", "a shard is missing")
