"""Upgrades by a real supervisor, router and workers in one process: other weights, the same, and ones that are wrong.

A token is made of what is read from KV, in which the weights are: KV of one model that another continues shows."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from diptych.cluster.cli.upgrade import describe
from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.common.config_file import build
from diptych.cluster.common.handles import SettingsGeneration, WorkerStarted
from diptych.cluster.control import autoscaler, supervisor, worker_record, worker_watch
from diptych.cluster.control.status import ClusterStatus
from diptych.cluster.upgrade import keeper
from diptych.cluster.upgrade.trial import try_worker
from diptych.workers.common.errors import CheckpointError, ConfigError, Unavailable, WorkerLost
from diptych.workers.core.sequence import SampledToken
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeRow

from ...support.supervised import FakeLauncher, World, is_ready, supervising
from ...support.users import ROOMY, STEP_S, check_nothing_was_resumed, counted, under_load

ONE_OF_EACH: dict[str, Any] = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def settings(model: str = "fake", **pools: Any) -> ClusterConfig:
    return build({"model": model, "pools": pools or ONE_OF_EACH})


def phase(status: ClusterStatus) -> str:
    return status.upgrade.phase if status.upgrade else ""


def workers(status: ClusterStatus) -> set[str | None]:
    return {w.address for w in status.workers}


def has_two_and_one_waits(status: ClusterStatus) -> bool:
    return status.pools[2].num_ready == 2 and [bool(w.waiting_for) for w in status.workers].count(True) == 1


def is_over(status: ClusterStatus) -> bool:
    return phase(status) in ("done", "rolled back")


class Nonsense(FakeRunner):
    """Its weights are damaged: it computes no numbers."""

    def _sample(self, row: FakeRow) -> SampledToken:
        return SampledToken(row.sequence, 1, math.nan)


@dataclass
class Noting(FakeLauncher):
    runners: list[FakeRunner] = field(default_factory=list[FakeRunner])

    def _runner(self, settings: SettingsGeneration) -> FakeRunner:
        self.runners.append(super()._runner(settings))
        return self.runners[-1]


@dataclass
class Overwritten(FakeLauncher):
    """Other weights were copied over a checkpoint."""

    weights: int | None = None

    def _runner(self, settings: SettingsGeneration) -> FakeRunner:
        if self.weights is None:
            return super()._runner(settings)
        return type("OverwrittenRunner", (FakeRunner,), {"weights": self.weights})(num_blocks=self.num_blocks)


class OtherVocabulary(FakeRunner):
    def __init__(self, **given: Any) -> None:
        super().__init__(vocab_size=500, **given)


@pytest.mark.slow
async def test_other_weights_take_the_place_of_these_and_no_answer_is_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first decode worker that drains has a sequence to move: the new one serves only when each has one that lasts,
    and those last ten times as long until the next is tried."""
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}
    launcher, num_tried = Noting(step_s=STEP_S, num_blocks=ROOMY), 0
    async with supervising(launcher, **pools) as world:
        before = await world.until(is_ready)
        async with under_load(world) as users:
            await users.until_done(10)
            old = list(launcher.runners)

            async def try_then(worker: WorkerStarted, *rest: Any) -> None:
                nonlocal num_tried
                await try_worker(worker, *rest)
                num_tried += 1  # first the prefill worker
                if num_tried == 2:
                    await users.until_each_decodes()
                for runner in old:
                    runner.step_s = 10 * STEP_S if num_tried == 2 else STEP_S

            monkeypatch.setattr(keeper, "try_worker", try_then)
            users.weights.add(7)
            world.supervisor.upgrade(settings("fake-7", **pools), in_place=False)
            with pytest.raises(Unavailable, match="an upgrade runs"):
                world.supervisor.upgrade(settings("fake-8", **pools), in_place=False)
            after = await world.until(is_over)
            assert users.seen == {0, 7}
            users.seen.clear()
            await users.until_done(30)
        assert (phase(after), after.model) == ("done", "fake-7")
        assert len(after.workers) == 3 and not workers(before) & workers(after)
        assert {w.generation for w in after.workers} == {1}
        check_nothing_was_resumed(world, users)
        assert counted(users.router, "diptych_request_migrations_total") >= 1, "between workers of the same weights"


@pytest.mark.slow
async def test_the_same_model_is_started_again_and_its_sequences_move() -> None:
    async with supervising(FakeLauncher(step_s=STEP_S, num_blocks=ROOMY), **ONE_OF_EACH) as world:
        before = await world.until(is_ready)
        async with under_load(world) as users:
            await users.until_each_decodes()
            world.supervisor.upgrade(settings(), in_place=False)
            after = await world.until(is_over)
            await users.until_done(10)
        assert phase(after) == "done" and not workers(before) & workers(after)
        check_nothing_was_resumed(world, users)
        assert counted(users.router, "diptych_request_migrations_total") >= 1


async def test_in_place_no_worker_more_is_there_at_any_time() -> None:
    async with supervising(mixed={"replicas": 2}) as world:
        await world.until(is_ready)
        most = 0

        def look(status: ClusterStatus) -> bool:
            nonlocal most
            most = max(most, len(status.workers))
            return is_over(status)

        world.supervisor.upgrade(settings("fake-7", mixed={"replicas": 2}), in_place=True)
        after = await world.until(look)
        assert (phase(after), most) == ("done", 2)


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_pool_that_is_scaled_by_load_keeps_its_target(
    monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    monkeypatch.setattr(autoscaler, "LOOK_S", 0.0)
    pools = {"mixed": {"replicas": 2, "min_replicas": 2, "max_replicas": 4}}
    async with supervising(**pools) as world:
        await world.until(is_ready)
        seen: set[tuple[int, int]] = set()

        def look(status: ClusterStatus) -> bool:
            seen.add((status.pools[2].target, status.pools[2].num_ready))
            return is_over(status)

        world.supervisor.upgrade(settings("fake-7", **pools), in_place=in_place)
        assert phase(await world.until(look)) == "done"
        assert {target for target, _ in seen} == {2} and min(num_ready for _, num_ready in seen) >= 1
        assert world.launcher.kept in (None, {"prefill": 0, "decode": 0, "mixed": 2})


@pytest.mark.parametrize(
    ("runner", "reason"),
    [(Nonsense, "log-probabilities that are no numbers"), (OtherVocabulary, "vocab_size: 500, served: 1000")],
)
async def test_a_worker_that_fails_its_trial_ends_the_upgrade(runner: type[FakeRunner], reason: str) -> None:
    launcher = FakeLauncher()
    async with supervising(launcher, **ONE_OF_EACH) as world:
        before = await world.until(is_ready)
        launcher.runner = runner
        world.supervisor.upgrade(settings("fake-7"), in_place=False)
        after = await world.until(is_over)
        assert after.upgrade is not None
        assert after.upgrade.phase == "rolled back" and reason in after.upgrade.reason
        assert workers(after) == workers(before), "those that served do so still"
        assert after.model == "fake"
        assert {info.generation for info in (await world.fleet()).values()} == {0}


async def test_a_worker_that_does_not_start_ends_it_and_those_that_had_come_leave() -> None:
    launcher = FakeLauncher()
    async with supervising(launcher, **ONE_OF_EACH) as world:
        await world.until(is_ready)
        launcher.errors = [None, CheckpointError("a shard is missing")]
        world.supervisor.upgrade(settings("fake-7"), in_place=False)
        after = await world.until(is_over)
        assert after.upgrade is not None
        assert after.upgrade.reason.endswith("a shard is missing")
        assert {w.generation for w in after.workers} == {0}
        assert (await world.until(is_ready)).failure is None


async def test_a_loss_may_be_chance_once() -> None:
    launcher = FakeLauncher()
    async with supervising(launcher, mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        launcher.errors = [WorkerLost("its machine died")]
        world.supervisor.upgrade(settings("fake-7", mixed={"replicas": 1}), in_place=False)
        assert phase(await world.until(is_over)) == "done"
        launcher.errors = [WorkerLost("its machine died"), WorkerLost("its machine died")]
        world.supervisor.upgrade(settings("fake-8", mixed={"replicas": 1}), in_place=False)
        after = await world.until(is_over)
        assert (phase(after), after.model) == ("rolled back", "fake-7")


async def test_the_next_supervisor_goes_on_with_it() -> None:
    launcher = FakeLauncher()
    world = World(launcher, {"pools": ONE_OF_EACH})
    await world.until(is_ready)
    world.supervisor.upgrade(settings("fake-7"), in_place=False)
    await world.until(lambda status: status.upgrade is not None and status.upgrade.num_done >= 1)
    await world.leave(end=False)
    successor = World(launcher, {"pools": ONE_OF_EACH})
    after = await successor.until(is_over)
    assert (phase(after), after.model) == ("done", "fake-7")
    assert {w.generation for w in after.workers} == {1}
    assert launcher.used[-1].number == 1, "routers that start then have the new settings"
    await successor.leave(end=False)
    async with supervising(launcher, **ONE_OF_EACH) as third:
        status = await third.until(is_ready)
        assert (phase(status), status.model) == ("done", "fake-7")
        assert workers(status) == workers(after)


async def test_a_worker_that_no_supervisor_has_tried_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, is_tried = FakeLauncher(), asyncio.Event()

    async def hang(*_: object) -> None:
        is_tried.set()
        await asyncio.Event().wait()

    world = World(launcher, {"pools": ONE_OF_EACH})
    before = await world.until(is_ready)
    launcher.runner = Nonsense
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "try_worker", hang)
        world.supervisor.upgrade(settings("fake-7"), in_place=False)
        await is_tried.wait()
        await world.leave(end=False)  # before the trial has an answer
    async with supervising(launcher, **ONE_OF_EACH) as successor:
        after = await successor.until(is_over)
        assert after.upgrade is not None
        assert after.upgrade.phase == "rolled back" and "log-probabilities that are no numbers" in after.upgrade.reason
        assert workers(after) == workers(before)


async def test_old_workers_that_are_lost_with_their_supervisor_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ADOPT_S", 1.0)
    pools = {"mixed": {"replicas": 3}}
    launcher = FakeLauncher(errors=[None] * 3)
    world = World(launcher, {"pools": pools})
    await world.until(is_ready)
    world.supervisor.upgrade(settings("fake-7", **pools), in_place=False)
    await world.leave(end=False)
    for name in ("mixed-1", "mixed-2"):
        launcher.processes[name]._error = WorkerLost("its machine died, too")
    async with supervising(launcher, **pools) as successor:
        assert phase(await successor.until(is_over)) == "done"


async def test_another_upgrade_takes_the_place_of_one_that_does_not_come_back() -> None:
    launcher = FakeLauncher()
    async with supervising(launcher, **ONE_OF_EACH) as world:
        await world.until(is_ready)
        gone = [CheckpointError("the folder is gone")] * 100
        launcher.errors = [None, CheckpointError("a shard is missing"), *gone]
        world.supervisor.upgrade(settings("fake-7"), in_place=False)
        stuck = await world.until(lambda status: status.upgrade is not None and bool(status.upgrade.setback))
        assert stuck.upgrade is not None
        assert (stuck.upgrade.phase, stuck.upgrade.number) == ("rolling back", 1)
        assert "a shard is missing" in stuck.upgrade.reason and "the folder is gone" in stuck.upgrade.setback
        assert "a shard is missing; now" in describe(stuck.upgrade)
        launcher.errors = []
        world.supervisor.upgrade(settings("fake-8"), in_place=False)
        after = await world.until(is_over)
        assert after.upgrade is not None
        assert (after.upgrade.phase, after.upgrade.number, after.model) == ("done", 2, "fake-8")
        assert {w.generation for w in after.workers} == {2}


async def test_the_way_back_to_a_folder_with_other_weights_is_none() -> None:
    """Routers refuse workers of other weights than those of the same settings have: none of these leaves for them."""
    launcher, pools = Overwritten(), {"mixed": {"replicas": 2}}
    async with supervising(launcher, **pools) as world:
        await world.until(is_ready)
        launcher.weights = 9
        launcher.errors = [None, CheckpointError("a shard is missing")]
        world.supervisor.upgrade(settings(**pools), in_place=False)
        stuck = await world.until(lambda status: status.upgrade is not None and bool(status.upgrade.setback))
        assert stuck.upgrade is not None
        assert stuck.upgrade.phase == "rolling back"
        assert "another checkpoint was copied over this one. Put the old one back" in stuck.upgrade.setback
        assert sorted(info.generation for info in (await world.fleet()).values()) == [0, 1]
        launcher.weights = None
        world.supervisor.upgrade(settings("fake-9", **pools), in_place=False)
        assert phase(await world.until(is_over)) == "done"


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_pool_with_too_little_room_is_upgraded_and_goes_back(
    monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.01)
    launcher, pools = FakeLauncher(num_places=2), {"mixed": {"replicas": 3}}
    async with supervising(launcher, **pools) as world:
        await world.until(has_two_and_one_waits)
        world.supervisor.upgrade(settings("fake-7", **pools), in_place=in_place)
        assert phase(await world.until(is_over)) == "done"
        after = await world.until(has_two_and_one_waits)
        assert {w.generation for w in after.workers} == {1}
        launcher.errors = [None, CheckpointError("a shard is missing")]
        world.supervisor.upgrade(settings("fake-8", **pools), in_place=in_place)
        assert phase(await world.until(is_over)) == "rolled back"
        assert {w.generation for w in (await world.until(has_two_and_one_waits)).workers} == {1}


async def test_settings_that_find_no_place_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor drains one worker for them, and no other."""
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.01)
    launcher, pools = FakeLauncher(), {"mixed": {"replicas": 2}}
    async with supervising(launcher, **pools) as world:
        await world.until(is_ready)
        launcher.num_places = 0
        world.supervisor.upgrade(settings("fake-7", **pools), in_place=False)
        await world.until(lambda status: len(status.workers) == 2 and any(w.waiting_for for w in status.workers))
        monkeypatch.setattr(worker_record, "PLACE_S", 0.0)
        launcher.num_places = 2
        after = await world.until(lambda status: is_over(status) and status.is_settled)
        assert after.upgrade is not None
        assert after.upgrade.phase == "rolled back" and {w.generation for w in after.workers} == {0}
        assert "for a node with CPU: 1: add a node, scale a pool down, or use --in-place" in after.upgrade.reason


async def test_what_an_upgrade_does_not_change_is_named() -> None:
    async with supervising(**ONE_OF_EACH) as world:
        await world.until(is_ready)
        with pytest.raises(ConfigError, match=r"and not router, pools.decode.replicas: leave that out"):
            other = {"model": "fake", "router": {"http_port": 1}, "pools": {"prefill": {}, "decode": {"replicas": 2}}}
            world.supervisor.upgrade(build(other), in_place=False)
        with pytest.raises(ConfigError, match="clients call the model 'fake'"):
            named = {"model": "fake-7", "served_model_name": "another", "pools": ONE_OF_EACH}
            world.supervisor.upgrade(build(named), in_place=False)
        assert world.supervisor.status().upgrade is None
