"""Router: admits requests, drives each to its end, and keeps the links to the workers.

    stream ── admit ── RequestDriver ── its RequestState decides ──> WorkerLink submits
                            ^                                            │
                            └─── tokens, failures, a lost worker ────────┘

The router learns the fleet by `update_fleet`, and keeps the last list that it got. A worker that is not listed any
more gets no new request; its link stays until its requests have ended or it breaks. Knows neither text nor
Ray. Every method is called on one event loop.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from prometheus_client.metrics_core import Metric

from ...proto import worker_pb2
from ...workers.common.errors import DiptychError, Unavailable
from ...workers.common.request import Request
from ...workers.common.tls import LinkTls
from ...workers.core.runner import ModelInfo
from ..common.admission import RouterOutlook
from ..common.demand import ControlReport, WaitingRequests
from .actions import NUM_TIMED, RequestFacts
from .fleet import Fleet, FleetWorker, WorkerInfo
from .metrics import RequestTotals, RouterMetrics
from .migration_controller import MigrationController
from .policy import RoutingConfig, choose
from .recall.keyed_requests import KeyedRequests, KnownTokens
from .request_driver import RequestDriver, RoutingContext, forecasts
from .request_state import RequestState
from .token_source import Health, TokenDelta
from .worker_link import LINK_CLOSED, WorkerLink

DURATION_WEIGHT = 0.1  # of the newest request in the running mean


class RouterObserver(Protocol):
    """Observer of a router's workers and requests. Called on its event loop; must not block."""

    def on_up(self, info: WorkerInfo) -> None: ...
    def on_down(self, info: WorkerInfo, reason: str) -> None: ...
    def on_draining(self, info: WorkerInfo) -> None: ...
    def on_gone(self, info: WorkerInfo) -> None:
        """The router has forgotten a worker that the supervisor does not list any more."""
        ...

    def on_move(self, cause: str, source: str, target: str) -> None:
        """A migration begins. `cause`: drain, budget or memory; `source`, `target`: incarnations."""
        ...

    def on_ended(self, driver: RequestDriver, outcome: str, now: float) -> None:
        """A request has ended. `outcome`: finish reason or error code; `now`: loop s."""
        ...


class Router:
    """TokenSource (token_source.py) over the workers of a cluster. `token`: shared secret of the cluster."""

    def __init__(self, config: RoutingConfig, token: str | None = None, tls: LinkTls | None = None) -> None:
        config.validate()
        self._config = config
        self._token = token
        self._tls = tls
        self._context = RoutingContext(config, Fleet(config.level))
        self._fleet, self._links = self._context.fleet, self._context.links
        self._metrics = RouterMetrics(self._fleet.views)
        self._closing: set[asyncio.Task[None]] = set()
        self._drivers: dict[RequestDriver, None] = {}  # oldest first
        self._migrations = MigrationController(config, self._fleet, self._drivers.keys(), self._on_move)
        self._keyed = KeyedRequests()
        self._is_running = False
        self.control = ControlReport()  # the last one of the supervisor
        self.control_at = -math.inf  # when it came, monotonic s
        self.observer: RouterObserver | None = None

    async def start(self) -> None:
        """Connect to the known workers, and from now on to new ones."""
        self._is_running = True
        self._reconcile()

    async def stop(self) -> None:
        """End every request with Unavailable and close the links. Idempotent."""
        self._is_running = False
        for driver in list(self._drivers):
            driver.fail(Unavailable("the router is shutting down: send the request again"))
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    def update_fleet(self, workers: Iterable[WorkerInfo]) -> None:
        """Take the supervisor's list of workers. A worker that is missing gets no new request."""
        self._fleet.update(workers)
        if self._is_running:
            self._reconcile()
            self._route_waiting()

    def workers(self) -> list[FleetWorker]:
        """Known workers, with their current state."""
        return self._fleet.views()

    @property
    def waiting(self) -> WaitingRequests:
        """Requests for which there is no worker."""
        return self._context.waiting

    def on_control(self, report: ControlReport) -> None:
        """Take the supervisor's word of when a worker comes, and its metrics."""
        self.control, self.control_at = report, time.monotonic()
        self._metrics.control.take(report.series, self.control_at)
        if report.ready_in_s is not None:
            for driver in list(self._drivers):
                driver.on_start(report.ready_in_s)

    def model(self) -> ModelInfo:
        """Raises Unavailable before the first worker is known; who asked counts as one that waits."""
        try:
            return self._fleet.model()
        except Unavailable:
            self._context.waiting.refuse()
            raise

    def admit(self, num_sequences: int) -> None:
        """Raises Overloaded where that many sequences more would be too many; reserves nothing."""
        if len(self._drivers) + num_sequences > self._config.max_in_flight:
            self._metrics.refused(num_sequences)
            refused = self._load().excess(num_sequences)
            assert refused is not None
            raise refused

    def outlook(self) -> RouterOutlook:
        """Load, and what the policy predicts for the least request now."""
        load, context, config = self._load(), self._context, self._config
        facts = RequestFacts(num_tokens=1, max_new_tokens=2, cached_tokens={}, sample=next(context.samples))
        try:
            route = choose(self._fleet.by_incarnation(), facts, config, self._fleet.costs)
        except Unavailable:
            return load
        if not self._fleet.costs.are_known:
            return load
        now, idle = forecasts(context, route, facts)
        return replace(load, now=now, idle=idle)

    def _load(self) -> RouterOutlook:
        config, mean_s = self._config, self._context.durations.mean_s
        return RouterOutlook(len(self._drivers), config.max_in_flight, mean_s, config.level)

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """Tokens of the request; the last delta has the finish reason. Closing it aborts. Raises DiptychErrors."""
        recalled = KnownTokens()
        if request.record is not None:
            links = [(self._fleet.view(worker).revision, link) for worker, link in self._links.items()]
            recalled = await self._keyed.recall(request, links, self._fleet.model().vocab_size)
        driver = self._open(request, recalled)
        try:
            driver.route()
            while True:
                delta = await driver.next()
                self._metrics.delivered(driver.times, len(delta.token_ids), driver.times.started_at + delta.elapsed_s)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._close(driver, asyncio.get_running_loop().time())

    def health(self) -> Health:
        found, may_be_empty = self._fleet.health(len(self._drivers)), self._config.may_be_empty
        return replace(found, ready=found.ready or may_be_empty, may_be_empty=may_be_empty)

    def metrics(self) -> bytes:
        return self._metrics.exposition()

    def metric_families(self) -> Iterable[Metric]:
        """Metrics before they become text."""
        return self._metrics.families()

    def requests(self) -> list[RequestDriver]:
        """Requests in flight, oldest first."""
        return list(self._drivers)

    @property
    def totals(self) -> RequestTotals:
        """Counts since the start."""
        return self._metrics.totals()

    @property
    def num_moves(self) -> Mapping[str, int]:
        """Migrations that began since the start, by cause: drain, budget or memory."""
        return self._migrations.num_moves

    def _open(self, request: Request, recalled: KnownTokens) -> RequestDriver:
        """Begin a request, after the tokens of it that are known. Raises IdempotencyKeyReused."""
        if not self._is_running:
            raise Unavailable("the router is not running")
        self.admit(1)
        if request.record is not None:
            self._keyed.check(request)
        driver = RequestDriver(request, self._context)
        if request.record is not None:
            _restore(driver, self._keyed.begin(request, driver, recalled))
        self._drivers[driver] = None
        self._metrics.began(len(request.prompt_token_ids))
        return driver

    def _close(self, driver: RequestDriver, now: float) -> None:
        driver.close()
        if driver.state.request.record is not None:
            self._keyed.end(driver.state.request, driver)
        self._drivers.pop(driver, None)
        state = driver.state
        if driver.times.routed_at is not None:
            durations = self._context.durations
            durations.mean_s += DURATION_WEIGHT * (now - driver.times.started_at - durations.mean_s)
        self._metrics.resumes.inc(max(state.num_attempts - 1, 0))
        self._metrics.migrations.inc(state.num_migrations)
        self._metrics.failed_migrations.inc(state.num_failed_migrations)
        self._metrics.cached_tokens.inc(state.output.notes.num_cached)
        outcome = _outcome(state)
        self._metrics.ended(driver.times, outcome, now, driver.timings())
        self._metrics.judged(driver.times, state.request.level, driver.level, outcome)
        if self.observer is not None:
            self.observer.on_ended(driver, outcome, now)
        if (journal := driver.journal) is not None:
            journal.times, journal.timings, journal.error = driver.times, driver.timings(), state.error
            journal.num_cached, journal.ended_at = state.output.notes.num_cached, now

    def _route_waiting(self) -> None:
        for driver in list(self._drivers):
            driver.on_worker()

    def on_hello(self, info: WorkerInfo, hello: worker_pb2.Hello) -> None:
        self._fleet.register(info.incarnation, hello)

    def on_up(self, info: WorkerInfo) -> None:
        if self.observer is not None:
            self.observer.on_up(info)
        for driver in self._drivers:
            driver.state.failures.answers_again(info.incarnation)
        self._route_waiting()
        self._migrations.look_soon()

    def on_load(self, info: WorkerInfo, load: worker_pb2.LoadReport) -> None:
        if load.draining and not self._fleet.is_draining(info.incarnation) and self.observer is not None:
            self.observer.on_draining(info)
        self._fleet.report(info.incarnation, load)
        self._migrations.on_load(info.incarnation)

    def on_blocks(self, info: WorkerInfo, events: worker_pb2.BlockEvents) -> None:
        self._context.prefixes.apply(info.incarnation, events, self._fleet.view(info.incarnation).num_blocks)

    def on_down(self, info: WorkerInfo, reason: str) -> None:
        if self.observer is not None and reason != LINK_CLOSED:
            self.observer.on_down(info, reason)
        self._fleet.down(info.incarnation, reason)
        self._context.prefixes.drop(info.incarnation)

    def on_draining(self, info: WorkerInfo) -> None:
        if self.observer is not None and not self._fleet.is_draining(info.incarnation):
            self.observer.on_draining(info)
        self._fleet.drains(info.incarnation)
        self._migrations.look_soon()

    def on_closed(self, info: WorkerInfo) -> None:
        self._migrations.on_end(info.incarnation)
        self._retire(info.incarnation)

    def _on_move(self, cause: str, source: str, target: str) -> None:
        if self.observer is not None:
            self.observer.on_move(cause, source, target)

    def _reconcile(self) -> None:
        for view in self._fleet.views():
            if not view.is_listed:
                self._retire(view.incarnation)
            elif view.incarnation not in self._links:
                self._links[view.incarnation] = WorkerLink(view.info, self._token, self._config, self, self._tls)

    def _retire(self, worker: str) -> None:
        """Close the link to a worker that is not listed any more, once no request of this router runs there."""
        link = self._links.get(worker)
        if link is None or not link.is_idle:
            return
        view = self._fleet.view(worker)
        if view.is_listed or view.num_in_flight:
            return
        del self._links[worker]
        self._fleet.forget(worker)
        self._migrations.forget(worker)
        if self.observer is not None:
            self.observer.on_gone(view.info)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _restore(driver: RequestDriver, known: KnownTokens) -> None:
    """Let a request begin after tokens that are known, with the same weights. How long they took is not known."""
    state, times, token_ids = driver.state, driver.times, known.token_ids
    driver.revision = driver.first_revision = known.revision
    state.token_ids += token_ids
    state.output.notes.timings += [None] * min(len(token_ids), NUM_TIMED)
    times.submitted_at = times.started_at
    times.accept(state.output.notes.timings)


def _outcome(state: RequestState) -> str:
    """Finish reason or error code, for the metrics."""
    if state.finish is not None:
        return state.finish.value
    assert isinstance(state.error, DiptychError)
    return state.error.code
