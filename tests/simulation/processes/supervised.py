"""The real supervisor in a simulated cluster: it starts, watches, drains and replaces workers and routers by a
Launcher (launcher.py), is killed and stopped as they are, and finds what its predecessor left.

Hosts appear with the workers that it asks for; each is drawn by a generator of its own.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.common.config_file import build
from diptych.cluster.common.demand import ControlReport
from diptych.cluster.common.deployment import first_worker_ids
from diptych.cluster.control.supervisor import Supervisor
from diptych.cluster.placement.fleet_watch import Report, Watch, follow, report_waiting
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.workers.common.errors import Unavailable, WorkerLost

from ..checks.supervised_checks import CALM_LIMIT_S, LIMIT_S, Checks
from ..faults.faults import Fault
from ..faults.supervised_faults import plan_supervised
from ..machines.hosts import Hosts
from ..machines.remote import Actor
from . import dials, sleeps
from .launcher import Fate, SimLauncher, SimRay, WorkerActor, host_of

if TYPE_CHECKING:
    from ..world import World
    from .routers import RouterProcess

NAME = "supervisor"  # on the network
SHARE = 0.25  # of all seeds
AGAIN_S = (0.2, 3.0)  # until Ray has started another one


def is_supervised(seed: int) -> bool:
    return random.Random(f"supervision of {seed}").random() < SHARE


@dataclass
class Said:
    """Record of what supervisors have announced, which binds their successors."""

    targets: dict[str, int]  # that were accepted last
    incarnations: set[str] = field(default_factory=set[str])  # of workers that routers heard of


class SupervisorActor(Actor):
    """Supervisor's process. Serves the calls of routers and persons."""

    supervisor: Supervisor  # since it is its world's

    def __init__(self, supervised: "Supervised", make: Callable[[], Supervisor]) -> None:
        world = supervised.world
        super().__init__(world.network, NAME)
        self._said = supervised.said
        self._world = world
        self._began = world.clock.now
        process = world.add_process(NAME)

        async def main() -> None:
            self.supervisor = make()
            supervised.checks.watch_starts(self.supervisor)
            supervised.actor = self
            try:
                await self.supervisor.run()
            except Exception as e:
                world.crash(f"the supervisor fails: {e!r}", e)

        process.call_soon(lambda: process.create_task(main()))
        self.run_in(process)

    @property
    def age_s(self) -> float:
        """Age (s), without the time for which it was stopped last."""
        assert self.process is not None
        return self._world.clock.now - max(self._began, self.process.stalled_until)

    async def watch_fleet(self, version: int) -> tuple[int, list[WorkerInfo]]:
        version, infos = await self.supervisor.watch_fleet(version)
        self._said.incarnations |= {info.incarnation for info in infos}
        return version, infos

    async def report(self, router: str, num_waiting: int) -> ControlReport:
        return self.supervisor.report(router, num_waiting)

    async def scale(self, replicas: Mapping[str, int]) -> None:
        self.supervisor.scale(replicas)
        self._said.targets = dict(replicas)


class Supervised:
    """The part of a World that starts, ends and announces its workers."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.name = NAME
        self.rng = random.Random(f"supervisor of {world.seed}")
        self.ray = SimRay(world, self._fate)
        self.actor: SupervisorActor | None = None
        self.num_failing = 0  # of the next starts
        self.num_unplaced = 0  # of those after them
        self.has_nodes_at_last = self.rng.random() < 0.5  # for what could not be placed
        self.config: ClusterConfig  # since start, as the next
        self.said: Said
        self.checks = Checks(world, self)
        self._hosts: Hosts
        self._num_starts = 0

    def plan_faults(self, rng: random.Random) -> list[Fault]:
        return plan_supervised(rng, self.world.weather)

    def plan_hosts(self, rng: random.Random) -> Hosts:
        self._hosts = Hosts(rng, self.world.lease_s, self.world.seed, has_moulds=True)
        return self._hosts

    def _plan_config(self, rng: random.Random) -> ClusterConfig:
        has_gangs = rng.random() < 0.15
        are_alike = rng.random() < 0.7  # then a worker may move between pools
        replicas = plan_replicas(rng)
        pools: dict[str, dict[str, object]] = {
            pool: {"replicas": number} if are_alike else {"replicas": number, "threads": threads}
            for threads, (pool, number) in enumerate(replicas.items(), 1)
        }
        if has_gangs:
            pools["decode"]["data_parallel"] = 2
        is_hasty = self.world.weather.name != "calm" and rng.random() < 0.2
        return build(
            {
                "model": "fake",
                "pools": pools,
                "router": {"replicas": len(self.world.routers)},
                "drain_timeout_s": rng.uniform(1.0, 6.0) if is_hasty else 600.0,
            }
            | dials.settings_of(self.world.seed)
            | sleeps.settings_of(self.world.seed)
        )

    def _fate(self, worker_id: str) -> Fate:
        """Draw the behaviour and the place of a requested worker."""
        self._num_starts += 1
        host, pool = host_of(worker_id), worker_id.partition("-")[0]
        if host not in self.world.hosts:
            own = random.Random(f"{self.world.seed} {host}")
            self.world.add_host(self._hosts.make(own, host, pool))
        rng = random.Random(f"{self.world.seed} start {self._num_starts}")
        error, waits_for = None, ""
        if self.num_failing:
            self.num_failing -= 1
            error = rng.choice((WorkerLost("it ran out of memory"), Unavailable("its port was taken")))
        elif self.num_unplaced and not sleeps.is_sleepy(self.world.seed):
            self.num_unplaced -= 1
            waits_for = "a node with GPU: 1"
        return Fate(rng.uniform(0.0, 0.2), rng.uniform(0.01, 0.3), rng.uniform(0.01, 1.0), error, waits_for)

    def start(self) -> None:
        world = self.world
        self.config = self._plan_config(self.rng)
        self.said = Said(self.config.pools.targets)
        for name in world.routers.names:
            self.ray.router_runs(name)
            self.on_router_start(name)
        if has_help := self.rng.random() < 0.5:  # as placement.py's start_ahead does
            for worker_id, _ in first_worker_ids(self.config.pools):
                self.ray.worker(worker_id)
        world.clock.after(self.rng.uniform(0.0, 0.3), self._start, not has_help)

    def _start(self, finds_existing: bool = True) -> None:
        world = self.world
        if world.is_over:
            return
        world.note("start the supervisor")

        def make() -> Supervisor:
            return Supervisor(self.config, SimLauncher(world, self.ray, finds_existing=finds_existing), None)

        SupervisorActor(self, make)

    def kill(self) -> None:
        actor = self.actor
        if actor is None or actor.process is None:
            return
        world = self.world
        world.note("kill the supervisor")
        self.actor = None
        actor.process.kill()
        world.network.on_kill(actor.process)
        actor.die(WorkerLost("the supervisor died"))
        world.clock.after(self.rng.uniform(*AGAIN_S), self._start)

    def scale(self, replicas: Mapping[str, int]) -> None:
        """A request from outside, which may get no answer."""
        world, actor = self.world, self.actor
        if actor is None or sleeps.is_sleepy(world.seed):  # such a pool is not scaled by hand
            return

        async def call() -> None:
            try:
                await actor.ask(partial(actor.scale, replicas))
            except WorkerLost:
                world.note("nobody answers to the scaling")

        world.note(f"scale to {replicas}")
        world.outsider.call_soon(lambda: world.outsider.create_task(call()))

    def names(self) -> list[str]:
        """Hosts, for faults to choose from."""
        return [name for name, worker in self.world.workers.items() if worker is not None]

    def peers(self) -> list[str]:
        """Return the routers, whose packets may be lost."""
        return [*self.names(), NAME]

    def replace(self, host: str, low_s: float, high_s: float) -> None:
        """The supervisor does."""

    def on_kill(self, host: str) -> None:
        self.ray.on_kill(host)

    def on_router_kill(self, name: str, again: Callable[[], object]) -> None:
        self.ray.routers[name].die(WorkerLost("its process died"))

    def on_router_start(self, name: str) -> None:
        router = self.world.routers.at(name)
        router.process.call_soon(lambda: router.process.create_task(self._follow(router)))
        if sleeps.is_sleepy(self.world.seed):
            router.process.call_soon(self._begin_reports, router)

    def _begin_reports(self, router: "RouterProcess") -> None:
        if router.router is None:
            router.process.call_soon(self._begin_reports, router)
            return
        find, away = partial(self._report, router.name), (WorkerLost,)
        reports = report_waiting(find, router.router.waiting, router.router.on_control, away)
        router.process.create_task(reports)

    async def _report(self, router: str) -> Report:
        actor = self.actor
        if actor is None:
            raise WorkerLost("there is no supervisor")
        return lambda num_waiting: actor.ask(partial(actor.report, router, num_waiting))

    async def _follow(self, router: "RouterProcess") -> None:
        await follow(self._watch, partial(self.world.routers.take, router), (WorkerLost,))

    async def _watch(self) -> Watch:
        actor = self.actor
        if actor is None:
            raise WorkerLost("there is no supervisor")
        return lambda version: actor.ask(partial(actor.watch_fleet, version))

    def check_kill(self, actor: WorkerActor) -> None:
        self.checks.check_kill(actor)

    def check(self) -> None:
        self.checks.look()

    def settle(self) -> None:
        """End the faults of starts, and give nodes to all, unless nodes never come."""
        self.num_failing = self.num_unplaced = 0
        if self.has_nodes_at_last:
            self.ray.place_all()

    @property
    def quiet_limit_s(self) -> float:
        """Seconds after the last request's end in which all that is held or left to do must end."""
        return CALM_LIMIT_S if self.world.weather.name == "calm" else LIMIT_S

    def what_is_left(self) -> str:
        return self.checks.what_is_left()


def plan_replicas(rng: random.Random) -> dict[str, int]:
    """Draw the number of workers of each pool, for a few small workers."""
    return {"prefill": rng.choice((0, 1, 1, 2)), "decode": rng.randint(1, 3), "mixed": int(rng.random() < 0.2)}
