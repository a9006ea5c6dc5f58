"""Checks of a real supervisor: whom it may end and when, what routers learn of it, and its final state."""

from typing import TYPE_CHECKING

from diptych.cluster.common.gang import gang_of
from diptych.cluster.control.plan import Phase
from diptych.cluster.control.status import PoolStatus
from diptych.cluster.control.supervisor import ADOPT_S, Supervisor
from diptych.cluster.control.worker_record import WorkerRecord, announced
from diptych.cluster.control.worker_watch import SILENT_TICKS, TICK_S
from diptych.cluster.routing.fleet import WorkerInfo

from .dial_checks import DialChecks
from .invariants import integrity
from .reasons import length_of
from .sleep_checks import SleepChecks
from .violation import demand

if TYPE_CHECKING:
    from ..processes.launcher import WorkerActor
    from ..processes.routers import RouterProcess
    from ..processes.supervised import Supervised
    from ..processes.worker import Worker
    from ..world import World

REACHED_S = 5.0  # after a trouble's end, until a stream to a worker is there again
NOTICED_S = 2.0  # until a death is
HEARD_S = 3.0  # until routers know what the supervisor knows
CALM_LIMIT_S = 45.0  # a supervisor may be stopped for most of it
LIMIT_S = 240.0  # a worker that hangs before its supervisor has heard of it is given two minutes


class Checks:
    def __init__(self, world: "World", supervised: "Supervised") -> None:
        self._world = world
        self._supervised = supervised
        self._alike_at: dict[str, float] = {}  # by router: when it last knew what the supervisor knows
        self._draining_at: dict[str, float] = {}  # by worker, since when the supervisor drains it
        self.dial = DialChecks(world)
        self.sleep = SleepChecks(world)

    def watch_starts(self, supervisor: Supervisor) -> None:
        """Check at each start that its pool has fewer workers than it shall have."""
        real = supervisor._start

        def start(gang_id: str, pool: str, *, is_new: bool = True) -> None:
            there = [v for v in supervisor._views() if v.pool == pool and v.phase in (Phase.STARTING, Phase.READY)]
            wanted = supervisor._replicas[pool]
            if is_new and len(there) >= wanted:
                self._world.bug(f"{gang_id} is started, and {pool} has {len(there)} of {wanted} workers")
            real(gang_id, pool, is_new=is_new)

        supervisor._start = start  # type: ignore[method-assign]

    def look(self) -> None:
        actor = self._supervised.actor
        records = [] if actor is None else actor.supervisor._workers.values()
        draining = {r.worker_id for r in records if r.phase is not Phase.STARTING and r.phase is not Phase.READY}
        self._draining_at = {name: self._draining_at.get(name, self._world.clock.now) for name in draining}
        for router in self._world.routers.living():
            self._look_at(router)
        self._look_for_losses()
        self.dial.look(actor)
        self.sleep.look(actor)

    def _look_for_losses(self) -> None:
        """Check that every dead process is soon reported as lost."""
        actor, now = self._supervised.actor, self._world.clock.now
        if actor is None or actor.age_s <= NOTICED_S:
            return
        for record in actor.supervisor._workers.values():
            died_at = self._supervised.ray.workers[record.worker_id].died_at
            is_noticed = record.phase is Phase.STOPPING or now - died_at <= NOTICED_S
            demand(is_noticed, f"{record.worker_id} died {now - died_at:.1f} s ago, and is {record.phase.value}")

    def _look_at(self, router: "RouterProcess") -> None:
        """Check that the router soon knows what has changed in the fleet."""
        now, name = self._world.clock.now, router.name
        if self._has_excuse(router) or set(router.infos) == set(self._infos()):
            self._alike_at[name] = now
        late_s = now - self._alike_at.setdefault(name, now)
        demand(late_s <= HEARD_S, f"{name} knows of {router.infos}, the supervisor for {late_s:.1f} s {self._infos()}")

    def _has_excuse(self, router: "RouterProcess") -> bool:
        world, actor = self._world, self._supervised.actor
        if actor is None or router.process.is_stalled or actor.age_s <= ADOPT_S:
            return True
        pair = (router.name, actor.name)
        return bool(world.network.troubles.spans(pair, world.clock.now - HEARD_S, world.clock.now, linger_s=0.0))

    def _infos(self) -> list[WorkerInfo]:
        actor = self._supervised.actor
        return [] if actor is None else announced(actor.supervisor._workers.values())

    def check_kill(self, actor: "WorkerActor") -> None:
        """The supervisor ends that worker. Silence is a reason only if the worker itself causes it."""
        reasons = (self._serves_nobody, self._has_lost_peer, self._had_its_time, self._is_silent)
        if not any(is_so(actor) for is_so in reasons):
            self._world.bug(f"the supervisor ends {actor.worker_id}, which is well and has not ended its own")
        actor.is_given_up = actor.is_given_up or self._is_silent(actor)

    def _serves_nobody(self, actor: "WorkerActor") -> bool:
        """Return whether the worker has never been announced, or is done, or has ended."""
        worker = actor.worker
        if actor.is_dead or actor.is_stopped or worker is None or not worker.has_started:
            return True
        return worker.incarnation not in self._supervised.said.incarnations or _is_done(worker)

    def _has_lost_peer(self, actor: "WorkerActor") -> bool:
        peers = [a for a in self._supervised.ray.workers.values() if gang_of(a.worker_id) == gang_of(actor.worker_id)]
        return any(peer.is_dead or peer.is_given_up for peer in peers)

    def _had_its_time(self, actor: "WorkerActor") -> bool:
        """Return whether the time in which it must end its own requests is over."""
        began = self._draining_at.get(actor.worker_id, float("inf"))
        return self._world.clock.now - began >= self._supervised.config.drain_timeout_s - TICK_S

    def _is_silent(self, actor: "WorkerActor") -> bool:
        now, troubles = self._world.clock.now, self._world.network.troubles
        limit_s = SILENT_TICKS * TICK_S
        spans = troubles.spans(
            (actor.name, self._supervised.name), now - limit_s, now, linger_s=REACHED_S, of=actor.name
        )
        return length_of(spans) >= limit_s - TICK_S - REACHED_S

    def what_is_left(self) -> str:
        """The first thing that is not as it should be, or nothing."""
        actor, supervised = self._supervised.actor, self._supervised
        if actor is None or not actor.supervisor._adopted.is_set():
            return "the supervisor has not begun"
        records = actor.supervisor._workers
        ids = {actor.worker_id for actor in supervised.ray.living()}
        if ids != set(records):
            return f"{sorted(ids)} live, and the supervisor knows of {sorted(records)}"
        if supervised.ray.places != {gang_of(worker_id) for worker_id in ids}:
            return f"{sorted(supervised.ray.places)} are taken, and {sorted(ids)} live"
        return self._left_of_pools() or self._left_of_routers() or self._left_of_roles(list(records.values()))

    def _left_of_pools(self) -> str:
        actor = self._supervised.actor
        assert actor
        status = actor.supervisor.status()
        waiting = {gang_of(w.worker_id): w.pool for w in status.workers if w.waiting_for}
        for pool in status.pools:
            wanted = self._wanted(pool)
            num_waiting = list(waiting.values()).count(pool.name)
            found = (pool.target, pool.num_ready, pool.num_starting, pool.num_draining)
            if found != (wanted, wanted - num_waiting, num_waiting, 0):
                return f"{pool.name}: {wanted} are wanted, {num_waiting} have no node, and this is so: {pool}"
        return ""

    def _wanted(self, pool: PoolStatus) -> int:
        """Return the size that was asked for last, or, where nobody asks, the one that the supervisor has decided."""
        return pool.target if pool.min_replicas < pool.max_replicas else self._supervised.said.targets[pool.name]

    def _left_of_routers(self) -> str:
        actor = self._supervised.actor
        assert actor
        for router in actor.supervisor.status().routers:
            if router.phase != "ready":
                return f"{router.router_id} is {router.phase}"
        for router in self._world.routers.living():
            if set(router.infos) != set(self._infos()):
                return f"{router.name} knows of {router.infos}"
        return ""

    def _left_of_roles(self, records: list[WorkerRecord]) -> str:
        for record in records:
            found = self._supervised.ray.workers[record.worker_id].worker
            if found is None or not found.has_started:
                continue
            budget = found.engine.scheduler.prefill_budget
            if budget != record.wanted_budget:
                return f"{record.worker_id} of pool {record.pool} has the budget {budget}, not {record.wanted_budget}"
        return ""


def _is_done(worker: "Worker") -> bool:
    """Return whether the worker drains and has nothing left."""
    assert worker.service is not None
    state = integrity(worker)
    load = state.load
    busy = load.num_running + load.num_waiting + load.num_leased_blocks + load.num_quarantined_blocks
    return worker.service._drain.has_begun and busy + state.num_open_handoffs == 0
