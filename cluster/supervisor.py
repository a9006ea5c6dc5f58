"""Keeps the fleet at its targets: starts, watches, drains and replaces workers and routers. Knows no Ray: a Launcher
starts processes, WorkerControl talks to workers, plan.py decides.

One task lives as long as each process that it watches, one loop plans; whatever a task learns wakes the loop.
Routers follow the fleet by long-polling `watch_fleet`; while nobody supervises they keep their last view.
"""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress

from ..proto.worker_pb2 import LoadReport
from ..workers.errors import CheckpointError, ConfigError, DiptychError
from ..workers.scheduler import Role
from ..workers.wire import ROLE_TO_PROTO
from .autoscaler import Autoscaler, PoolCounters
from .config import MAX_REPLICAS, ClusterConfig, check_targets, interchangeable
from .deployment import make_router_id, make_worker_id
from .expert_loads import add_up
from .fleet import WorkerInfo
from .handles import Launcher, RouterHandle, RouterStarted, WorkerHandle, WorkerStarted
from .plan import Action, Drain, Failures, Phase, SetRole, Start, Stop, Targets, WorkerView, after_failure, plan
from .status import ClusterStatus, Failure, PoolStatus, RouterStatus
from .worker_control import WorkerControl
from .worker_record import WorkerRecord

TICK_S = 1.0
PLACED_S = 3.0  # then it is worth a question why a worker has not started
DRAIN_POLL_S = 0.1
# A worker reports every half second: one that is silent for so many looks hangs, and is replaced. Looks, not seconds:
# when this whole process was stopped for a while, its workers are not to blame.
SILENT_TICKS = 15
WATCH_S = 10.0
ADOPT_S = 5.0

log = logging.getLogger("diptych.supervisor")


class Supervisor:
    """`run` until cancelled, then `stop`. `token` is what workers ask of those who call them."""

    def __init__(self, config: ClusterConfig, launcher: Launcher, token: str | None) -> None:
        self._config = config
        self._launcher = launcher
        self._token = token
        self._replicas = launcher.recall() or config.pools.targets
        self._groups = interchangeable(config.pools)
        self._bounds: dict[str, tuple[int, int]] = {name: pool.bounds for name, pool in config.pools.items()}
        self._autoscaler = Autoscaler(config)
        self._workers: dict[str, WorkerRecord] = {}
        self._failures: dict[str, Failures] = {}
        self._routers: dict[str, RouterStatus] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._failure: Failure | None = None
        self._was_ready = False
        self._num_started = 0
        self._wake = asyncio.Event()
        # Later than any version of a supervisor before this one, so that its watchers see a change.
        self._version = time.time_ns()
        self._changed = asyncio.Event()
        self._adopted = asyncio.Event()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        existing = self._launcher.existing()
        for number in range(self._config.router.replicas):
            self._spawn(self._keep_router(make_router_id(number)))
        await self._adopt(existing)
        # After a failure that starting again would not mend, nothing more is started.
        while not self._failure:
            self._wake.clear()
            self._autoscale()
            for action in plan(self._views(), self._targets(), self._failures, time.monotonic()):
                self._apply(action)
            self._was_ready = self._was_ready or self.status().state == "ready"
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()

    async def stop(self) -> None:
        """End every worker and router, with what they still run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._burials)

    async def _adopt(self, existing: list[tuple[str, str]]) -> None:
        """Take over what an earlier supervisor started, before anybody is told of a fleet without it."""
        self._was_ready = bool(existing)
        for worker_id, pool in existing:
            self._num_started = max(self._num_started, int(worker_id.rpartition("-")[2]))
            self._start(worker_id, pool)
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
                self._end(self._workers[action.worker_id])
            case Drain():
                worker = self._workers[action.worker_id]
                worker.enter(Phase.DRAINING)
                self._publish()
                self._spawn(self._drain(worker))
            case SetRole():
                self._workers[action.worker_id].pool = action.pool
                self._publish()

    def _start(self, worker_id: str, pool: str) -> None:
        worker = WorkerRecord(worker_id, pool)
        self._workers[worker_id] = worker
        worker.task = self._spawn(self._keep_worker(worker))
        self._publish()

    def _end(self, worker: WorkerRecord) -> None:
        worker.enter(Phase.STOPPING)
        self._publish()
        if worker.task:
            worker.task.cancel()

    def _spawn(self, life: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        return self._keep(self._tasks, life)

    def _keep(self, tasks: "set[asyncio.Task[None]]", life: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(life)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    # -- one worker -------------------------------------------------------------------------------------------------

    async def _keep_worker(self, worker: WorkerRecord) -> None:
        handle: WorkerHandle | None = None
        error = "stopped"
        try:
            handle = await self._launcher.worker(worker.worker_id, worker.pool)
            worker.started = await self._until_started(worker, handle)
            worker.control = await WorkerControl.open(worker.started.address, self._token)
            worker.ready_at = time.monotonic()
            worker.enter(Phase.READY)
            self._publish()
            error = await self._until_dead(worker, handle, worker.control)
        except DiptychError as e:
            error = e.message
            if not self._was_ready and isinstance(e, CheckpointError | ConfigError):
                self._failure = Failure(type(e).__name__, e.message)
        finally:
            # A task of its own: whoever cancels this one again must not interrupt the end of the process.
            self._keep(self._burials, self._bury(worker, handle, error))

    async def _until_started(self, worker: WorkerRecord, handle: WorkerHandle) -> WorkerStarted:
        start = asyncio.ensure_future(handle.start())
        try:
            while not (await asyncio.wait([start], timeout=PLACED_S))[0]:
                worker.waiting_for = await handle.waiting_for()
            worker.waiting_for = ""
            return start.result()
        finally:
            start.cancel()

    async def _until_dead(self, worker: WorkerRecord, handle: WorkerHandle, control: WorkerControl) -> str:
        death = asyncio.ensure_future(handle.wait())
        num_received, num_silent = -1, 0
        try:
            while True:
                done, _ = await asyncio.wait([death], timeout=TICK_S)
                if done:
                    return death.result()
                num_silent = num_silent + 1 if control.num_received == num_received else 0
                num_received = control.num_received
                if num_silent >= SILENT_TICKS:
                    return f"it hangs: silent for {num_silent * TICK_S:g} s"
                role = Role(worker.pool)
                if worker.phase is Phase.READY and control.load.role != ROLE_TO_PROTO[role]:
                    await control.set_role(role)
        finally:
            death.cancel()

    async def _bury(self, worker: WorkerRecord, handle: WorkerHandle | None, error: str) -> None:
        if worker.phase in (Phase.STARTING, Phase.READY):
            now = time.monotonic()
            lived_s = now - worker.ready_at if worker.ready_at else 0.0
            before = self._failures.get(worker.pool, Failures())
            message = f"{worker.worker_id}: {error}"
            self._failures[worker.pool] = after_failure(before, message, lived_s=lived_s, now=now)
            log.warning("lost %s", message)
        # First the routers' view, then the process: nobody should be sent to it meanwhile.
        if worker.phase is not Phase.STOPPING:
            worker.enter(Phase.STOPPING)
            self._publish()
        if worker.control:
            await worker.control.close()
        if handle:
            await handle.kill()
        del self._workers[worker.worker_id]
        self._publish()

    async def _drain(self, worker: WorkerRecord) -> None:
        control = worker.control
        assert control is not None
        deadline = time.monotonic() + self._config.drain_timeout_s
        try:
            while time.monotonic() < deadline:
                if not control.load.draining:
                    await control.drain()
                # Reports come by themselves; the books are compared, which costs a step, only for the last word.
                elif control.num_requests == 0 and await control.is_drained():
                    break
                await asyncio.sleep(DRAIN_POLL_S)
        except DiptychError as e:
            log.warning("%s could not be drained: %s", worker.worker_id, e)
        if worker.phase is Phase.DRAINING:
            self._end(worker)

    # -- one router -------------------------------------------------------------------------------------------------

    async def _keep_router(self, router_id: str) -> None:
        failures = Failures()
        started: RouterStarted | None = None
        self._routers[router_id] = RouterStatus(router_id, "starting")
        while True:
            handle: RouterHandle | None = None
            burial: asyncio.Task[None] | None = None
            ready_at = None
            try:
                handle = await self._launcher.router(router_id, started)
                started = await handle.start()
                self._routers[router_id] = _router_status(router_id, started, failures.last_error)
                ready_at = time.monotonic()
                self._publish()
                error = await handle.wait()
            except DiptychError as e:
                error = e.message
                if not self._was_ready and isinstance(e, ConfigError):
                    self._failure = Failure(type(e).__name__, e.message)
            finally:
                if handle:
                    burial = self._keep(self._burials, handle.kill())
            if burial:
                await burial
            now = time.monotonic()
            log.warning("lost %s: %s", router_id, error)
            failures = after_failure(failures, error, lived_s=now - ready_at if ready_at else 0.0, now=now)
            self._routers[router_id] = RouterStatus(router_id, "starting", last_error=error)
            self._publish()
            await asyncio.sleep(max(failures.retry_at - now, 0.0))

    # -- the fleet, for routers -------------------------------------------------------------------------------------

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
        return self._version, [info for w in self._workers.values() if (info := w.info())]

    # -- targets ----------------------------------------------------------------------------------------------------

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Change the targets of the pools named; `status` tells when they are reached. Raises ConfigError."""
        for pool, number in replicas.items():
            if pool not in self._bounds:
                raise ConfigError(f"there is no pool {pool!r}; pools: {', '.join(self._bounds)}")
            low, high = self._bounds[pool]
            if low < high:
                raise ConfigError(f"pool {pool} scales by itself between {low} and {high}: change min/max_replicas")
            if not 0 <= number <= MAX_REPLICAS:
                raise ConfigError(f"{pool}={number}: a pool has between 0 and {MAX_REPLICAS} workers")
        wanted = self._replicas | dict(replicas)
        try:
            check_targets(wanted)
        except ValueError as e:
            raise ConfigError(str(e)) from e
        self._retarget(wanted)

    def _retarget(self, replicas: dict[str, int]) -> None:
        for pool, number in replicas.items():
            if number != self._replicas[pool]:
                # A person who asks again does not want to wait for an old failure's back-off.
                self._failures.pop(pool, None)
        self._replicas = replicas
        self._launcher.remember(replicas)
        self._wake.set()

    def _autoscale(self) -> None:
        decided = self._autoscaler.look(self._loads(), time.monotonic())
        if any(self._replicas[pool] != number for pool, number in decided.items()):
            log.info("autoscaler: %s", decided)
            self._retarget(self._replicas | decided)

    def _targets(self) -> Targets:
        return Targets(self._replicas, self._groups)

    def _views(self) -> Iterable[WorkerView]:
        return [w.view() for w in self._workers.values()]

    def _loads(self) -> dict[str, PoolCounters]:
        by_pool: dict[str, list[LoadReport]] = {}
        for worker in self._workers.values():
            if worker.phase is Phase.READY and worker.control:
                by_pool.setdefault(worker.pool, []).append(worker.control.load)
        return {pool: PoolCounters.of(reports) for pool, reports in by_pool.items()}

    # -- status -----------------------------------------------------------------------------------------------------

    async def adopted(self) -> None:
        """Waits, ADOPT_S at most, until what an earlier supervisor started is known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_S):
                await self._adopted.wait()

    def status(self) -> ClusterStatus:
        now = time.monotonic()
        workers = self._workers.values()
        ids = {w.started.incarnation: w.worker_id for w in workers if w.started}
        return ClusterStatus(
            name=self._config.name,
            model=self._config.model,
            supervisor_pid=os.getpid(),
            pools=tuple(self._pool_status(pool, now) for pool in self._replicas),
            workers=tuple(w.status(now) for w in workers),
            routers=tuple(self._routers.values()),
            failure=self._failure,
            links=tuple(link for w in workers for link in w.links(ids)),
        )

    async def audit(self) -> dict[str, str]:
        """By worker that is ready: what is wrong with its block bookkeeping, or nothing."""
        ready = [(w.worker_id, w.control) for w in self._workers.values() if w.phase is Phase.READY and w.control]
        found = await asyncio.gather(*(_audit(control) for _, control in ready))
        return dict(zip((worker_id for worker_id, _ in ready), found, strict=True))

    async def experts(self, pool: str | None) -> dict[int, list[int]]:
        """By layer: what has gone to each expert of the workers that are ready, or of those of one pool. Raises
        InternalError, WorkerLost."""
        ready = (w for w in self._workers.values() if w.phase is Phase.READY and pool in {None, w.pool})
        return add_up(await asyncio.gather(*(w.control.state() for w in ready if w.control)))

    def _pool_status(self, pool: str, now: float) -> PoolStatus:
        phases = [w.phase for w in self._workers.values() if w.pool == pool]
        failures = self._failures.get(pool, Failures())
        low, high = self._bounds[pool]
        return PoolStatus(
            name=pool,
            target=self._replicas[pool],
            num_ready=phases.count(Phase.READY),
            num_starting=phases.count(Phase.STARTING),
            num_draining=phases.count(Phase.DRAINING) + phases.count(Phase.STOPPING),
            min_replicas=low,
            max_replicas=high,
            num_failures=failures.count,
            last_error=failures.last_error,
            retry_in_s=max(failures.retry_at - now, 0.0),
        )


async def _audit(control: WorkerControl) -> str:
    try:
        state = await control.state()
    except DiptychError as e:
        return e.message
    num = state.num_unaccounted_blocks
    return f"{num} KV blocks are held by nobody, or twice: a bug, please report it" if num else ""


def _router_status(router_id: str, started: RouterStarted, last_error: str) -> RouterStatus:
    return RouterStatus(router_id, "ready", started.host, started.http_port, started.grpc_port, started.pid, last_error)
