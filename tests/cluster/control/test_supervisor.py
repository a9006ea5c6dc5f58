"""The supervisor's decisions over workers, routers and pools."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import first_worker_ids, make_router_id
from diptych.cluster.control import supervisor, worker_watch
from diptych.cluster.control.status import StartFailure
from diptych.cluster.control.worker_control import WorkerControl
from diptych.workers.common.errors import CheckpointError, ConfigError, InternalError, WorkerLost
from diptych.workers.testing.fake_runner import fake_output

from ...support.supervised import TIMEOUT_S, TOKEN, FakeLauncher, World, generate, is_ready, supervising

NONE = {"replicas": 0}
ONE_OF_EACH = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


async def test_the_fleet_comes_up_and_routers_hear_of_it() -> None:
    async with supervising(**ONE_OF_EACH) as world:
        status = await world.until(is_ready)
        assert [(p.name, p.num_ready) for p in status.pools if p.target] == [("prefill", 1), ("decode", 1)]
        infos = (await world.fleet()).values()
        assert sorted((i.role, i.pool) for i in infos) == [("decode", "decode"), ("prefill", "prefill")]
        assert {i.address for i in infos} == {w.address for w in status.workers}


async def test_a_new_cluster_gives_the_names_that_its_processes_were_started_under() -> None:
    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 1}, "mixed": {"replicas": 1, "data_parallel": 2}}
    async with supervising(**pools) as world:
        status = await world.until(is_ready)
        expected = first_worker_ids(build({"model": "fake", "pools": pools}).pools)
        assert sorted((w.worker_id, w.pool) for w in status.workers) == sorted(expected)
        assert [r.router_id for r in status.routers] == [make_router_id(0)]


async def test_a_worker_that_died_is_replaced_at_once() -> None:
    async with supervising(**ONE_OF_EACH) as world:
        await world.until(is_ready)
        before = await world.fleet()
        await world.launcher.processes["prefill-1"].die(WorkerLost("SIGKILL"))
        status = await world.until(lambda s: is_ready(s) and "SIGKILL" in s.pools[0].last_error)
        after = await world.fleet()
        assert len(after) == 2
        assert len(set(before) & set(after)) == 1
        assert status.pools[0].last_error == "prefill-1: SIGKILL"
        assert world.launcher.num_started == 3


async def test_a_start_that_fails_by_its_settings_is_final_before_the_cluster_was_ready() -> None:
    launcher = FakeLauncher(errors=[CheckpointError("a shard is missing")])

    async with supervising(launcher, mixed={"replicas": 1}) as world:
        status = await world.until(lambda s: s.failure is not None)
        assert status.state == "failed"
        assert status.failure is not None
        assert (status.failure.error, status.failure.message) == ("CheckpointError", "a shard is missing")
        assert world.launcher.num_started == 1


async def test_a_supervisor_that_fails_before_the_cluster_was_ready_tells_the_start() -> None:
    async with supervising(mixed={"replicas": 1}) as world:
        first, second = InternalError("a bug"), InternalError("its echo")
        assert world.supervisor.note_failure("the supervisor", first)
        assert world.supervisor.note_failure("the supervisor", second)
        assert world.supervisor.status().failure == StartFailure("InternalError", "the supervisor: a bug")


async def test_a_failure_after_the_cluster_was_ready_ends_nothing() -> None:
    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        await world.until(lambda s: s.state == "ready")
        world.launcher.routers[0].death.set_result(CheckpointError("the disk is gone"))
        status = await world.until(lambda s: bool(s.routers[0].last_error) and is_ready(s))
        assert status.failure is None


async def test_a_crash_loop_backs_off_and_shows_its_error() -> None:
    launcher = FakeLauncher(errors=[WorkerLost("boom"), WorkerLost("boom"), WorkerLost("bang")])

    async with supervising(launcher, mixed={"replicas": 1}) as world:
        status = await world.until(lambda s: s.pools[2].num_failures == 3)
        assert status.pools[2].retry_in_s > 0
        assert status.pools[2].last_error.endswith("bang")
        status = await world.until(is_ready)
        assert world.launcher.num_started == 4


async def test_scaling_up_and_down_keeps_those_that_stay() -> None:
    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        first = set(await world.fleet())
        world.supervisor.scale({"mixed": 3})
        await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 3)
        assert first < set(await world.fleet())
        world.supervisor.scale({"mixed": 1})
        await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 1)
        assert len(await world.fleet()) == 1
        assert world.launcher.kept == {"prefill": 0, "decode": 0, "mixed": 1}


async def test_the_idle_worker_leaves_and_the_busy_one_stays() -> None:
    async with supervising(FakeLauncher(step_s=0.1), mixed={"replicas": 2}) as world:
        status = await world.until(is_ready)
        busy = status.workers[0]
        assert busy.address
        tokens = generate(busy.address, [3, 4], max_tokens=20)
        answer = [await anext(tokens)]
        while not any(w.num_running for w in world.supervisor.status().workers):
            answer.append(await anext(tokens))
        world.supervisor.scale({"mixed": 1})
        after = await world.until(lambda s: s.is_settled)
        assert [w.worker_id for w in after.workers] == [busy.worker_id]
        answer += [token async for token in tokens]
        assert answer == fake_output([3, 4], 20)


async def test_a_drained_worker_stays_in_the_fleet_until_it_is_done() -> None:
    async with supervising(
        FakeLauncher(step_s=0.1), prefill={"replicas": 1, "chunk_tokens": 8}, decode={"replicas": 1}
    ) as world:
        status = await world.until(is_ready)
        worker = next(w for w in status.workers if w.pool == "prefill")
        assert worker.address
        tokens = generate(worker.address, [3, 4], max_tokens=8)
        answer = [await anext(tokens)]
        world.supervisor.scale({"prefill": 0})
        await world.until(lambda s: s.pools[0].num_draining == 1)
        assert worker.address in {info.address for info in (await world.fleet()).values()}
        answer += [token async for token in tokens]
        assert answer == fake_output([3, 4], 8)
        await world.until(lambda s: s.is_settled)
        assert worker.address not in {info.address for info in (await world.fleet()).values()}


async def test_the_workers_of_a_machine_that_leaves_drain_and_are_replaced() -> None:
    async with supervising(FakeLauncher(step_s=0.1), mixed={"replicas": 2}) as world:
        status = await world.until(is_ready)
        before, address = set(await world.fleet()), status.workers[0].address
        assert address
        tokens = generate(address, [3, 4], max_tokens=8)
        answer = [await anext(tokens)]
        assert world.supervisor.drain_node("elsewhere") == []
        assert set(world.supervisor.drain_node("here")) == {w.worker_id for w in status.workers}
        assert {w.phase for w in world.supervisor.status().workers} == {"draining"}
        answer += [token async for token in tokens]
        assert answer == fake_output([3, 4], 8)
        await world.until(lambda s: s.is_settled)
        after = set(await world.fleet())
        assert len(after) == 2
        assert not before & after


async def test_a_worker_leaves_with_any_of_the_machines_that_its_ranks_are_on() -> None:
    nodes = {"mixed-1": ("there", "away"), "mixed-2": ("elsewhere",)}
    async with supervising(FakeLauncher(rank_host_nodes=nodes), mixed={"replicas": 2}) as world:
        await world.until(is_ready)
        assert world.supervisor.drain_node("away") == ["mixed-1"]
        status = await world.until(lambda s: s.is_settled and s.state == "ready")
        assert {w.worker_id: w.rank_host_nodes for w in status.workers} == {"mixed-2": ("elsewhere",), "mixed-3": ()}


async def test_a_worker_changes_its_pool_without_a_restart() -> None:
    async with supervising(prefill={"replicas": 2}, decode={"replicas": 1}) as world:
        await world.until(is_ready)
        before = await world.fleet()
        world.supervisor.scale({"prefill": 1, "decode": 2})
        await world.until(lambda s: s.is_settled and s.pools[1].num_ready == 2)
        after = await world.fleet()
        assert set(after) == set(before)
        assert sorted(info.role for info in after.values()) == ["decode", "decode", "prefill"]
        while sorted(w.role for w in world.supervisor.status().workers) != ["decode", "decode", "prefill"]:
            await asyncio.sleep(0.01)  # until the workers themselves have reported it


async def test_a_new_supervisor_takes_over_what_lives() -> None:
    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        world.supervisor.scale({"mixed": 2})
        await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 2)
        before = await world.fleet()
        old_version, _ = await world.supervisor.watch_fleet(0)
        successor = World(world.launcher, {"pools": {"mixed": {"replicas": 1}}})
        try:
            version, infos = await successor.supervisor.watch_fleet(old_version)
            assert version > old_version
            assert {info.incarnation for info in infos} == set(before)
            await successor.until(lambda s: s.is_settled and s.pools[2].num_ready == 2)
            assert world.launcher.num_started == 2
        finally:
            await successor.leave(end=False)


async def test_a_new_supervisor_does_not_wait_for_what_cannot_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor sends routers the workers that answer, plans, and reports what the other one waits for."""
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.01)
    monkeypatch.setattr(supervisor, "ADOPT_S", 1.0)

    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        await world.leave(end=False)
        world.launcher.kept = {"prefill": 0, "decode": 0, "mixed": 3}
        unplaced = await world.launcher.worker("mixed-2", "mixed")
        unplaced.waits_for = "a node with GPU: 1"
        successor = World(world.launcher, {"pools": {"mixed": {"replicas": 1}}})
        try:
            assert {i.address for i in (await successor.fleet()).values()} == {
                w.address for w in world.supervisor.status().workers
            }
            status = await successor.until(lambda s: s.pools[2].num_ready == 2)
            waiting = {w.worker_id: w.waiting_for for w in status.workers}
            assert waiting == {"mixed-1": "", "mixed-2": "a node with GPU: 1", "mixed-3": ""}
        finally:
            await successor.leave()


async def test_a_new_supervisor_goes_on_draining_what_the_last_one_drained() -> None:
    """Such a worker takes nothing any more: it counts for nothing, and the other one stays."""

    async with supervising(FakeLauncher(step_s=0.02), mixed={"replicas": 2}) as world:
        await world.until(is_ready)
        status = await world.until(lambda s: s.pools[2].num_ready == 2)
        first, second = sorted(status.workers, key=lambda w: w.worker_id)
        assert first.address and second.address
        tokens = generate(second.address, [3, 4], max_tokens=100)
        await anext(tokens)  # it cannot end before its successor is there, and is the busier one
        await world.leave(end=False)
        control = await WorkerControl.open(second.address, TOKEN)
        await control.drain()
        while not control.load.draining:
            await asyncio.sleep(0.01)
        await control.close()
        world.launcher.kept = {"prefill": 0, "decode": 0, "mixed": 1}
        successor = World(world.launcher, {"pools": {"mixed": {"replicas": 2}}})
        try:
            while [token async for token in tokens]:
                pass
            status = await successor.until(lambda s: s.is_settled and len(s.workers) == 1)
            assert [w.worker_id for w in status.workers] == [first.worker_id]
        finally:
            await successor.leave()


async def test_a_worker_that_hangs_when_it_is_taken_over_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.01)
    monkeypatch.setattr(supervisor, "ADOPT_S", 1.0)
    launcher = FakeLauncher()

    async def test(world: World) -> None:
        status = await world.until(lambda s: is_ready(s) and bool(s.pools[2].last_error))
        assert "it did not answer during its start" in status.pools[2].last_error
        assert [w.worker_id for w in status.workers] == ["mixed-2"]
        assert world.launcher.processes["mixed-1"].is_dead

    (await launcher.worker("mixed-1", "mixed")).is_stopped = True
    async with asyncio.timeout(TIMEOUT_S):
        world = World(launcher, {"pools": {"mixed": {"replicas": 1}}})
        try:
            await test(world)
        finally:
            await world.leave()


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ({"embed": 1}, "no pool 'embed'"),
        ({"decode": -1}, "between 0 and"),
        ({"decode": 0}, "both empty"),
        ({"mixed": 2}, "is scaled automatically between 0 and 3"),
    ],
)
async def test_targets_that_cannot_be_are_refused(replicas: dict[str, int], expected: str) -> None:
    async with supervising(
        decode={"replicas": 1}, mixed={"replicas": 0, "min_replicas": 0, "max_replicas": 3}
    ) as world:
        with pytest.raises(ConfigError, match=expected):
            world.supervisor.scale(replicas)


async def test_a_budget_moves_from_one_extreme_to_the_other_and_back_while_requests_run() -> None:
    """Each is told in reports, and changes no token of what runs."""
    async with supervising(FakeLauncher(step_s=0.002), mixed={"replicas": 1}, prefill=NONE, decode=NONE) as world:
        await world.until(is_ready)
        [worker] = world.supervisor._workers.values()
        [info] = (await world.fleet()).values()
        prompts = [[i + 1] * (20 + i) for i in range(4)]
        answers = [asyncio.create_task(read_all(generate(info.address, prompt, 200))) for prompt in prompts]
        async with asyncio.timeout(TIMEOUT_S):
            while worker.load.num_decoding < len(prompts):
                await asyncio.sleep(0.001)
            most = worker.load.step_tokens
            for budget in (most, 0, most, 1, 0, most - 1):
                worker.prefill_budget = budget
                worker.keep_budget()
                assert world.supervisor.status().workers[0].target_prefill_budget == budget
                while worker.load.prefill_budget != budget:
                    await asyncio.sleep(0.001)
            assert [await answer for answer in answers] == [fake_output(prompt, 200) for prompt in prompts]


async def read_all(tokens: AsyncIterator[int]) -> list[int]:
    return [token async for token in tokens]


async def test_a_pool_goes_to_zero_and_a_request_that_waits_brings_a_worker_back() -> None:
    pool = {"replicas": 1, "min_replicas": 0, "max_replicas": 1, "scale_to_zero_after_s": 0.3}
    async with supervising(decode=pool, prefill=NONE) as world:
        first = await world.until(is_ready)
        assert first.pools[1].start_s is not None, "the start was measured"
        await world.until(lambda status: status.is_settled and not status.workers)
        assert await world.fleet() == {}
        assert world.supervisor.report("router-0", 0).ready_in_s is None
        world.supervisor.report("router-0", 2)
        await world.until(lambda status: status.is_settled and status.pools[1].num_ready == 1)
        [info] = (await world.fleet()).values()
        assert await read_all(generate(info.address, [1, 2, 3], 4)) == fake_output([1, 2, 3], 4)
        newest = world.supervisor.status().decisions[0]
        assert (newest.subject, newest.action) == ("decode", "0 -> 1 workers")
        assert newest.reason.startswith("2 requests and no worker: a start of the pool takes up to ")


async def test_a_new_supervisor_wakes_a_pool_that_an_earlier_one_has_emptied() -> None:
    pool = {"replicas": 1, "min_replicas": 0, "max_replicas": 1, "scale_to_zero_after_s": 0.3}
    launcher = FakeLauncher()
    async with supervising(launcher, decode=pool, prefill=NONE) as world:
        await world.until(is_ready)
        await world.until(lambda status: status.is_settled and not status.workers)
        await world.leave(end=False)
        async with supervising(launcher, decode=pool, prefill=NONE) as successor:
            await successor.until(is_ready)
            assert await successor.fleet() == {}, "it keeps the target"
            successor.supervisor.report("router-0", 1)
            await successor.until(lambda status: status.is_settled and status.pools[1].num_ready == 1)


async def test_a_new_supervisor_takes_over_the_budgets_that_workers_report() -> None:
    settings = {"dial": True, "pools": {"mixed": {"replicas": 2}, "prefill": NONE, "decode": NONE}}
    launcher = FakeLauncher()
    first = World(launcher, settings)
    await first.until(is_ready)
    moved, other = first.supervisor._workers.values()
    moved.prefill_budget = 100
    moved.keep_budget()
    await first.until(lambda status: status.workers[0].prefill_budget == 100)
    usual = other.load.prefill_budget
    await first.leave(end=False)
    successor = World(launcher, settings)
    status = await successor.until(is_ready)
    budgets = [(w.worker_id, w.prefill_budget, w.target_prefill_budget) for w in status.workers]
    assert budgets == [(moved.worker_id, 100, 100), (other.worker_id, usual, usual)]
    await successor.leave()
    await first.supervisor.stop()
