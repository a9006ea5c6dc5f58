"""State machine of one request in its router: prompt, tokens so far, and the worker requests that make the next tokens.
Pure: events in, actions out; no clock, no socket.

    start ─> CHOOSING ──begin──> RUNNING ──the last token──> FINISHED
                 ^                  │ └──deadline, bad request, too many failures, client gone──> FAILED
                 └──── a worker request failed: resume after the tokens so far ────┘

An attempt is one worker request that does everything (ALONE), or two:

    PREFILL   makes the token at position `start`, and offers the sequence's KV
    DECODE    pulls that KV and makes every token after it

or, where the route moves inside the prompt:

    PREFIX    computes the beginning of the prompt, and offers its KV
    ALONE     pulls that KV and does everything after it; without that KV, it does everything

A worker request that decodes may `migrate`: it becomes the source A of a live hand-off to a DECODE worker request B on
another worker, and makes tokens until B has caught up. Then it reports that it has handed off, and B goes on.
The two send over different streams, so their events may come in any order:
    a DECODE token before the source's last one kept until that one is here
    PREFILL is lost or fails, its token missing resume; kept tokens are dropped, they come again
    PREFILL is lost or fails after its token    nothing: DECODE has the KV, or reports that it has not
    DECODE is lost before it pulled             another sink is sent to the same offer
    DECODE could not reach its source           the same: the KV is there still
    DECODE fails while the PREFILL token is due wait for it: it may be the last one; else resume after it
    A's token after B failed                    accepted: A runs on; the pair is not tried again
    A hands off after B failed                  another sink is sent to the same offer, or resume
    A finishes the request before it hands off  finished; B is aborted
    A is lost or fails before it handed off     resume: B will not get what it waits for
    A is lost or fails after it handed off      nothing: B has the KV, or reports that it has not
    B's first token before A's last, then B or A lost
                                                B: wait for A's tokens, then resume; A: resume
    B's first token before "handed off"         if no token is missing between, it means "handed off"
    a step fails                                resume; at first the request is computed in steps of its own, so that a
                                                second failed step shows the cause: RequestFailsSteps
    PREFIX is lost or fails                     nothing: ALONE computes what it does not get
    PREFIX is refused by a worker that drains   resume: its offer never came
    ALONE is lost before its first token        another sink is sent to the offer of the PREFIX, once; else resume
    the last attempt fails, a worker was lost   wait: one that answers again gives its attempt back
    a token twice, or of a closed request       dropped
    a token after a gap                         InternalError: no answer is better than a wrong one

A source is closed when the sink's first token has its place: the sink committed. Every worker request that was
submitted is closed exactly once: by Abort (its worker must stop) or Forget (it has already stopped).
"""

from collections.abc import Iterator

from ...workers.common.errors import (
    DiptychError,
    HandoffError,
    InternalError,
    SequenceEnded,
    StepFailed,
    WorkerDraining,
)
from ...workers.common.request import FinishReason, Request
from ...workers.core.embedding import Embedding
from .actions import (
    NUM_TIMED,
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
    PrefixPull,
    Route,
    Submit,
    WorkerRequest,
    WorkerToken,
)
from .failures import RequestFailures, is_on_the_way
from .request_handoff import Gap, PromptSplit, RequestHandoff
from .request_output import RequestOutput

MAX_FAILED_MIGRATIONS = 3  # of a request; after them it does not move again
_NOTHING: Actions = ()


class RequestState:
    """State of one request. The caller carries out the actions of each event in order, then takes the `output`."""

    def __init__(self, request: Request, max_attempts: int) -> None:
        self.request = request
        self.output = output = RequestOutput(request)
        self.token_ids, self.prompt = output.token_ids, output.prompt
        self.finish: FinishReason | None = None
        self.error: DiptychError | None = None
        self.failures = RequestFailures(request.request_id, max_attempts)
        self.num_attempts = 0  # started routes, and second sinks of one offer
        self.num_migrations = 0
        self.num_failed_migrations = 0
        self._max_tokens = request.max_new_tokens
        # The running attempt:
        self._worker_requests: dict[int, WorkerRequest] = {}
        self._handoff: RequestHandoff | None = None
        self._split: PromptSplit | None = None  # until the first token

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def all_token_ids(self) -> list[int]:
        """Tokens of the prompt and of the output so far."""
        return [*self.request.prompt_token_ids, *self.token_ids]

    @property
    def num_remaining(self) -> int:
        return self._max_tokens - len(self.token_ids)

    def worker_requests(self) -> list[WorkerRequest]:
        return list(self._worker_requests.values())

    def movable(self) -> WorkerRequest | None:
        """Worker request that may migrate now: it decodes, and does not migrate already."""
        handoff = self._handoff
        is_moving = handoff is not None and not (handoff.runs_on and handoff.sink is None)
        if is_moving or self.is_over or self.num_failed_migrations >= MAX_FAILED_MIGRATIONS:
            return None
        return next((r for r in self._worker_requests.values() if r.has_token), None)

    def moving(self) -> WorkerRequest | None:
        """Source of the running migration, if there is one."""
        handoff = self._handoff
        return handoff.source if handoff is not None and handoff.is_live and handoff.sink is not None else None

    def begin(self, route: Route, handoff_id: str, handles: Iterator[int], prefix_id: str = "") -> Actions:
        """Begin an attempt along `route`. `handoff_id`: for a route of two workers; `prefix_id`: for one that pulls a
        prefix. Handles are never reused."""
        assert not self._worker_requests and not self.is_over
        self.num_attempts += 1
        output = tuple(self.token_ids)
        offers: list[OfferPrefix] = []
        pull: PrefixPull | None = None
        if route.prefix is not None:
            offers = [OfferPrefix(route.prefix.holder, prefix_id, route.prefix.num_tokens)]
            pull = PrefixPull(route.prefix.holder, prefix_id)
        if route.prefill is None:
            alone = self._open(next(handles), route.decode, Part.ALONE)
            return [*offers, Submit(alone, output, prefix=pull)]
        if route.move_at is not None:
            source = self._open(next(handles), route.prefill, Part.PREFIX)
            sink = self._open(next(handles), route.decode, Part.ALONE)
            self._split = split = PromptSplit(handoff_id, source, sink, output, route.move_at)
            return [*offers, split.submit_source(pull), split.submit_sink(sink)]
        source = self._open(next(handles), route.prefill, Part.PREFILL)
        sink = self._open(next(handles), route.decode, Part.DECODE)
        self._handoff = RequestHandoff(handoff_id, source, sink, output, end=len(output) + 1)
        return [*offers, Submit(source, output, handoff_id, prefix=pull), self._handoff.submit_sink(sink)]

    def migrate(self, worker: str, handoff_id: str, handles: Iterator[int]) -> Actions:
        """Move the `movable` worker request to `worker`. `handoff_id` is new."""
        source = self.movable()
        assert source is not None and source.worker != worker
        sink = self._open(next(handles), worker, Part.DECODE)
        source.offers.append(handoff_id)
        self._handoff = RequestHandoff(handoff_id, source, sink, tuple(self.token_ids))
        return [OfferSequence(source, handoff_id), self._handoff.submit_sink(sink)]

    def begin_sink(self, worker: str | None, handles: Iterator[int]) -> Actions:
        """Let `worker` pull the open offer; None: there is no other sink."""
        offered = self._split or self._handoff
        assert offered is not None and offered.sink_error is not None
        is_split = isinstance(offered, PromptSplit)
        if worker is None:
            return self._resume(offered.sink_error) if is_split else self._resume_if_due(offered, offered.sink_error)
        offered.sink_error = None
        self.num_attempts += 1
        offered.sink = sink = self._open(next(handles), worker, Part.ALONE if is_split else Part.DECODE)
        return [offered.submit_sink(sink)]

    def token(self, handle: int, token: WorkerToken) -> Actions:
        worker_request = self._worker_requests.get(handle)
        if worker_request is None:
            return _NOTHING
        if worker_request.part is Part.PREFIX:
            return self.fail(InternalError("a worker sent a token of a prompt of which only the KV was asked for"))
        first: list[FirstToken | Abort] = [] if worker_request.has_token else [FirstToken(worker_request)]
        worker_request.has_token = True
        if self._split is not None:
            source = self._worker_requests.pop(self._split.source.handle, None)  # not needed any more
            first += [] if source is None else [Abort(source)]
            token = token if token.cached is None else token._replace(cached=self._split.count(token.cached))
            self._split = None
        handoff = self._handoff
        if handoff is None:
            actions = self._accept(token)
        else:
            try:
                actions = self._accept_in_handoff(handoff, worker_request, token)
            except Gap as gap:
                actions = self.fail(gap.error)
        return [*first, *actions] if first else actions

    def embedded(self, handle: int, found: Embedding) -> Actions:
        """End the request with what it asked for. Raises InternalError where that was no embedding."""
        if handle not in self._worker_requests:
            return _NOTHING
        self.output.embed(found)
        return self._finish(FinishReason.STOP)

    def handed_off(self, handle: int, num_output_tokens: int, handoff_id: str, counts: CountedTokens) -> Actions:
        """The source of a migration was sealed after `num_output_tokens` tokens: no more come from it. Or the KV of a
        PREFIX is there; `counts`: of its part of the prompt."""
        worker_request, handoff = self._worker_requests.get(handle), self._handoff
        if worker_request is None or worker_request.part is Part.PREFIX:
            return _NOTHING if worker_request is None else self._prefix_computed(worker_request, counts)
        if handoff is None or not handoff.was_offered(worker_request, handoff_id):
            return self.fail(InternalError("a worker handed off a sequence that was not offered"))
        if num_output_tokens != len(self.token_ids):
            return self.fail(Gap(num_output_tokens, len(self.token_ids)).error)
        aborted: Actions = _NOTHING
        if handoff_id != handoff.id:
            if not handoff.runs_on:
                return self.fail(InternalError("a worker handed off a sequence twice"))
            aborted = self._return_to_offer(handoff, handoff_id)
        try:
            handoff.seal(num_output_tokens)
        except Gap as gap:
            return [*aborted, *self.fail(gap.error)]
        return aborted if handoff.sink is not None else [*aborted, *self._another_sink(handoff)]

    def _prefix_computed(self, worker_request: WorkerRequest, counts: CountedTokens) -> Actions:
        assert self._split is not None
        self._split.source_counts = counts
        return [FirstToken(worker_request)]

    def _return_to_offer(self, handoff: RequestHandoff, handoff_id: str) -> Actions:
        """Return to an earlier offer, whose sink had failed: the source was sealed for it before it got the newer one,
        which is void."""
        handoff.id = handoff_id
        sink, handoff.sink = handoff.sink, None
        if sink is None:
            return _NOTHING
        handoff.sink_error = HandoffError("the sequence was handed off for an earlier offer")
        del self._worker_requests[sink.handle]
        return [Abort(sink)]

    def _accept_in_handoff(self, handoff: RequestHandoff, worker_request: WorkerRequest, token: WorkerToken) -> Actions:
        """Take a token of the source or of the sink. Raises Gap."""
        if worker_request is handoff.source:
            handoff.check_source(token)
            actions = self._accept(token)
            if self.is_over:
                return actions
            if len(self.token_ids) == handoff.end:
                handoff.seal(len(self.token_ids))
        else:
            handoff.hold(token, len(self.token_ids), self._max_tokens)
        if handoff.is_joined(len(self.token_ids)):
            return self._join(handoff)
        if handoff.sink_error is not None and handoff.is_sealed:
            return self._resume(handoff.sink_error)
        return _NOTHING

    def _join(self, handoff: RequestHandoff) -> Actions:
        """End the hand-off: the sink's tokens follow the source's."""
        self._handoff = None
        self.num_migrations += handoff.is_live
        source = self._worker_requests.pop(handoff.source.handle, None)
        actions: list[Forget] = [] if source is None else [Forget(source)]
        following: Actions = _NOTHING
        for token in handoff.take_early():
            if not self.is_over:
                following = self._accept(token)
        if handoff.sink_error is not None and not self.is_over:
            following = self._resume(handoff.sink_error)
        return [*actions, *following]

    def _accept(self, token: WorkerToken) -> Actions:
        expected = len(self.token_ids)
        if token.position != expected:
            return self.fail(Gap(token.position, expected).error) if token.position > expected else _NOTHING
        output, wants_logprobs = self.output, self.request.sampling.logprobs is not None
        if (wants_logprobs and token.logprob is None) or (expected == 0 and not self.prompt.is_complete):
            return self.fail(InternalError("a worker sent a token without the log-probabilities asked for"))
        if wants_logprobs and token.logprob is not None:
            output.logprobs.append(token.logprob)
        if expected < NUM_TIMED or token.drafts is not None or token.worker != output.notes.worker:
            output.notes.add(token, len(self.request.prompt_token_ids))
        output.token_ids.append(token.token_id)
        if token.finish is not None:
            return self._finish(token.finish)
        if len(self.token_ids) == self._max_tokens:
            return self.fail(InternalError("a worker made max_tokens tokens and did not finish"))
        return _NOTHING

    def _finish(self, finish: FinishReason) -> Actions:
        """End the request. A sink that still waits for KV must be aborted."""
        self.finish = finish
        worker_requests, self._worker_requests = self._worker_requests, {}
        waiting = self._handoff.sink if self._handoff is not None else None
        return [Abort(r) if r is waiting else Forget(r) for r in worker_requests.values()]

    def failed(self, handle: int, error: DiptychError, *, handoff: bool = False) -> Actions:
        """End a worker request that did not finish. `handoff`: its KV could not be had: no such error is final."""
        worker_request = self._worker_requests.pop(handle, None)
        if worker_request is None:
            return _NOTHING
        moving = self._handoff
        if moving is not None and worker_request is moving.source and moving.is_sealed:
            return [Forget(worker_request)]
        if isinstance(error, StepFailed) and not handoff:
            end = self.failures.add_step(worker_request.worker, error)
            if end is not None:
                return [Forget(worker_request), *self.fail(end)]
        if moving is not None and worker_request is moving.sink:
            return [Forget(worker_request), *self._sink_failed(moving, worker_request, error, handoff)]
        if worker_request.part is Part.PREFIX:
            self.failures.workers.add(worker_request.worker)
            return [Forget(worker_request), *(self._resume(error) if isinstance(error, WorkerDraining) else _NOTHING)]
        return [Forget(worker_request), *self._request_failed(worker_request, error, handoff)]

    def fail(self, error: DiptychError) -> Actions:
        """End the request with an error, if it has not ended: deadline, no worker, or a client that left."""
        if self.is_over:
            return _NOTHING
        self.error = error
        return self._abort_worker_requests()

    def _request_failed(self, worker_request: WorkerRequest, error: DiptychError, handoff: bool) -> Actions:
        if not (error.retryable or handoff):
            return self.fail(error)
        self.failures.add(worker_request.worker, error, len(self.token_ids), is_handoff=handoff)
        split = self._split
        if split is not None and split.may_send_another_sink and split.source.handle in self._worker_requests:
            split.may_send_another_sink, split.sink_error = isinstance(error, WorkerDraining), error
            return [ChooseSink(split.source.worker)]
        return self._resume(error)

    def _sink_failed(self, handoff: RequestHandoff, sink: WorkerRequest, error: DiptychError, kv_lost: bool) -> Actions:
        handoff.sink, handoff.sink_error = None, error
        if kv_lost:
            self.failures.pairs.add((handoff.source.worker, sink.worker))
        handoff.may_send_another_sink &= not sink.has_token and (not kv_lost or is_on_the_way(error))
        if handoff.runs_on:
            self.failures.pairs.add((handoff.source.worker, sink.worker))
            self.num_failed_migrations += not isinstance(error, WorkerDraining | SequenceEnded)
            return _NOTHING
        if not (error.retryable or kv_lost):
            return self.fail(error)
        self.failures.add(sink.worker, error, len(self.token_ids), is_handoff=kv_lost)
        return self._another_sink(handoff)

    def _another_sink(self, handoff: RequestHandoff) -> Actions:
        """Ask for another sink, while the source lives: once, and again whenever a sink drains."""
        error = handoff.sink_error
        assert error is not None
        if handoff.may_send_another_sink and handoff.source.handle in self._worker_requests:
            handoff.may_send_another_sink = isinstance(error, WorkerDraining)
            return [ChooseSink(handoff.source.worker)]
        return self._resume_if_due(handoff, error)

    def _resume_if_due(self, handoff: RequestHandoff, error: DiptychError) -> Actions:
        """Resume, but not before the source's last tokens have come: one may be the request's last."""
        return self._resume(error) if handoff.is_sealed else _NOTHING

    def _resume(self, error: DiptychError) -> Actions:
        """Begin another attempt, or end with an error after the last, where no lost worker may come back."""
        actions = self._abort_worker_requests()
        end = self.failures.end_attempt(error)
        if end is None:
            return [*actions, ChooseRoute()]
        if self.failures.losses:
            return [*actions, AwaitLostWorkers(end)]
        self.error = end
        return actions

    def _abort_worker_requests(self) -> Actions:
        worker_requests, self._worker_requests = self._worker_requests, {}
        self._handoff = self._split = None
        return [Abort(r) for r in worker_requests.values()]

    def _open(self, handle: int, worker: str, part: Part) -> WorkerRequest:
        worker_request = WorkerRequest(handle, worker, part)
        self._worker_requests[handle] = worker_request
        return worker_request
