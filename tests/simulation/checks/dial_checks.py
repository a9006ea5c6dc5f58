"""Checks of worlds whose supervisor moves prefill budgets: a sequence counts once, and on a steady load budgets do not
go to and fro."""

from collections import Counter
from typing import TYPE_CHECKING

from diptych.cluster.control.budgets import REST_S
from diptych.cluster.control.plan import Phase

from ..processes.dials import LASTS_S, is_dialled, is_steady
from .violation import demand

if TYPE_CHECKING:
    from ..processes.supervised import SupervisorActor
    from ..world import World

BOTH_S = 0.5  # in which a sequence that moves may decode at its source and, provisionally, at its sink


class DialChecks:
    """`num_changes`: of the number of workers that only prefill."""

    def __init__(self, world: "World") -> None:
        self.num_changes = 0
        self._world = world
        self._judges_turns = is_steady(world.seed) and world.weather.name == "calm"
        self._members: object = None  # supervisor and workers, while they are the same
        self._num = 0
        self._last: tuple[float, int] | None = None  # change of the number: when, and its sign
        self._twice_since: dict[str, float] = {}  # by request

    def look(self, actor: "SupervisorActor | None") -> None:
        if not is_dialled(self._world.seed):
            return
        self._check_routers()
        if self._world.weather.name == "calm":
            self._check_workers()
        if actor is not None:
            self._look_at_budgets(actor)

    def _check_routers(self) -> None:
        """Check that what a router counts as the load of a worker, it also follows there."""
        for process in self._world.routers.living():
            if process.router is None:
                continue
            counted = process.router._fleet._requests
            followed = {handle for driver in process.router._drivers for handle in driver._links}
            strays = sorted({counted[handle].worker for handle in counted.keys() - followed})
            demand(not strays, f"{process.name} counts requests at {strays} that it does not follow there")

    def _check_workers(self) -> None:
        """Check that a sequence is soon counted by one worker alone, after it has moved."""
        now = self._world.clock.now
        counts = Counter(
            sequence.request.request_id
            for worker in self._world.living()
            if worker.has_started
            for sequence in worker.engine.scheduler._decoding
        )
        twice = [name for name, num in counts.items() if num > 1]
        self._twice_since = {name: self._twice_since.get(name, now) for name in twice}
        for name, since in self._twice_since.items():
            demand(now - since <= BOTH_S, f"{name} decodes at {counts[name]} workers, for {now - since:.1f} s")

    def _look_at_budgets(self, actor: "SupervisorActor") -> None:
        ready = [r for r in actor.supervisor._workers.values() if r.phase is Phase.READY]
        members = (actor, {(r.worker_id, r.pool) for r in ready})
        num = sum((r.wanted_budget or 0) >= r.load.step_tokens for r in ready)
        before, self._num = self._num, num
        if members != self._members:
            self._members, self._last = members, None
            return
        sign = (num > before) - (num < before)
        if not sign:
            return
        self.num_changes += 1
        now = self._world.clock.now
        if self._last and self._last[1] != sign and self._judges_turns and now < LASTS_S:
            elapsed_s = now - self._last[0]
            demand(elapsed_s >= REST_S, f"budgets change to and fro within {elapsed_s:.1f} s, on a steady load")
        self._last = now, sign
