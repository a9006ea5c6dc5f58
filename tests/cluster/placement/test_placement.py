"""What a handle learns of an actor's end; actors are called in place, Ray itself is in tests/e2e."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.common.handles import SettingsGeneration
from diptych.cluster.control import supervisor, worker_watch
from diptych.cluster.control.supervisor import Supervisor
from diptych.cluster.placement import placement
from diptych.cluster.placement.place import Place
from diptych.cluster.placement.placement import RayLauncher, SupervisorActor, WorkerActor, _PlacedWorker
from diptych.cluster.placement.supervisor_name import Refused
from diptych.workers.common.errors import DiptychError, PeerLost
from diptych.workers.common.tls import TlsFiles

from ...support.supervised import TOKEN, FakeLauncher, World, is_ready, supervising


class InPlace:
    """ray.remote(cls): the actor's methods run in this process."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **_: object) -> "InPlace":
        return self

    def remote(self, *args: Any) -> Any:
        actor = self._cls(*args)
        return SimpleNamespace(run_until_stopped=SimpleNamespace(remote=actor.run_until_stopped))


GROUP = SimpleNamespace(bundle_count=1)
UNKNOWN = "diptych:mine:worker:mixed-7"


class EndedWorker(WorkerActor):
    """Its process has served, and ended for a reason."""

    def __init__(self, *_: object) -> None:
        ended: Future[DiptychError] = Future()
        ended.set_result(PeerLost("rank 1 of 2 lost another rank"))
        self._process, self._end = SimpleNamespace(ended=ended), None


async def test_the_reason_of_a_workers_end_keeps_its_type_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this the supervisor distinguishes a repeated report of a loss from a new loss."""
    monkeypatch.setattr(placement, "WorkerActor", EndedWorker)
    monkeypatch.setattr(placement.ray, "remote", InPlace)
    monkeypatch.setattr(Place, "take", lambda _: GROUP)

    deployment = Deployment(build({"model": "m", "pools": {"prefill": {}, "decode": {}}}), "secret", is_local=True)

    async def main() -> DiptychError:
        handle = await RayLauncher(deployment).worker("decode-0", "decode", SettingsGeneration(0, deployment.config))
        return await handle.wait()

    reason = await main()
    assert type(reason) is PeerLost
    assert reason.message == "rank 1 of 2 lost another rank"


async def test_a_worker_whose_start_is_cancelled_while_the_gcs_is_away_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would know of it."""
    is_back, asked, killed = threading.Event(), asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def take(place: Place) -> SimpleNamespace:
        loop.call_soon_threadsafe(asked.set)
        is_back.wait()
        return GROUP

    async def kill(worker: _PlacedWorker) -> None:
        killed.append(worker._place.group)

    monkeypatch.setattr(placement, "WorkerActor", EndedWorker)
    monkeypatch.setattr(placement.ray, "remote", InPlace)
    monkeypatch.setattr(Place, "take", take)
    monkeypatch.setattr(_PlacedWorker, "kill", kill)
    config = build({"model": "m", "pools": {"decode": {}}})
    launcher = RayLauncher(Deployment(config, "secret", is_local=True))
    starting = asyncio.create_task(launcher.worker("decode-3", "decode", SettingsGeneration(0, config)))
    await asked.wait()
    starting.cancel()
    await asyncio.sleep(0)
    is_back.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert killed == ["diptych:default:worker:decode-3"]


class ActorOf(SupervisorActor):
    """The process of this supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor


async def test_a_machine_is_drained_by_a_supervisor_that_has_just_started() -> None:
    """Who drains a machine ends it once nobody is there, which a supervisor knows only after it has taken over."""
    async with supervising(mixed={"replicas": 2}) as world:
        await world.until(is_ready)
        successor = World(world.launcher, {"pools": {"mixed": {"replicas": 2}}})
        try:
            drained = await ActorOf(successor.supervisor).drain_node("here", "ann@host")
            assert sorted(drained) == ["mixed-1", "mixed-2"]
            assert {w.phase for w in successor.supervisor.status().workers} == {"draining"}
        finally:
            await successor.leave(end=False)


async def test_a_supervisor_without_a_valid_certificate_ends_no_worker_and_does_not_say_that_none_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where it has expired, or the clock is off: workers serve on by the connections that they have, and routers by
    their last view."""
    monkeypatch.setattr(supervisor, "ADOPT_S", 0.1)
    config = build({"model": "fake", "pools": {"mixed": {"replicas": 2}}})
    async with supervising(mixed={"replicas": 2}) as world:
        await world.until(is_ready)
        successor = Supervisor(config, world.launcher, TOKEN, TlsFiles("a", "b", "c"))
        tasks = [asyncio.create_task(life) for life in (successor.run(), successor.watch_fleet(0))]
        actor = ActorOf(successor)
        for refused in (await actor.drain_node("here", "a"), await actor.upgrade(config.model_dump_json(), True, "a")):
            assert isinstance(refused, Refused)
            assert "cannot call its workers" in refused.message
        assert not any(process.is_dead for process in world.launcher.processes.values())
        assert not any(task.done() for task in tasks), "routers are told nothing"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await successor._routers.stop()


async def test_an_upgrade_by_a_supervisor_that_has_just_started_waits_for_no_worker_without_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.01)
    monkeypatch.setattr(supervisor, "ADOPT_S", 1.0)
    pools = {"mixed": {"replicas": 2}}
    async with supervising(FakeLauncher(num_places=1), **pools) as world:
        await world.until(lambda s: s.pools[2].num_ready == 1 and any(w.waiting_for for w in s.workers))
        successor = World(world.launcher, {"pools": pools})
        try:
            after = build({"model": "fake-7", "served_model_name": "fake", "pools": pools})
            assert await ActorOf(successor.supervisor).upgrade(after.model_dump_json(), True, "ann@host") is None
            assert successor.supervisor._upgrades.lacked == {"mixed": 1}
        finally:
            await successor.leave(end=False)


async def test_a_supervisor_ends_with_what_it_has_not_taken_over_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()
    config = build({"model": "m", "name": "mine"})
    launcher = RayLauncher(Deployment(config, "secret", is_local=False))
    monkeypatch.setattr(placement, "placement_group_table", lambda: {"1": {"name": UNKNOWN, "state": "CREATED"}})
    monkeypatch.setattr(placement, "give_back", ended.append)
    monkeypatch.setattr(launcher, "forget", lambda: None)
    async with supervising(mixed={"replicas": 1}) as world:
        await world.until(is_ready)
        actor = ActorOf(world.supervisor)
        actor._launcher, actor._loop = launcher, world._task
        await actor.shutdown("ann@host")
        assert ended == [UNKNOWN]
        assert all(process.is_dead for process in world.launcher.processes.values())
