"""One request's path: admit, choose, submit, merge, resume.

    stream ── admit ── RequestDriver ── state decides ──> policy chooses ──> WorkerLink submits
                           ^                                                   │
                           └────────── tokens, failures, a lost worker ────────┘

The Router is what a driver acts through, and the one owner of links, fleet and prefix index. It learns the fleet by
`update_fleet` and keeps its last view. A worker that is not listed any more takes nothing new; its link stays until its
requests have ended or it breaks. Knows neither text nor Ray. Every method is called on one event loop.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from ...proto import worker_pb2
from ...workers.common.errors import DiptychError, Overloaded, Unavailable
from ...workers.common.request import Request
from ...workers.common.wire import submit_from_request
from ...workers.core.prefix_cache import block_hashes
from ...workers.core.runner import ModelInfo
from .actions import OfferPrefix, OfferSequence, Part, Submit, WorkerRequest
from .failures import num_alone
from .fleet import Fleet, RequestLoad, WorkerInfo
from .generation import Health, TokenDelta
from .metrics import RouterMetrics
from .migration_controller import MigrationController
from .policy import RequestFacts, Route, RoutingConfig, choose, choose_sink
from .prefix_index import PrefixIndex
from .request_driver import RequestDriver
from .request_state import RequestState
from .worker_link import WorkerLink

DURATION_WEIGHT = 0.1  # of the newest request in the running mean


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    info: WorkerInfo
    role: str
    is_up: bool
    is_draining: bool
    problem: str  # why there is no link to it
    num_in_flight: int  # of this router
    load: worker_pb2.LoadReport


class Router:
    """A TokenSource (generation.py). `token` is the cluster's, for its workers."""

    def __init__(self, config: RoutingConfig, token: str | None = None) -> None:
        config.validate()
        self.handles = itertools.count(1)
        self._config = config
        self._token = token
        self._fleet = Fleet()
        self._index = PrefixIndex()
        self._metrics = RouterMetrics(self._fleet.views)
        self._links: dict[str, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._drivers: dict[RequestDriver, None] = {}  # oldest first
        self._migrations = MigrationController(config, self._fleet, lambda: self._drivers)
        self._routes: dict[str, Route] = {}  # of groups: the first's
        self._unrouted: dict[RequestDriver, None] = {}  # in order of arrival
        self._mean_duration_s = 1.0
        self._is_running = False

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Dial the workers that are known, and from now on those that come."""
        self._is_running = True
        self._reconcile()

    async def stop(self) -> None:
        """End every request with Unavailable and hang up. Idempotent."""
        self._is_running = False
        for driver in list(self._drivers):
            driver.fail(Unavailable("the router is shutting down: send the request again"))
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    def update_fleet(self, workers: Iterable[WorkerInfo]) -> None:
        """The workers that are, by the supervisor's word. Who is missing takes nothing new."""
        self._fleet.update(workers)
        if self._is_running:
            self._reconcile()
            self._route_waiting()

    def snapshot(self) -> tuple[WorkerSnapshot, ...]:
        return tuple(
            WorkerSnapshot(v.info, v.role.value, v.is_up, v.is_draining, v.problem, v.num_in_flight, v.load)
            for v in self._fleet.views()
        )

    # -- TokenSource ------------------------------------------------------------------------------------------------

    def model(self) -> ModelInfo:
        """Raises Unavailable before the first worker is known."""
        return self._fleet.model()

    def admit(self, num_sequences: int) -> None:
        """Raises Overloaded where that many sequences more would be too many; reserves nothing."""
        limit = self._config.max_in_flight
        if len(self._drivers) + num_sequences > limit:
            self._metrics.refused(num_sequences)
            # Little's law: `limit` sequences end in the mean time that one takes.
            wait_s = self._mean_duration_s * num_sequences / limit
            raise Overloaded(
                f"{len(self._drivers)} sequences are in flight, {num_sequences} more would exceed the {limit} that "
                "this router takes: try again later",
                retry_after_s=min(max(wait_s, 1.0), 60.0),
            )

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The completion's tokens; the last delta has the finish reason. Closing it aborts. Raises DiptychErrors."""
        driver = self._open(request)
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
        return self._fleet.health(len(self._drivers))

    def metrics(self) -> bytes:
        return self._metrics.exposition()

    def _open(self, request: Request) -> RequestDriver:
        if not self._is_running:
            raise Unavailable("the router is not running")
        self.admit(1)
        config = self._config
        driver = RequestDriver(
            request, self, max_attempts=config.max_attempts, no_worker_wait_s=config.no_worker_wait_s
        )
        self._drivers[driver] = None
        self._metrics.began(len(request.prompt_token_ids))
        return driver

    def _close(self, driver: RequestDriver, now: float) -> None:
        driver.close()
        self._drivers.pop(driver, None)
        self._unrouted.pop(driver, None)
        self._routes.pop(driver.state.request.group, None)
        state = driver.state
        self._mean_duration_s += DURATION_WEIGHT * (now - driver.times.started_at - self._mean_duration_s)
        self._metrics.resumes.inc(max(state.num_attempts - 1, 0))
        self._metrics.migrations.inc(state.num_migrations)
        self._metrics.failed_migrations.inc(state.num_failed_migrations)
        self._metrics.cached_tokens.inc(state.num_cached_tokens)
        self._metrics.ended(driver.times, _outcome(state), now, driver.timings())

    # -- RunPort ----------------------------------------------------------------------------------------------------

    def facts(self, state: RequestState) -> RequestFacts:
        """Raises Unavailable before the first worker is known."""
        self._fleet.model()
        tokens = [*state.request.prompt_token_ids, *state.token_ids]
        cached: dict[str, int] = {}
        if self._index:
            for block_size in self._fleet.block_sizes():  # a block's name is of its tokens: one of another size differs
                held = self._index.match(block_hashes(tokens, block_size, state.request.cache_salt))
                cached |= {worker: num_blocks * block_size for worker, num_blocks in held.items()}
        if not state.prompt.is_complete:
            cached = {worker: min(num, state.prompt.max_cached) for worker, num in cached.items()}
        return RequestFacts(
            num_tokens=len(tokens),
            max_new_tokens=state.num_remaining,
            cached_tokens=cached,
            excluded=frozenset(state.excluded),
            failed_pairs=frozenset(state.failed_pairs),
            may_hand_off=state.may_hand_off,
            group=state.request.group,
            beside=self._routes.get(state.request.group),
        )

    def choose(self, facts: RequestFacts) -> Route:
        route = choose(self._fleet.views(), facts, self._config)
        if facts.group:
            self._routes.setdefault(facts.group, route)
        return route

    def choose_sink(self, facts: RequestFacts, source: str) -> str | None:
        return choose_sink(self._fleet.views(), facts, source)

    def submit(self, driver: RequestDriver, submit: Submit) -> None:
        worker_request, facts = submit.worker_request, driver.facts
        assert facts is not None
        message = submit_from_request(worker_request.handle, driver.state.request, list(submit.output_token_ids))
        message.timeout_s = driver.remaining_s
        message.num_alone = num_alone(driver.state.failed_steps, len(submit.output_token_ids))
        if worker_request.part is Part.DECODE or driver.state.prompt.is_complete:  # its source computes the prompt
            message.sampling.ClearField("prompt_logprobs")
        message.first_prompt_logprob = driver.state.prompt.next
        if submit.prefix is not None:
            message.prefix.CopyFrom(self._source(submit.prefix.worker, submit.prefix.handoff_id))
        if submit.source is not None:
            message.source.CopyFrom(self._source(submit.source, submit.handoff_id or ""))
        elif submit.handoff_id is not None:
            message.offer.handoff_id = submit.handoff_id
        num_tokens = 0 if worker_request.part is Part.DECODE else facts.uncached_tokens(worker_request.worker)
        num_blocks = facts.num_blocks(self._fleet.view(worker_request.worker))
        self._fleet.add_request(worker_request.handle, RequestLoad(worker_request.worker, num_tokens, num_blocks))
        self._links[worker_request.worker].submit(message, driver)

    def offer(self, offer: OfferSequence) -> None:
        message = worker_pb2.Offer(handle=offer.worker_request.handle, handoff_id=offer.handoff_id)
        self._links[offer.worker_request.worker].offer(message)

    def offer_prefix(self, driver: RequestDriver, offer: OfferPrefix) -> None:
        state = driver.state
        tokens = [*state.request.prompt_token_ids, *state.token_ids][: offer.num_tokens]
        message = worker_pb2.OfferPrefix(
            handoff_id=offer.handoff_id, token_ids=tokens, cache_salt=state.request.cache_salt
        )
        self._links[offer.worker].offer_prefix(message)

    def _source(self, worker: str, handoff_id: str) -> worker_pb2.HandoffSource:
        address = self._fleet.view(worker).info.address
        return worker_pb2.HandoffSource(handoff_id=handoff_id, address=address, incarnation=worker)

    def first_token(self, worker_request: WorkerRequest) -> None:
        self._fleet.end_prefill(worker_request.handle)
        if worker_request.part is Part.PREFILL:
            self._fleet.remove_request(worker_request.handle)

    def abort(self, worker_request: WorkerRequest) -> None:
        link = self._links.get(worker_request.worker)
        if link is not None:
            link.abort(worker_request.handle)
        self._end(worker_request)

    def forget(self, worker_request: WorkerRequest) -> None:
        link = self._links.get(worker_request.worker)
        if link is not None:
            link.forget(worker_request.handle)
        self._end(worker_request)

    def drains(self, worker: str) -> None:
        self._fleet.drains(worker)
        self._migrations.look_soon()

    def wait_for_worker(self, driver: RequestDriver) -> None:
        self._unrouted[driver] = None

    def _route_waiting(self) -> None:
        waiting, self._unrouted = list(self._unrouted), {}
        for driver in waiting:
            driver.route()

    def _end(self, worker_request: WorkerRequest) -> None:
        self._fleet.remove_request(worker_request.handle)
        self._migrations.on_end(worker_request.worker)
        self._retire(worker_request.worker)

    # -- LinkOwner --------------------------------------------------------------------------------------------------

    def on_hello(self, info: WorkerInfo, hello: worker_pb2.Hello) -> None:
        self._fleet.welcome(info.incarnation, hello)

    def on_up(self, info: WorkerInfo) -> None:
        self._route_waiting()
        self._migrations.look_soon()

    def on_load(self, info: WorkerInfo, load: worker_pb2.LoadReport) -> None:
        self._fleet.report(info.incarnation, load)
        self._migrations.on_load(info.incarnation)

    def on_blocks(self, info: WorkerInfo, events: worker_pb2.BlockEvents) -> None:
        self._index.apply(info.incarnation, events, self._fleet.view(info.incarnation).num_blocks)

    def on_down(self, info: WorkerInfo, reason: str) -> None:
        self._fleet.down(info.incarnation, reason)
        self._index.drop(info.incarnation)

    # -- links ------------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        for view in self._fleet.views():
            if not view.is_listed:
                self._retire(view.incarnation)
            elif view.incarnation not in self._links:
                self._links[view.incarnation] = WorkerLink(view.info, self._token, self._config, self)

    def _retire(self, worker: str) -> None:
        """Hang up on a worker that is not listed any more, once nothing of ours drivers there."""
        link = self._links.get(worker)
        if link is None or not link.is_idle:
            return
        view = self._fleet.view(worker)
        if view.is_listed or view.num_in_flight:
            return
        del self._links[worker]
        self._fleet.forget(worker)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _outcome(state: RequestState) -> str:
    """The finish reason, or the error's code."""
    if state.finish is not None:
        return state.finish.value
    assert isinstance(state.error, DiptychError)
    return state.error.code
