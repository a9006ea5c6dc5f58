"""Drives one request's state: does what it decides, keeps its deadline, and hands its tokens to whoever waits.

Everything but `next` is synchronous: a failure is answered in the moment in which it is heard, whether the client is
reading or not. Knows no stream and no policy: its RunPort does.
"""

import asyncio
import math
import secrets
from collections.abc import Iterator
from typing import Protocol

from ...workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    InternalError,
    RequestAborted,
    Unavailable,
    WorkerDraining,
)
from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import Request
from ..common.timings import RequestTimes, RequestTimings
from .actions import (
    Abort,
    Actions,
    ChooseRoute,
    ChooseSink,
    FirstToken,
    Forget,
    OfferPrefix,
    OfferSequence,
    Submit,
    WorkerRequest,
    WorkerToken,
)
from .generation import TokenDelta
from .policy import RequestFacts, Route
from .request_state import MAX_DELTA_TOKENS, RequestState


class RunPort(Protocol):
    """What a run asks of its router. Nothing here blocks."""

    @property
    def handles(self) -> Iterator[int]: ...
    def facts(self, state: RequestState) -> RequestFacts: ...
    def choose(self, facts: RequestFacts) -> Route:
        """Raises Unavailable."""
        ...

    def choose_sink(self, facts: RequestFacts, source: str) -> str | None: ...
    def submit(self, driver: "RequestDriver", submit: Submit) -> None: ...
    def offer(self, offer: OfferSequence) -> None: ...
    def offer_prefix(self, driver: "RequestDriver", offer: OfferPrefix) -> None: ...
    def first_token(self, worker_request: WorkerRequest) -> None: ...
    def abort(self, worker_request: WorkerRequest) -> None: ...
    def forget(self, worker_request: WorkerRequest) -> None: ...
    def drains(self, worker: str) -> None: ...
    def wait_for_worker(self, driver: "RequestDriver") -> None:
        """`driver.route` is called when a worker has come."""
        ...


class RequestDriver:
    """A RequestListener. `close` it, however it ends."""

    def __init__(self, request: Request, port: RunPort, *, max_attempts: int, no_worker_wait_s: float) -> None:
        self.state = RequestState(request, max_attempts)
        self.facts: RequestFacts | None = None  # that the running attempt was chosen by
        self._port = port
        self._no_worker_wait_s = no_worker_wait_s
        self._loop = asyncio.get_running_loop()
        self.times = RequestTimes(self._loop.time())
        self.moved_at = -math.inf  # when it was last told to migrate, and from where
        self.moved_from = ""
        self._deadline = self.times.started_at + request.timeout_s
        self._timer = self._loop.call_at(self._deadline, self._expire)
        self._patience: asyncio.TimerHandle | None = None  # while no worker is there
        self._waiter: asyncio.Future[None] | None = None
        self._was_behind = False  # `next` could not give all that was there

    @property
    def remaining_s(self) -> float:
        return max(self._deadline - self._loop.time(), 0.001)

    def route(self) -> None:
        """Begin an attempt, or wait for a worker. For the first time, and whenever a worker has come."""
        if self.state.is_over:
            return
        try:
            self.facts = self._port.facts(self.state)
            route = self._port.choose(self.facts)
        except Unavailable as e:
            self._wait_for_worker(e)
            return
        self._lose_patience()
        if self.times.routed_at is None:
            self.times.routed_at = self._loop.time()
        handles = self._port.handles
        self._do(self.state.begin(route, secrets.token_hex(16), handles, prefix_id=secrets.token_hex(16)))

    def migrate(self, worker: str) -> None:
        """Move the state's `movable` worker request there."""
        self.facts = self._port.facts(self.state)
        worker_request = self.state.movable()
        assert worker_request is not None
        self.moved_at, self.moved_from = self._loop.time(), worker_request.worker
        self._do(self.state.migrate(worker, secrets.token_hex(16), self._port.handles))

    async def next(self) -> TokenDelta:
        """The tokens since the last call, at least one. Raises what ended the request."""
        if self._was_behind:
            await asyncio.sleep(0)  # for others: the client has much to catch up with
        while True:
            delta = self.state.take(self._loop.time() - self.times.started_at)
            if delta is not None:
                self._was_behind = len(delta.token_ids) == MAX_DELTA_TOKENS
                return self._timed(delta)
            if self.state.error is not None:
                raise self.state.error
            self._waiter = self._loop.create_future()
            await self._waiter

    def timings(self) -> RequestTimings | None:
        """Until the last token that `next` gave; None before the first."""
        last, state = self.times.last_token_at, self.state
        return None if last is None else self.times.timings(last, state.num_attempts, state.num_migrations)

    def fail(self, error: DiptychError) -> None:
        self._do(self.state.fail(error))
        self._wake()

    def close(self) -> None:
        """Idempotent: what still runs is aborted."""
        self._timer.cancel()
        self._lose_patience()
        self.fail(RequestAborted("the client went away"))

    # -- RequestListener --------------------------------------------------------------------------------------------

    def on_token(self, handle: int, token: WorkerToken) -> None:
        self._after(self.state.token(handle, token))

    def on_prompt_logprobs(self, handle: int, found: PromptLogprobs) -> None:
        try:
            self.state.prompt.add(found)
        except InternalError as error:
            self.fail(error)

    def on_handed_off(self, handle: int, num_output_tokens: int, handoff_id: str) -> None:
        self._after(self.state.handed_off(handle, num_output_tokens, handoff_id))

    def on_failed(self, handle: int, error: DiptychError, *, handoff: bool) -> None:
        if isinstance(error, WorkerDraining):
            for worker_request in self.state.worker_requests():
                if worker_request.handle == handle:
                    self._port.drains(worker_request.worker)
        self._after(self.state.failed(handle, error, handoff=handoff))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _after(self, actions: Actions) -> None:
        """An event was heard: it may have brought tokens."""
        if len(self.times.words) < 2:
            self.times.accepted(self.state.timings)
        if actions:
            self._do(actions)
        self._wake()

    def _do(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Submit():
                    self.times.submitted_at = self._loop.time()
                    self._port.submit(self, action)
                case OfferSequence():
                    self._port.offer(action)
                case OfferPrefix():
                    self._port.offer_prefix(self, action)
                case FirstToken():
                    self._port.first_token(action.worker_request)
                case Abort():
                    self._port.abort(action.worker_request)
                case Forget():
                    self._port.forget(action.worker_request)
                case ChooseRoute():
                    self.route()
                case ChooseSink():
                    sink = self._port.choose_sink(self._port.facts(self.state), action.source)
                    self._do(self.state.begin_sink(sink, self._port.handles))

    def _timed(self, delta: TokenDelta) -> TokenDelta:
        """With the request's timings where they have changed by more than their total."""
        now, state = self.times.started_at + delta.elapsed_s, self.state
        if self.times.delivered(len(delta.token_ids), now) or delta.finish_reason is not None:
            delta.timings = self.times.timings(now, state.num_attempts, state.num_migrations)
        return delta

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _wait_for_worker(self, error: Unavailable) -> None:
        if self._patience is None:
            self._patience = self._loop.call_later(self._no_worker_wait_s, self.fail, error)
        self._port.wait_for_worker(self)

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _expire(self) -> None:
        request = self.state.request
        self.fail(
            DeadlineExceeded(
                f"the request was not finished within its {request.timeout_s:.3g} s "
                f"({len(self.state.token_ids)} tokens made): allow more time or ask for fewer tokens"
            )
        )
