"""A worker whose ranks are on several machines: its actors, their order and their end. Ray is a list of what it was
asked; actors are called in place."""

import os
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.common.handles import SettingsGeneration, WorkerStarted
from diptych.cluster.placement import placement, worker_actor
from diptych.cluster.placement.place import Place
from diptych.cluster.placement.placement import RayLauncher
from diptych.cluster.placement.supervisor_name import Refused
from diptych.cluster.placement.worker_actor import RankHostActor, RankHostStarted, WorkerActor
from diptych.workers.common.errors import ConfigError, RankLost, WorkerLost
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server import rank_host, worker

SPREAD = {"tensor_parallel": 4, "machines_per_worker": 2, "num_cpus": 6.0, "resources": {"fast_disk": 1.0}}


def deployment(**pool: object) -> Deployment:
    config = build({"model": "m", "trusted_network": True, "pools": {"prefill": {}, "decode": SPREAD | pool}})
    return Deployment(config, "secret", is_local=False)


class ListedRay:
    """Stands for `ray` in placement.py: actors by name, with where they are and what they were given."""

    def __init__(self, num_bundles: int) -> None:
        self.group = SimpleNamespace(bundle_count=num_bundles)
        self.made: dict[str, SimpleNamespace] = {}
        self.events: list[str] = []

    def remote(self, cls: type) -> SimpleNamespace:
        def options(name: str, **given: Any) -> SimpleNamespace:
            def make(*args: object) -> SimpleNamespace:
                return self.made.setdefault(name, self._actor(name, SimpleNamespace(cls=cls, args=args, **given)))

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def _actor(self, name: str, given: SimpleNamespace) -> SimpleNamespace:
        async def stop() -> None:
            self.events.append(f"stop {name}")

        return SimpleNamespace(name=name, given=given, stop=SimpleNamespace(remote=stop))

    def kill(self, actor: SimpleNamespace, *, no_restart: bool) -> None:
        assert no_restart
        self.events.append(f"kill {actor.name}")


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> ListedRay:
    ray = ListedRay(num_bundles=2)
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", lambda _, index: index)
    monkeypatch.setattr(Place, "take", lambda _: ray.group)
    return ray


WORKER, HOST = "diptych:default:worker:decode-1", "diptych:default:ranks:decode-1.1"


async def test_each_other_machine_has_a_rank_host_before_the_worker_starts(listed: ListedRay) -> None:
    found = deployment()
    await RayLauncher(found).worker("decode-1", "decode", SettingsGeneration(3, found.config))
    assert list(listed.made) == [HOST, WORKER]
    for name, index, cls in ((WORKER, 0, WorkerActor), (HOST, 1, RankHostActor)):
        given = listed.made[name].given
        assert (given.cls, given.scheduling_strategy) == (cls, index)
        assert (given.num_cpus, given.num_gpus, given.resources) == (3, 0, {"fast_disk": 0.5}), "an equal part"
        assert (given.lifetime, given.get_if_exists, given.max_restarts) == ("detached", True, 0)
    _, pool, worker_id, hosts = listed.made[WORKER].given.args
    assert (pool, worker_id, hosts) == ("decode", "decode-1", [listed.made[HOST]])


async def test_a_new_supervisor_finds_them_whatever_workers_shall_have_now(listed: ListedRay) -> None:
    found = deployment(tensor_parallel=1, machines_per_worker=1)
    await RayLauncher(found).worker("decode-1", "decode", SettingsGeneration(4, found.config))
    assert list(listed.made) == [HOST, WORKER], "the group has two bundles"
    listed.group.bundle_count = 1
    listed.made.clear()
    found = deployment()
    await RayLauncher(found).worker("decode-2", "decode", SettingsGeneration(4, found.config))
    assert [each.given.cls for each in listed.made.values()] == [WorkerActor]


async def test_other_workers_of_a_gang_have_their_bundles_for_themselves(listed: ListedRay) -> None:
    config = build({"model": "m", "pools": {"prefill": {}, "decode": {"data_parallel": 2}}})
    await RayLauncher(Deployment(config, "", False)).worker("decode-1.1", "decode", SettingsGeneration(0, config))
    assert {name: each.given.scheduling_strategy for name, each in listed.made.items()} == {f"{WORKER}.1": 1}


async def test_the_worker_is_stopped_before_its_rank_hosts(listed: ListedRay) -> None:
    found = deployment()
    handle = await RayLauncher(found).worker("decode-1", "decode", SettingsGeneration(0, found.config))
    await handle.kill()
    assert listed.events == [f"{verb} {name}" for verb in ("stop", "kill") for name in (WORKER, HOST)]


def test_rank_hosts_are_no_workers_and_end_with_the_group_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, lives = (WORKER, HOST), ("diptych:default:worker:decode-2", "diptych:default:ranks:decode-2.1")
    given_back: list[str] = []
    monkeypatch.setattr(placement, "list_named_actors", lambda: [HOST, *lives])
    groups = {i: {"name": name, "state": "CREATED"} for i, name in enumerate((gone[0], lives[0]))}
    monkeypatch.setattr(placement, "placement_group_table", lambda: groups)
    monkeypatch.setattr(placement, "give_back", given_back.append)
    assert RayLauncher(deployment()).existing() == [("decode-2", "decode")]
    assert given_back == [WORKER]


def host(start: Callable[[], Awaitable[object]]) -> SimpleNamespace:
    return SimpleNamespace(start=SimpleNamespace(remote=start))


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """Settings of the workers that were started, which serve at once."""
    found: list[WorkerConfig] = []

    class Process:
        def __init__(self, config: WorkerConfig) -> None:
            found.append(config)

        def start_in_thread(self) -> SimpleNamespace:
            return SimpleNamespace(address="10.0.0.1:4", incarnation="i", pid=7)

    monkeypatch.setattr(worker, "WorkerProcess", Process)
    monkeypatch.setattr(worker_actor, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(worker_actor.platform, "node", lambda: "here")
    monkeypatch.setattr(worker_actor, "configure_logs", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


async def test_the_worker_asks_rank_hosts_for_their_addresses(configs: list[WorkerConfig]) -> None:
    async def start() -> RankHostStarted:
        return RankHostStarted("10.0.0.2:5", "there")

    actor = WorkerActor(deployment(), "decode", "decode-1", [host(start)])
    started = await actor.start()
    assert isinstance(started, WorkerStarted) and started.nodes == ("here", "there")
    assert configs[0].parallel.rank_hosts == ("10.0.0.2:5",)
    assert (configs[0].threads, os.environ["OMP_NUM_THREADS"]) == (6, "3"), "of all machines, and of this one"
    assert await actor.start() is started and len(configs) == 1


async def test_what_keeps_a_rank_host_from_starting_is_why_the_worker_does_not(configs: list[WorkerConfig]) -> None:
    async def refuse() -> Refused:
        return Refused.because(ConfigError("no port is free"), "there")

    async def die() -> Refused:
        raise ActorDiedError

    refused = await WorkerActor(deployment(), "decode", "decode-1", [host(refuse)]).start()
    assert refused == Refused(ConfigError.__name__, "no port is free (on there)")
    lost = await WorkerActor(deployment(), "decode", "decode-1", [host(die)]).start()
    assert isinstance(lost, Refused) and lost.error == WorkerLost.__name__
    assert lost.message.startswith("the process of a rank host ended: ")
    assert not configs


@pytest.mark.usefixtures("configs")
async def test_a_rank_host_listens_on_its_machines_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Host:
        def __init__(self, *args: object) -> None:
            asked.append(args)

        def start_in_thread(self) -> str:
            if len(asked) > 1:
                raise RankLost("it does not listen")
            return "10.0.0.1:9"

        def stop(self) -> None:
            asked.append("stop")

    monkeypatch.setattr(rank_host, "RankHost", Host)
    actor = RankHostActor(deployment(), "decode")
    assert await actor.start() == await actor.start() == RankHostStarted("10.0.0.1:9", "here")
    assert os.environ["OMP_NUM_THREADS"] == "3"
    await actor.stop()
    assert asked == [("10.0.0.1", 0, "secret", None), "stop"]
    assert await RankHostActor(deployment(), "decode").start() == Refused("RankLost", "it does not listen (on here)")
