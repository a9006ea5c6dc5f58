"""The routers of a world: one, or two that serve the same workers and know nothing of each other.

A client comes to a router that lives; it is lost with that router, as a connection is. A choice that only several
routers need is made by a generator of its own, so that a world of one router is what it was before there were several.
"""

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from diptych.cluster.common.deployment import make_router_id
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.server.service import WorkerService

from ..faults.faults import Fault
from ..machines.clock import ProcessLoop

if TYPE_CHECKING:
    from diptych.proto import worker_pb2
    from diptych.workers.server.router_links import RouterLink

    from ..world import Client, World

LAST_DIGITS_OF_TWO = (5, 9)  # of the seeds whose worlds have two


@dataclass(eq=False)
class RouterProcess:
    process: ProcessLoop
    router: Router | None = None
    infos: list[WorkerInfo] = field(default_factory=list[WorkerInfo])  # its last word from the supervisor
    stall_s: float = 0.0
    jumped_s: float = 0.0  # of its clock, ahead

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def listed(self) -> set[str]:
        return {info.incarnation for info in self.infos}


class Routers:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.rng = random.Random(f"routers of {world.seed}")
        self.names = [make_router_id(number) for number in range(1 + (world.seed % 10 in LAST_DIGITS_OF_TWO))]
        self._all = {name: RouterProcess(world.add_process(name)) for name in self.names}
        self._homes: dict[str, str] = {}  # of requests: their completions come to one router
        self._config: RoutingConfig  # since start

    def __len__(self) -> int:
        return len(self.names)

    def living(self) -> list[RouterProcess]:
        return [router for router in self._all.values() if not router.process.is_dead]

    def at(self, name: str) -> RouterProcess:
        """The last of that name."""
        return self._all[name]

    def some(self) -> RouterProcess:
        return self.rng.choice(self.living())

    def some_name(self) -> str:
        return self.rng.choice(self.names)

    def of(self, process: ProcessLoop) -> RouterProcess | None:
        return next((router for router in self._all.values() if router.process is process), None)

    def plan(self) -> list[Fault]:
        """The end of a router while another runs."""
        strikes = len(self) > 1 and self._world.weather.num_faults and self.rng.random() < 0.5
        return [Fault(self.rng.randint(20, 700), self.rng.uniform(1.0, 6.0), kill_router)] if strikes else []

    def start(self, config: RoutingConfig) -> None:
        self._config = config
        for router in self.living():
            self._start(router)

    def _start(self, router: RouterProcess) -> None:
        async def main() -> None:
            router.router = made = Router(self._config)
            await made.start()

        router.process.call_soon(lambda: router.process.create_task(main()))

    def kill(self, router: RouterProcess) -> None:
        """Kill a router with its clients' requests; another process of that name comes soon."""
        world = self._world
        world.note(f"kill {router.name}")
        router.process.kill()
        world.network.on_kill(router.process)
        for client in world.clients:
            if client.router is router and client.ended_at is None:
                client.is_cut, client.ended_at = True, world.clock.now
        world.supervision.on_router_kill(router.name, partial(self.restart, router.name))

    def restart(self, name: str) -> None:
        world = self._world
        if world.is_over:
            return
        world.note(f"start {name}")
        router = self._all[name] = RouterProcess(world.add_process(name))
        self._start(router)
        world.supervision.on_router_start(name)

    def tell(self, name: str, infos: list[WorkerInfo]) -> None:
        router = self._all[name]
        router.process.call_soon(self.take, router, infos)

    def take(self, router: RouterProcess, infos: list[WorkerInfo]) -> None:
        if router.router is None:
            router.process.call_soon(self.take, router, infos)
            return
        router.infos = infos
        router.router.update_fleet(infos)

    def admit(self, client: "Client") -> RouterProcess:
        """Choose a router for the client: all completions of a request have one router."""
        request = client.request.request_id.partition(".")[0]
        home = self._homes.setdefault(request, self.some().name)
        client.router = self._all[home] if not self._all[home].process.is_dead else self.some()
        return client.router


class WatchedService(WorkerService):
    """A router that has confirmed a drain on a stream submits nothing more there."""

    world: "World"

    def _submit(self, link: "RouterLink", submit: "worker_pb2.Submit") -> None:
        if link.knows_draining:
            self.world.bug(f"{submit.request_id} is submitted on a stream whose router has seen the drain")
        super()._submit(link, submit)

    def unaware(self) -> set[str]:
        """Streams whose routers, or supervisor, have not said that they know of the drain, or that all has ended that
        they had here; one for each process that is stopped may be silent. A request that was moved counts as theirs
        until its new worker, where it may wait for its turn, gives a token."""
        routers = [process.router for process in self.world.routers.living() if process.router is not None]
        links = [router._links[self.incarnation] for router in routers if self.incarnation in router._links]
        are_idle = all(link.is_idle for link in links)
        silent = [ours for ours in self._links if not (ours.knows_draining and (ours.is_done or not are_idle))]
        workers = {id(worker.process) for worker in self.world.living()}
        others = [p for p in self.world.processes if id(p) not in workers and not p.is_dead]
        if len(silent) <= sum(process.is_stalled for process in others):
            return set()
        return {f"link {link.number}" for link in silent if self._drain.has_begun}


def kill_router(world: "World") -> None:
    living = world.routers.living()
    if len(living) > 1:
        world.routers.kill(world.routers.some())
