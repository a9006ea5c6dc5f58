"""Drives one request: carries out the actions of its RequestState over links to workers, keeps its deadline, and gives
its tokens to the caller.

Everything but `next` is synchronous: a failure is handled in the moment it arrives, whether the client reads or not.
The driver holds the link of each worker request until that is closed.
"""

import asyncio
import itertools
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...proto import worker_pb2
from ...workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    InternalError,
    Overloaded,
    RequestAborted,
    Unavailable,
)
from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import Request
from ...workers.core.embedding import Embedding
from ..common.admission import RouteForecast, forecast, memory_wait_s, refusal
from ..common.demand import WaitingRequests
from ..common.prediction import Level
from ..common.timings import RequestJournal, RequestTimes, RequestTimings
from .actions import (
    Abort,
    Actions,
    AwaitLostWorkers,
    ChooseRoute,
    ChooseSink,
    CountedTokens,
    FirstToken,
    Forget,
    OfferPrefix,
    OfferSequence,
    Part,
    RequestFacts,
    Route,
    Submit,
    WorkerToken,
)
from .fleet import Fleet, RequestLoad, WorkerInfo
from .migration import MovableRequest
from .output.deliveries import Deliveries
from .policy import RoutingConfig, choose, choose_sink
from .prefix_index import PrefixIndex
from .request_output import MAX_DELTA_TOKENS
from .request_state import RequestState
from .submit_message import num_to_prefill, submit_message
from .token_source import TokenDelta
from .worker_link import WorkerLink

MIN_TIMEOUT_S = 0.001  # time-out of a worker request at its deadline


@dataclass(slots=True)
class RequestDurations:
    """Running mean of the time that requests take, which the router keeps."""

    mean_s: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class RoutingContext:
    """Objects that a router and the drivers of its requests share. The router keeps fleet, links and index current."""

    config: RoutingConfig
    fleet: Fleet
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    links: dict[str, WorkerLink] = field(default_factory=dict[str, WorkerLink])  # by incarnation
    group_routes: dict[str, Route] = field(default_factory=dict[str, Route])  # of the first request of each group
    waiting: WaitingRequests = field(default_factory=WaitingRequests)  # for a worker
    durations: RequestDurations = field(default_factory=RequestDurations)
    deliveries: Deliveries = field(default_factory=Deliveries)
    samples: Iterator[int] = field(default_factory=itertools.count)  # see RequestFacts
    handles: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # ids of worker requests, never reused


def forecasts(context: RoutingContext, route: Route, facts: RequestFacts) -> tuple[RouteForecast, RouteForecast]:
    """Times of a request by a route, now and if its workers were idle, which have measured their steps."""
    fleet, usual, mean_s = context.fleet, context.config.level, context.durations.mean_s
    costs, source, sink = fleet.costs, fleet.view(route.prefill or route.decode), fleet.view(route.decode)
    work = (facts.held_tokens(source.incarnation), facts.num_tokens)
    num_missing = source.used_blocks + facts.num_blocks(source) - source.num_blocks
    memory_s = memory_wait_s(num_missing, source.used_blocks, mean_s)
    now = forecast(source.times(costs, usual), sink.times(costs, usual), *work, memory_s)
    return now, forecast(source.idle_times(costs, usual), sink.idle_times(costs, usual), *work)


class RequestDriver:
    """Driver of one request, and RequestListener of the links that it submits over. `close` it, however it ends."""

    def __init__(self, request: Request, context: RoutingContext) -> None:
        self.state = RequestState(request, context.config.max_attempts)
        self._context = context
        own, config = request.level, context.config
        self.level = Level(own.ttft_s or config.ttft_s, own.tpot_s or config.tpot_s)
        self._links: dict[int, WorkerLink] = {}  # by handle
        self._facts: RequestFacts | None = None  # of the running attempt
        self.revision = self.first_revision = ""  # of its workers, and of those that it begins on; empty: any
        self._loop = asyncio.get_running_loop()
        self.times = RequestTimes(self._loop.time())
        self.journal = request.trace if isinstance(request.trace, RequestJournal) else None
        self._moved_at, self._moved_from = -math.inf, ""  # time and source of its last migration
        self._deadline = self.times.started_at + request.timeout_s
        self._timer = self._loop.call_at(self._deadline, self._expire)
        self._no_worker_timer: asyncio.TimerHandle | None = None  # while no worker can take the request
        self._waiter: asyncio.Future[None] | None = None
        self._was_behind = False  # `next` left tokens for the next call

    def route(self) -> None:
        """Begin an attempt, or wait for a worker."""
        state, context = self.state, self._context
        if state.is_over or state.failures.is_exhausted:
            return
        try:
            self._facts = facts = self._make_facts()
            revision = self.revision if state.token_ids or state.prompt.next > 1 else self.first_revision
            first = "" if facts.group_route is None else facts.group_route.decode
            able = context.fleet.candidates(revision, facts.num_tokens + facts.max_new_tokens, facts.sample, first)
            route = choose(able, facts, context.config, context.fleet.costs)
            if self.state.request.level.refuse and (refused := self._refusal(route, facts)):
                self.fail(refused)
                return
        except Unavailable as e:
            self._wait_for_worker(e, context.config.no_worker_wait_s)
            return
        if facts.group:
            context.group_routes.setdefault(facts.group, route)
        self._stop_waiting()
        if self.times.routed_at is None:
            self.times.routed_at = self._loop.time()
        handoff_id = "" if route.prefill is None else secrets.token_hex(16)
        prefix_id = "" if route.prefix is None else secrets.token_hex(16)
        self._do(self.state.begin(route, handoff_id, context.handles, prefix_id))

    def on_worker(self) -> None:
        """Try again where the request waits for a worker: one has come."""
        if self._no_worker_timer is not None:
            self.route()

    def on_start(self, ready_in_s: float) -> None:
        """Refuse the request where it has not begun, waits for a worker, and cannot wait so long."""
        if self._no_worker_timer is None or self.state.num_attempts:
            return
        now, level = self._loop.time(), self.state.request.level
        due = min(self._deadline, self._no_worker_timer.when())
        if level.refuse:
            due = min(due, self.times.started_at + self.level.ttft_s)
        if now + ready_in_s > due:
            self.fail(
                Overloaded(
                    f"no worker runs, and the one that is being started is expected in {ready_in_s:.0f} s, later than "
                    "the request may wait: try again then, or allow more time",
                    retry_after_s=ready_in_s,
                )
            )

    def movable(self) -> MovableRequest | None:
        """The worker request that may migrate now, if any."""
        state, worker_request = self.state, self.state.movable()
        if worker_request is None:
            return None
        worker, failures = worker_request.worker, state.failures
        return MovableRequest(
            handle=worker_request.handle,
            worker=worker,
            num_tokens=state.num_tokens,
            num_remaining=state.num_remaining,
            began_at=self.times.started_at,
            excluded=frozenset(failures.workers | {sink for source, sink in failures.pairs if source == worker}),
            moved_at=self._moved_at,
            moved_from=self._moved_from,
        )

    def migrate(self, worker: str) -> None:
        """Move the `movable` worker request there."""
        source = self.state.movable()
        assert source is not None
        self._facts = self._make_facts()
        self._moved_at, self._moved_from = self._loop.time(), source.worker
        self._do(self.state.migrate(worker, secrets.token_hex(16), self._context.handles))

    async def next(self) -> TokenDelta:
        """Wait for the tokens since the last call, at least one. They carry timings where more than the total has
        changed. Raises the error that ended the request."""
        state, output = self.state, self.state.output
        if self._was_behind:
            await asyncio.sleep(0)  # let other requests run: this client has many tokens to catch up with
        while True:
            has_output = output.num_taken < len(state.token_ids) or state.prompt.has_embedding
            elapsed_s = self._loop.time() - self.times.started_at
            if has_output and (delta := output.take(state.finish, elapsed_s)) is not None:
                self._was_behind = len(delta.token_ids) == MAX_DELTA_TOKENS
                now = self.times.started_at + delta.elapsed_s
                if self.times.delivered(len(delta.token_ids) or 1, now) or delta.finish_reason is not None:
                    delta.timings = self._timings(now)
                return delta
            if state.error is not None:
                raise state.error
            self._waiter = self._loop.create_future()
            await self._waiter

    def timings(self) -> RequestTimings | None:
        """Timings until the last token that `next` returned; None before the first."""
        last = self.times.last_token_at
        return None if last is None else self._timings(last)

    def _timings(self, now: float) -> RequestTimings | None:
        state = self.state
        return self.times.timings(now, state.num_attempts, state.num_migrations, state.output.notes.drafts)

    def fail(self, error: DiptychError) -> None:
        """End the request with `error`, if it has not ended."""
        self._after(self.state.fail(error))

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._timer.cancel()
        self._stop_waiting()
        self._context.group_routes.pop(self.state.request.group, None)
        self.fail(RequestAborted("the client went away"))

    def on_token(self, handle: int, token: WorkerToken) -> None:
        self._after(self.state.token(handle, token))

    def on_prompt_logprobs(self, handle: int, found: PromptLogprobs) -> None:
        try:
            self.state.prompt.add(found)
        except InternalError as error:
            self.fail(error)

    def on_embedding(self, handle: int, found: Embedding) -> None:
        try:
            self._after(self.state.embedded(handle, found))
        except InternalError as error:
            self.fail(error)

    def on_handed_off(self, handle: int, num_output_tokens: int, handoff_id: str, counts: CountedTokens) -> None:
        self._after(self.state.handed_off(handle, num_output_tokens, handoff_id, counts))

    def on_failed(self, handle: int, error: DiptychError, *, handoff: bool) -> None:
        if handle in self._links:
            self._note("failed", self._links[handle].info, error.code)
        self._after(self.state.failed(handle, error, handoff=handoff))

    def _after(self, actions: Actions) -> None:
        """Finish an event, which may have brought tokens or the request's end."""
        if len(self.times.worker_timings) < 2:
            self.times.accept(self.state.output.notes.timings)
        if actions:
            self._do(actions)
        if self._waiter is not None and not self._waiter.done():
            self._context.deliveries.add(self._waiter)

    def _do(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Submit():
                    self._submit(action)
                case OfferSequence(worker_request, handoff_id):
                    self._note("migrates from", self._links[worker_request.handle].info, worker_request.part.value)
                    offer = worker_pb2.Offer(handle=worker_request.handle, handoff_id=handoff_id)
                    self._links[worker_request.handle].offer(offer)
                case OfferPrefix():
                    self._context.links[action.worker].offer_prefix(self._offer_of(action))
                case FirstToken(worker_request):
                    if worker_request.part in (Part.PREFILL, Part.PREFIX):  # it computes nothing after it
                        self._context.fleet.remove_request(worker_request.handle)
                    else:
                        self._context.fleet.end_prefill(worker_request.handle)
                case Abort(worker_request):
                    self._close_request(worker_request.handle).abort(worker_request.handle)
                case Forget(worker_request):
                    self._close_request(worker_request.handle).forget(worker_request.handle)
                case ChooseRoute():
                    self.route()
                case AwaitLostWorkers(error):
                    self._wait_for_worker(error, self._context.config.worker_timeout_s)
                case ChooseSink():
                    workers = self._context.fleet.of_revision(self.revision).values()
                    sink = choose_sink(workers, self._make_facts(), action.source)
                    self._do(self.state.begin_sink(sink, self._context.handles))

    def _submit(self, submit: Submit) -> None:
        fleet, facts, worker_request = self._context.fleet, self._facts, submit.worker_request
        assert facts is not None
        self.times.submitted_at = now = self._loop.time()
        message = submit_message(submit, self.state, fleet, max(self._deadline - now, MIN_TIMEOUT_S))
        worker = fleet.view(worker_request.worker)
        self.revision = worker.revision
        num_tokens = num_to_prefill(submit, facts)
        decodes = worker_request.part not in (Part.PREFILL, Part.PREFIX)
        tpot_s = self.state.request.level.tpot_s
        load = RequestLoad(worker_request.worker, num_tokens, facts.num_blocks(worker), decodes, tpot_s)
        fleet.add_request(worker_request.handle, load)
        self._note("submitted", worker.info, worker_request.part.value)
        link = self._links[worker_request.handle] = self._context.links[worker_request.worker]
        link.submit(message, self)

    def _note(self, what: str, worker: WorkerInfo, detail: str) -> None:
        if self.journal is not None:
            self.journal.note(self._loop.time(), what, worker.name or worker.incarnation, detail)

    def _offer_of(self, offer: OfferPrefix) -> worker_pb2.OfferPrefix:
        request, tokens = self.state.request, self.state.all_token_ids()[: offer.num_tokens]
        return worker_pb2.OfferPrefix(handoff_id=offer.handoff_id, token_ids=tokens, cache_salt=request.cache_salt)

    def _close_request(self, handle: int) -> WorkerLink:
        """Take it off its worker's load. Returns its link, for the caller to notify."""
        self._context.fleet.remove_request(handle)
        return self._links.pop(handle)

    def _make_facts(self) -> RequestFacts:
        """Facts for the policy. Raises Unavailable before the first worker is known."""
        state, context = self.state, self._context
        context.fleet.model()
        tokens, group = state.all_token_ids(), state.request.group
        cached = context.prefixes.cached_tokens(tokens, context.fleet.block_sizes(), state.request.cache_salt)
        if not state.prompt.is_complete:
            cached = {worker: min(num, state.prompt.max_cached) for worker, num in cached.items()}
        return RequestFacts(
            num_tokens=len(tokens),
            max_new_tokens=state.num_remaining,
            cached_tokens=cached,
            excluded=frozenset(state.failures.workers),
            failed_pairs=frozenset(state.failures.pairs),
            may_hand_off=state.failures.may_hand_off,
            may_split=state.prompt.is_complete,
            sample=next(context.samples),
            group=group,
            group_route=context.group_routes.get(group),
            level=self.level,
        )

    def _refusal(self, route: Route, facts: RequestFacts) -> Overloaded | None:
        """Refusal of a request that has not begun and is predicted to miss its level; None: it may run."""
        began = self.state.num_attempts > 0 or facts.group_route is not None  # the first of its group was taken
        if began or not self._context.fleet.costs.are_known:
            return None
        now, idle = forecasts(self._context, route, facts)
        level = self.level if facts.max_new_tokens > 1 else Level(self.level.ttft_s, math.inf)
        return refusal(now, idle, level, self._context.durations.mean_s)

    def _wait_for_worker(self, error: Unavailable, limit_s: float) -> None:
        if self._no_worker_timer is None:
            self._no_worker_timer = self._loop.call_later(limit_s, self.fail, error)
            self._context.waiting.add()

    def _stop_waiting(self) -> None:
        if self._no_worker_timer is not None:
            self._no_worker_timer.cancel()
            self._no_worker_timer = None
            self._context.waiting.remove()

    def _expire(self) -> None:
        self.fail(
            DeadlineExceeded(
                f"the request was not finished within its {self.state.request.timeout_s:.3g} s "
                f"({len(self.state.token_ids)} tokens made): allow more time or ask for fewer tokens"
            )
        )
