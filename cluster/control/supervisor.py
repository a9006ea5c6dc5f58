"""Keeps the fleet at its targets: starts, watches, drains and replaces workers and routers. Knows no Ray: a Launcher
starts processes, WorkerControl talks to workers, RouterKeeper keeps the routers, plan.py decides.

One task lives as long as each process that it watches, one loop plans; whatever a task learns wakes the loop.
Routers follow the fleet by long-polling `watch_fleet`; while nobody supervises they keep their last view.
"""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from ...workers.common.errors import CheckpointError, ConfigError, DiptychError, InternalError, PeerLost
from ...workers.common.tls import LinkTls, valid_until
from ..common.config import ClusterConfig, interchangeable, scaled
from ..common.demand import ControlReport, WaitingReports
from ..common.deployment import make_router_id, make_worker_id
from ..common.gang import gang_of, members
from ..common.handles import Launcher, WorkerHandle
from ..routing.fleet import WorkerInfo
from ..upgrade.keeper import UpgradeKeeper
from .autoscaler import PoolCounters
from .controller import Controller
from .plan import (
    STABLE_S,
    Action,
    Drain,
    Failures,
    Phase,
    PlannedWorker,
    SetRole,
    Start,
    Stop,
    Targets,
    after_failure,
    gangs_of,
    lacking,
    ongoing,
    plan,
    upgrade_targets,
)
from .router_keeper import RouterKeeper
from .series import report_of
from .status import ClusterStatus, PoolStatus, StartFailure, pool_status
from .worker_control import WorkerControl
from .worker_record import SERVING, WorkerRecord, announced, audit, experts, newest_reports, unplaced, waiting_pools
from .worker_watch import TICK_S, drain, last_words, until_dead, until_known, until_started, until_usable

WATCH_S = 10.0
ADOPT_S = 5.0
DAY_S = 86400.0

log = logging.getLogger("diptych.supervisor")


class Supervisor:
    """`run` until cancelled, then `stop`. `token` is what workers ask of those who call them."""

    def __init__(
        self, config: ClusterConfig, launcher: Launcher, token: str | None, tls: LinkTls | None = None
    ) -> None:
        self._upgrades = UpgradeKeeper(config, launcher, token, tls)
        self._config = config = self._upgrades.wanted.config
        self._launcher, self._token, self._tls = launcher, token, tls
        kept = launcher.recall()  # since it was ready, or scaled
        self._replicas = kept or config.pools.targets
        self._controller, self._waiting = Controller(config), WaitingReports()
        self._workers: dict[str, WorkerRecord] = {}
        self._failures: dict[str, Failures] = {}
        self._losses: dict[str, tuple[DiptychError, str]] = {}  # by ending gang: the error of a worker, and its text
        self._routers = RouterKeeper(launcher, config, self._publish, self.note_failure, lambda: bool(self._failure))
        self._tasks: set[asyncio.Task[None]] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._failure: StartFailure | None = None
        self._was_ready, self._num_started = kept is not None, 0
        # Another than any version of a supervisor before this one, so that its watchers see a change.
        self._version = time.time_ns()
        self._wake, self._changed, self._adopted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        existing = self._launcher.existing()
        for number in range(self._config.router.replicas):
            self._routers.start(make_router_id(number), is_new=not existing)
        await self._adopt(existing)
        # After a failure that starting again would not mend, nothing more is started.
        while not self._failure:
            self._wake.clear()
            self._autoscale()
            self._look_at_upgrade()
            now, ready = time.monotonic(), [(w.pool, w.ready_at) for w in self._workers.values()]
            self._failures = ongoing(self._failures, ready, now)
            for action in plan(self._views(), self._targets(), self._failures, now):
                self._apply(action)
            if not self._was_ready and self.status().state == "ready":
                self._was_ready = True
                self._launcher.remember(self._replicas)
            await asyncio.sleep(0)  # `wait` gives others no turn where it is set already
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()

    def note_failure(self, who: str, error: DiptychError) -> bool:
        """Return whether `error` of process `who` ends the start: one that would come again, before the cluster was
        ever ready. The first is kept for `status`, and nothing more is started."""
        if self._was_ready or error.retryable:
            return False
        is_the_users = isinstance(error, CheckpointError | ConfigError)  # then it does not matter who read it
        message = error.message if is_the_users else f"{who}: {error.message}"
        self._failure = self._failure or StartFailure(type(error).__name__, message)
        self._wake.set()
        return True

    async def stop(self) -> None:
        """End every worker and router, with what they still run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self._routers.stop(), *self._burials)

    async def _adopt(self, existing: list[tuple[str, str]]) -> None:
        """Take over what an earlier supervisor started. Routers are told of the fleet once all of it has answered, or
        after ADOPT_S: what cannot be placed, or hangs, goes on starting, and nobody waits for it."""
        self._was_ready = self._was_ready or bool(existing)
        await until_usable(self._tls if existing else None)  # else it would end all, for want of an answer
        found: dict[tuple[str, str], list[str]] = {}
        for worker_id, pool in existing:
            found.setdefault((gang_of(worker_id), pool), []).append(worker_id)
        for (gang_id, pool), worker_ids in found.items():
            self._num_started = max(self._num_started, int(gang_id.rpartition("-")[2]))
            if len(worker_ids) == self._config.pools.get(pool).parallel.data_parallel:
                self._start(gang_id, pool, is_new=False)
                continue
            log.warning("of %s only %s lives: it is replaced", gang_id, ", ".join(worker_ids))
            for worker_id in worker_ids:
                worker = self._workers[worker_id] = WorkerRecord(worker_id, pool, Phase.STOPPING)
                self._keep(self._burials, self._dismiss(worker))
        with suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_S):
                while any(w.phase is Phase.STARTING for w in self._workers.values()):
                    await self._changed.wait()
        self._adopted.set()
        self._publish()

    def _apply(self, action: Action) -> None:
        log.info("%s", action)
        match action:
            case Start():
                self._num_started += 1
                self._start(make_worker_id(action.pool, self._num_started), action.pool)
            case Stop():
                self._end(self._gang(action.worker_id))
            case Drain():
                gang = self._gang(action.worker_id)
                for worker in gang:
                    worker.enter(Phase.DRAINING)
                self._publish()
                self._keep(self._tasks, self._drain(gang))
            case SetRole():
                for worker in self._gang(action.worker_id):
                    worker.pool, worker.prefill_budget = action.pool, None
                    worker.keep_budget()
                self._publish()

    def _gang(self, gang_id: str) -> list[WorkerRecord]:
        return [worker for worker in self._workers.values() if gang_of(worker.worker_id) == gang_id]

    def _start(self, gang_id: str, pool: str, *, is_new: bool = True) -> None:
        for worker_id in members(gang_id, self._config.pools.get(pool).parallel.data_parallel):
            worker = self._workers[worker_id] = WorkerRecord(worker_id, pool, is_new=is_new)
            worker.generation = self._upgrades.wanted.number
            worker.task = self._keep(self._tasks, self._keep_worker(worker))
        self._publish()

    def _end(self, gang: Iterable[WorkerRecord]) -> None:
        """End the workers that are not ending already."""
        for worker in gang:
            if worker.phase is not Phase.STOPPING:
                worker.enter(Phase.STOPPING)
                if worker.task:
                    worker.task.cancel()
        self._publish()

    async def _drain(self, gang: list[WorkerRecord]) -> None:
        await drain(gang, self._config.drain_timeout_s)
        self._end(gang)

    def _keep(self, tasks: "set[asyncio.Task[None]]", life: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(life)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _keep_worker(self, worker: WorkerRecord) -> None:
        handle: WorkerHandle | None = None
        error: DiptychError | None = InternalError("the supervisor failed to keep it: its log says why")
        began = time.monotonic()
        try:
            handle = await self._launcher.worker(worker.worker_id, worker.pool, self._upgrades.wanted)
            timeout_s = self._config.start_timeout_s
            worker.started = await until_started(handle, worker.wait_for, timeout_s, is_new=worker.is_new)
            worker.generation = worker.started.generation
            worker.control = await until_known(
                handle, WorkerControl.open(worker.started.address, self._token, self._tls)
            )
            await self._upgrades.admit(worker.started, announced(self._workers.values()))
            worker.ready_at = time.monotonic()
            if worker.is_new:
                self._controller.started(worker.pool, worker.ready_at - began, max(worker.unplaced_at - began, 0.0))
            if not worker.is_new and self._controller.moves_budgets(worker.pool):
                worker.prefill_budget = worker.load.prefill_budget  # an earlier supervisor has moved it
            worker.enter(Phase.READY)
            self._publish()
            error = await until_dead(worker, handle, worker.control)
        except DiptychError as e:
            error = e
        except asyncio.CancelledError:
            error = None
            raise
        finally:
            # A separate task: another cancellation of this one must not interrupt the end of the process.
            self._keep(self._burials, self._bury(worker, handle, error))

    async def _dismiss(self, worker: WorkerRecord) -> None:
        """End what an earlier supervisor started and this one has no use for."""
        handle = await self._launcher.worker(worker.worker_id, worker.pool, self._upgrades.wanted)
        await self._bury(worker, handle, None)

    async def _bury(self, worker: WorkerRecord, handle: WorkerHandle | None, error: DiptychError | None) -> None:
        """error: None, where it was told to end."""
        gang_id = gang_of(worker.worker_id)
        if error:
            self._on_loss(worker, error)
        # Update the routers' view before the process, so that no request is sent to it.
        self._end(self._gang(gang_id))  # of a gang all, which publishes
        if handle and error is None and gang_id in self._losses and (error := await last_words(worker, handle)):
            self._on_loss(worker, error)
        if worker.control:
            await worker.control.close()
        if handle:
            await handle.kill()
        del self._workers[worker.worker_id]
        if not self._gang(gang_id):
            self._launcher.vacate(gang_id)
            self._losses.pop(gang_id, None)
        self._publish()

    def _on_loss(self, worker: WorkerRecord, error: DiptychError) -> None:
        """The first of a gang counts as its pool's failure; what it says, until another one says more."""
        message = f"{worker.worker_id}: {error.message}"
        log.warning("lost %s", message)
        self.note_failure(worker.worker_id, error)
        gang_id, before = gang_of(worker.worker_id), self._failures.get(worker.pool, Failures())
        if worker.phase in (Phase.STARTING, Phase.READY):
            now = time.monotonic()
            lived_s = now - worker.ready_at if worker.ready_at else 0.0
            self._failures[worker.pool] = after_failure(before, message, lived_s=lived_s, now=now)
            self._losses[gang_id] = error, message
            # One that an earlier supervisor started has served before, or it is on trial.
            is_young = lived_s < STABLE_S and (worker.is_new or self._upgrades.tries(worker.started))
            if is_young:
                self._fail_upgrade(worker.worker_id, worker.generation, error)
            return
        first, said = self._losses.get(gang_id, (None, ""))
        if isinstance(first, PeerLost) and not isinstance(error, PeerLost):
            self._losses[gang_id] = error, message
            if before.last_error == said:
                self._failures[worker.pool] = replace(before, last_error=message)

    def _publish(self) -> None:
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._wake.set()

    async def watch_fleet(self, version: int) -> tuple[int, list[WorkerInfo]]:
        """The fleet's version and workers, as soon as the version differs from `version` or after WATCH_S."""
        await self._adopted.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                while self._version == version:
                    await self._changed.wait()
        return self._version, announced(self._workers.values())

    def report(self, router: str, num_waiting: int) -> ControlReport:
        """Take a router's report of how many of its requests wait for a worker. `router`: a name of its process."""
        now = time.monotonic()
        self._waiting.report(router, num_waiting, now)
        if num_waiting:
            self._wake.set()
        return report_of(self._controller.ready_in_s(now, waiting_pools(self._workers.values())), self.status())

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Change the targets of the pools named; `status` tells when they are reached. Raises ConfigError."""
        wanted = scaled(self._config.pools, self._replicas, replicas)
        for pool in (pool for pool, number in wanted.items() if number != self._replicas[pool]):
            self._failures.pop(pool, None)  # a person who asks again does not want to wait for the back-off
        self._retarget(wanted)

    def drain_node(self, node: str) -> list[str]:
        """Drain the workers on a machine that is about to leave, by its name; return the ids of those that are there
        still."""
        there = [w for w in self._workers.values() if w.started and node in w.started.nodes]
        for gang_id in {gang_of(w.worker_id) for w in there if w.phase is Phase.READY}:
            self._apply(Drain(gang_id))
        return [w.worker_id for w in there]

    def _retarget(self, replicas: dict[str, int]) -> None:
        self._replicas = replicas
        self._launcher.remember(replicas)
        self._wake.set()

    def _autoscale(self) -> None:
        now, reports = time.monotonic(), newest_reports(self._workers.values())
        counters = {
            pool: PoolCounters.of([load for _, load in found], len({gang_of(worker_id) for worker_id, _ in found}))
            for pool, found in reports.items()
        }
        self._controller.foresee(reports, self._replicas, now, time.time() % DAY_S)
        decided = self._controller.replicas(counters, self._replicas, now, self._waiting.total(now))
        if decided:
            log.info("autoscaler: %s", decided)
            self._retarget(self._replicas | decided)
        for worker_id, budget in self._controller.budgets(reports, now, time.time() % DAY_S).items():
            self._workers[worker_id].prefill_budget = budget
            self._workers[worker_id].keep_budget()

    def upgrade(self, config: ClusterConfig, *, in_place: bool) -> None:
        """Replace all workers by others with these settings; `status` tells how far it is. `in_place`: one ends before
        another starts. Raises ConfigError, Unavailable."""
        serving = [w.started.incarnation for w in self._workers.values() if w.started and w.phase in SERVING]
        self._upgrades.begin(config, lacking(self._views(), self._replicas), in_place=in_place, serving=serving)
        self._was_ready = True  # also where a worker has waited for a place: a failure ends the upgrade alone
        self._failures.clear()
        self._wake.set()

    def _fail_upgrade(self, worker_id: str, generation: int, error: DiptychError) -> None:
        if self._upgrades.failed(worker_id, generation, error, lacking(self._views(), self._replicas)):
            self._failures.clear()  # the settings from before start at once

    def _look_at_upgrade(self) -> None:
        upgrades, workers, generation = self._upgrades, self._workers.values(), self._upgrades.wanted.number
        for worker_id, error in unplaced(workers, generation).items():
            self._fail_upgrade(worker_id, generation, error)
        if upgrades.is_running and self.status().has_all_but(upgrades.lacked):
            upgrades.look([w.generation for w in workers])

    def _targets(self) -> Targets:
        upgrades = self._upgrades
        if upgrades.is_running:
            return upgrade_targets(self._views(), self._replicas, upgrades.lacked, in_place=upgrades.in_place)
        return Targets(self._replicas, interchangeable(upgrades.wanted.config.pools))

    def _views(self) -> list[PlannedWorker]:
        is_outdated = self._upgrades.is_outdated
        return gangs_of(w.view(is_outdated=is_outdated(w.generation)) for w in self._workers.values())

    async def adopted(self) -> bool:
        """Wait until what an earlier supervisor started is known, for a while; return whether it is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._adopted.wait(), 2 * ADOPT_S)
        return self._adopted.is_set()

    def status(self) -> ClusterStatus:
        now, workers = time.monotonic(), self._workers.values()
        ids = {w.started.incarnation: w.worker_id for w in workers if w.started}
        return ClusterStatus(
            name=self._config.name,
            model=self._upgrades.wanted.config.shared.model.model,
            supervisor_pid=os.getpid(),
            pools=tuple(self._pool_status(pool, now) for pool in self._replicas),
            workers=tuple(w.status(now) for w in workers),
            routers=self._routers.statuses,
            failure=self._failure,
            links=tuple(stats for w in workers for stats in w.transfers(ids)),
            decisions=self._controller.log.statuses(now),
            num_decisions=dict(self._controller.log.num_made),
            num_verified_decisions=dict(self._controller.log.num_verified),
            num_failed_decisions=dict(self._controller.log.num_failed),
            forecasts=self._controller.forecasts,
            tls_until=valid_until(self._tls),
            upgrade=self._upgrades.status([w.generation for w in workers if w.phase is not Phase.STARTING]),
        )

    async def audit(self) -> dict[str, str]:
        return await audit(self._workers.values())

    async def experts(self, pool: str | None) -> dict[int, list[int]]:
        """Return, for each layer, each expert's token count on all workers that are ready, or on those of one pool.
        Raises InternalError, WorkerLost."""
        return await experts(self._workers.values(), pool)

    def _pool_status(self, pool: str, now: float) -> PoolStatus:
        phases = [view.phase for view in self._views() if view.pool == pool]
        bounds = self._config.pools.get(pool).bounds
        found = pool_status(pool, self._replicas[pool], bounds, phases, self._failures.get(pool), now)
        return replace(found, start_s=self._controller.start_s.get(pool), needed=self._controller.needed(pool))
