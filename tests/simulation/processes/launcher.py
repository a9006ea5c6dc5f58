"""Ray as the supervisor uses it, and a Launcher on it: processes that are registered by name, placed, begun and ended.
All of it outlives the supervisor that asked for it.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diptych.cluster.common.gang import gang_of
from diptych.cluster.common.handles import RouterStarted, SettingsGeneration, WorkerStarted
from diptych.workers.common.errors import DiptychError, PeerLost, WorkerLost

from ..machines.remote import NEWS_S, Actor

if TYPE_CHECKING:
    from ..world import World
    from .worker import Worker

STOP_S = 3.0  # for a worker to stop in good order
PEER_S = 1.0  # longest time until a gang's members notice that one of them has ended


@dataclass(frozen=True)
class Fate:
    """Fate of a start."""

    place_s: float = 0.0
    boot_s: float = 0.0  # then its event loop answers
    load_s: float = 0.0  # then it serves
    error: DiptychError | None = None  # or ends with this
    waits_for: str = ""  # before it can be placed


def host_of(worker_id: str) -> str:
    """Incarnations are a host and a number behind a dot."""
    return worker_id.replace(".", "_")


class WorkerActor(Actor):
    """Actor that does what placement.py's WorkerActor does, and its host."""

    def __init__(self, world: "World", worker_id: str, fate: Fate) -> None:
        super().__init__(world.network, host_of(worker_id))
        self.worker_id = worker_id
        self.waits_for = fate.waits_for
        self.is_stopped = False  # by a supervisor, which may have ended before it killed the process
        self.is_given_up = False  # because it did not answer
        self.worker: Worker | None = None
        self._world = world
        self._fate = fate
        self._life: asyncio.Future[WorkerStarted] | None = None
        self._ended: asyncio.Future[DiptychError] | None = None
        if not self.waits_for:
            self.place()

    def place(self) -> None:
        self.waits_for = ""
        self._world.clock.after(self._fate.place_s, self._place)

    def _place(self) -> None:
        self._world.clock.after(self._fate.boot_s, self._boot)

    def _boot(self) -> None:
        if self.is_dead or self._world.is_over:
            return
        self.worker = self._world.make_worker(self.name)
        self.run_in(self.worker.process)

    async def start(self) -> WorkerStarted:
        if self._life is None:
            self._life = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._life)

    async def _load(self) -> WorkerStarted:
        assert self.worker
        await asyncio.sleep(self._fate.load_s)
        if self._fate.error:
            raise self._fate.error
        await self._world.serve(self.worker)
        return WorkerStarted(self.worker.address, self.worker.incarnation, 1, "here")

    async def alive(self) -> None:
        """Answered by the event loop."""

    async def run_until_stopped(self) -> DiptychError:
        return await asyncio.shield(self._why_ended())

    async def stop(self) -> None:
        self.is_stopped = True
        worker = self.worker
        if worker and worker.service and worker.has_started:
            self._world.note(f"{self.worker_id} is told to stop")
            self._world.network.troubles.add(self._world.clock.now, self._world.clock.now, self.name)
            await worker.service.stop(0.2)
        if not (ended := self._why_ended()).done():
            ended.set_result(WorkerLost("it was stopped"))

    def _why_ended(self) -> asyncio.Future[DiptychError]:
        """Return why it ended, once it has: also to those who ask afterwards, as a new supervisor does."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended


class RouterActor(Actor):
    """The process of one router (routers.py), as its supervisor sees it."""

    async def start(self) -> RouterStarted:
        return RouterStarted("127.0.0.1", 1, 2, 1)

    async def alive(self) -> None:
        """Answered by the event loop."""

    async def run_until_stopped(self) -> None:
        await asyncio.Event().wait()


class SimRay:
    """Ray's simulated state: running processes, their places, and the supervisor's stored data."""

    def __init__(self, world: "World", fate: Callable[[str], Fate]) -> None:
        self.workers: dict[str, WorkerActor] = {}
        self.routers: dict[str, RouterActor] = {}
        self.places: set[str] = set()
        self.kept: dict[str, int] | None = None
        self._world = world
        self._fate = fate

    def worker(self, worker_id: str) -> WorkerActor:
        """The running one, or a new one."""
        self.places.add(gang_of(worker_id))
        found = self.workers.get(worker_id)
        if found is None or found.is_dead:
            found = self.workers[worker_id] = WorkerActor(self._world, worker_id, self._fate(worker_id))
        return found

    def router(self, name: str) -> RouterActor:
        found = self.routers.get(name)
        if found is None or found.is_dead:
            found = self.routers[name] = RouterActor(self._world.network, name)
            self._world.clock.after(self._world.rng.uniform(0.01, 0.5), self._boot, found)
        return found

    def router_runs(self, name: str) -> None:
        """Begun before its supervisor, as its first one is."""
        self.routers[name] = RouterActor(self._world.network, name)
        self.routers[name].run_in(self._world.routers.at(name).process)

    def _boot(self, actor: RouterActor) -> None:
        self._world.routers.restart(actor.name)
        actor.run_in(self._world.routers.at(actor.name).process)

    def living(self) -> list[WorkerActor]:
        return [actor for actor in self.workers.values() if not actor.is_dead]

    def place_all(self) -> None:
        """Give nodes to all processes."""
        for actor in self.living():
            if actor.waits_for:
                actor.place()

    def kill(self, actor: WorkerActor) -> None:
        """Its name is free at once. Idempotent."""
        if actor.is_dead:
            return
        actor.die(WorkerLost("it was killed"))
        self._world.clock.after(self._world.rng.random() * NEWS_S, self._end, actor)

    def on_kill(self, host: str) -> None:
        """A worker's process has ended."""
        actor = next((a for a in self.workers.values() if a.name == host), None)
        if actor is None or actor.is_dead:
            return
        actor.die(WorkerLost("its process died"))
        for other in self.living():
            if gang_of(other.worker_id) == gang_of(actor.worker_id):
                self._world.clock.after(self._world.rng.random() * PEER_S, self._lose_peer, other)

    def _lose_peer(self, actor: WorkerActor) -> None:
        actor.die(PeerLost("another one of its gang is gone"))
        self._end(actor)

    def _end(self, actor: WorkerActor) -> None:
        if actor.worker and self._world.workers[actor.name] is actor.worker:
            self._world.kill(actor.name)


class SimWorker:
    """A WorkerHandle."""

    def __init__(self, world: "World", ray: SimRay, actor: WorkerActor) -> None:
        self._world, self._ray, self._actor = world, ray, actor

    async def start(self) -> WorkerStarted:
        return await self._actor.ask(self._actor.start)

    async def alive(self) -> None:
        await self._actor.ask(self._actor.alive)

    async def waiting_for(self) -> str:
        await asyncio.sleep(self._world.rng.random() * NEWS_S)
        return self._actor.waits_for

    async def wait(self) -> DiptychError:
        try:
            return await self._actor.ask(self._actor.run_until_stopped)
        except DiptychError as e:
            return e

    async def kill(self) -> None:
        self._world.supervision.check_kill(self._actor)
        with suppress(TimeoutError, DiptychError):
            async with asyncio.timeout(STOP_S):
                await self._actor.ask(self._actor.stop)
        self._ray.kill(self._actor)


class SimRouter:
    """A RouterHandle."""

    def __init__(self, world: "World", actor: RouterActor) -> None:
        self._world, self._actor = world, actor

    async def start(self) -> RouterStarted:
        return await self._actor.ask(self._actor.start)

    async def alive(self) -> None:
        await self._actor.ask(self._actor.alive)

    async def waiting_for(self) -> str:
        return ""

    async def wait(self) -> DiptychError:
        try:
            await self._actor.ask(self._actor.run_until_stopped)
        except DiptychError as e:
            return e
        return WorkerLost("it ended")

    async def kill(self) -> None:
        if not self._actor.is_dead:
            self._world.bug(f"the supervisor ends {self._actor.name}, which lives")


class SimLauncher:
    """`handles.Launcher`. `finds_existing`: as RayLauncher's."""

    def __init__(self, world: "World", ray: SimRay, *, finds_existing: bool) -> None:
        self._world, self._ray, self._finds_existing = world, ray, finds_existing

    async def worker(self, worker_id: str, pool: str, settings: SettingsGeneration) -> SimWorker:
        assert settings.number == 0, "no upgrade is simulated"
        return SimWorker(self._world, self._ray, self._ray.worker(worker_id))

    def vacate(self, gang_id: str) -> None:
        alive = [a.worker_id for a in self._ray.living() if gang_of(a.worker_id) == gang_id]
        if alive:
            self._world.bug(f"the place of {gang_id} is given back, where {alive} live")
        self._ray.places.discard(gang_id)

    async def router(self, router_id: str, before: RouterStarted | None) -> SimRouter:
        return SimRouter(self._world, self._ray.router(router_id))

    def existing(self) -> list[tuple[str, str]]:
        if not self._finds_existing:
            return []
        ids = [actor.worker_id for actor in self._ray.living()]
        self._ray.places &= {gang_of(worker_id) for worker_id in ids}
        return [(worker_id, worker_id.partition("-")[0]) for worker_id in ids]

    def remember(self, replicas: Mapping[str, int]) -> None:
        self._ray.kept = dict(replicas)

    def recall(self) -> dict[str, int] | None:
        return self._ray.kept

    def use(self, settings: SettingsGeneration) -> None:
        self._world.bug("the supervisor upgrades, which nobody asked for")

    def keep_upgrade(self, text: str) -> None:
        self._world.bug("the supervisor upgrades, which nobody asked for")

    def recall_upgrade(self) -> str | None:
        return None
