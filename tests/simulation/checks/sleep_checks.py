"""Checks of worlds whose pool may have no workers: no request waits for a worker that nobody is asked for."""

from typing import TYPE_CHECKING

from diptych.cluster.common.demand import HEARD_S, REPEAT_S
from diptych.cluster.control.supervisor import ADOPT_S

from ..processes.sleeps import is_sleepy
from .violation import demand

if TYPE_CHECKING:
    from ..processes.supervised import SupervisorActor
    from ..world import World

ASKED_S = REPEAT_S + 2.0  # until a supervisor that lives, and can be reached, wants a worker


class SleepChecks:
    """`num_slept`: how often the pool has come to have no workers."""

    def __init__(self, world: "World") -> None:
        self.num_slept = 0
        self._world = world
        self._was_empty = False
        self._waits_since: dict[str, float] = {}  # by router

    def look(self, actor: "SupervisorActor | None") -> None:
        if not is_sleepy(self._world.seed) or actor is None:
            self._waits_since.clear()
            return
        is_empty = not any(actor.supervisor._replicas.values())
        self.num_slept += is_empty and not self._was_empty
        self._was_empty = is_empty
        now = self._world.clock.now
        for router in self._world.routers.living():
            if router.router is None:
                continue
            waits = is_empty and router.router.waiting.num > 0 and not self._has_excuse(actor, router.name)
            since = self._waits_since.setdefault(router.name, now)
            if not waits:
                self._waits_since[router.name] = now
            demand(
                now - since <= ASKED_S, f"requests wait at {router.name}, and no worker is wanted for {now - since} s"
            )

    def _has_excuse(self, actor: "SupervisorActor", router: str) -> bool:
        world = self._world
        if actor.age_s <= ADOPT_S or world.routers.at(router).process.is_stalled:
            return True
        now = world.clock.now
        return bool(world.network.troubles.spans((router, actor.name), now - HEARD_S, now, linger_s=0.0))
