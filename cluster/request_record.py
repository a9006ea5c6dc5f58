"""One request as its router knows it: prompt, tokens so far, and the legs that make the next ones. Pure: events in,
actions out; no clock, no socket.

    start ─> CHOOSING ──begin──> RUNNING ──the last token──> FINISHED
                 ^                  │ └──deadline, bad request, too many failures, client gone──> FAILED
                 └──── a leg failed: resume after the tokens so far ────┘

An attempt is one leg that does everything (ALONE), or two:

    PREFILL   makes the token at position `start`, and offers the sequence's KV
    DECODE    pulls that KV and makes every token after it

The two speak over different streams, so anything may overtake anything:

    a DECODE token before the PREFILL token     kept until that one is here
    PREFILL is lost or fails, its token missing resume; kept tokens are dropped, they come again
    PREFILL is lost or fails after its token    nothing: DECODE has the KV, or says that it has not
    DECODE is lost before it pulled             another sink is sent to the same offer
    DECODE fails while the PREFILL token is due wait for it: it may be the last one; else resume after it
    a token twice, or of a closed leg           dropped
    a token after a gap                         InternalError: no answer is better than a wrong one

Every leg that was submitted is closed exactly once: by Abort (its worker must stop) or Forget (it already has).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..workers.errors import DiptychError, InternalError, LayoutMismatch, Unavailable, WorkerDraining
from ..workers.request import Request
from ..workers.sequence import FinishReason
from .generation import TokenDelta, TokenLogprob
from .policy import Route


class Part(Enum):
    ALONE = "alone"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Leg:
    handle: int
    worker: str  # incarnation
    part: Part
    has_spoken: bool = False


class LegToken(NamedTuple):
    position: int  # in the request's output, from 0
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    num_cached: int | None = None


@dataclass(frozen=True, slots=True)
class Choose:
    """A route is needed: answer with `begin`, or `fail` when there is none."""


@dataclass(frozen=True, slots=True)
class ChooseSink:
    """A decode worker is needed for an offer that stands at `source`: answer with `begin_sink`."""

    source: str


@dataclass(frozen=True, slots=True)
class Submit:
    """`handoff_id`: for PREFILL and DECODE; `source`: the PREFILL leg's worker, for DECODE."""

    leg: Leg
    output_token_ids: tuple[int, ...]
    handoff_id: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Spoke:
    """The leg's first token is here. A PREFILL leg computes nothing from here on."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Abort:
    leg: Leg


@dataclass(frozen=True, slots=True)
class Forget:
    leg: Leg


Action = Choose | ChooseSink | Submit | Spoke | Abort | Forget
Actions = Sequence[Action]
_NOTHING: Actions = ()


class RequestRecord:
    """Deliver what `take` returns; after every event, do the actions in order, then look at `error`."""

    def __init__(self, request: Request, max_attempts: int) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.error: DiptychError | None = None
        self.excluded: set[str] = set()  # workers that failed this request
        self.num_failures = 0
        self.num_attempts = 0  # begun, and offers that another sink was sent to
        self.num_cached_tokens = 0  # of the prompt, by the first worker's word
        self._max_attempts = max_attempts
        self._max_tokens = request.sampling.max_tokens
        self._wants_logprobs = request.sampling.logprobs is not None
        self._logprobs: list[TokenLogprob] = []
        self.num_cached_tokens = 0
        self._num_taken = 0
        self._layouts_differ = False
        self._has_handoff_failed = False
        # Of the running attempt:
        self._legs: dict[int, Leg] = {}
        self._start = 0  # tokens there were when it began
        self._handoff_id: str | None = None
        self._may_send_another_sink = False
        self._early: list[LegToken] = []  # of DECODE, while the PREFILL token is due
        self._wound: DiptychError | None = None  # what ended DECODE, while the PREFILL token is due

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def num_remaining(self) -> int:
        return self._max_tokens - len(self.token_ids)

    @property
    def may_hand_off(self) -> bool:
        """The last attempt does without what has failed before."""
        is_last = self.num_failures == self._max_attempts - 1
        return not self._layouts_differ and not (self._has_handoff_failed and is_last)

    def legs(self) -> list[Leg]:
        return list(self._legs.values())

    def take(self) -> TokenDelta | None:
        """The tokens since the last call, if any."""
        first = self._num_taken
        if first == len(self.token_ids):
            return None
        self._num_taken = len(self.token_ids)
        return TokenDelta(
            token_ids=tuple(self.token_ids[first:]),
            logprobs=tuple(self._logprobs[first:]),
            finish_reason=self.finish,
            num_cached_tokens=0 if first else self.num_cached_tokens,
        )

    # -- attempts ---------------------------------------------------------------------------------------------------

    def begin(self, route: Route, handoff_id: str, handles: Iterator[int]) -> Actions:
        """An attempt along `route`. `handoff_id` is used where the route has two workers; handles are never reused."""
        assert not self._legs and not self.is_over
        self.num_attempts += 1
        self._start = len(self.token_ids)
        output = tuple(self.token_ids)
        if route.prefill is None:
            self._handoff_id = None
            return [Submit(self._open(next(handles), route.decode, Part.ALONE), output)]
        self._handoff_id = handoff_id
        self._may_send_another_sink = True
        source = self._open(next(handles), route.prefill, Part.PREFILL)
        sink = self._open(next(handles), route.decode, Part.DECODE)
        return [Submit(source, output, handoff_id), Submit(sink, output, handoff_id, source.worker)]

    def begin_sink(self, worker: str | None, handles: Iterator[int]) -> Actions:
        """`worker` pulls the standing offer; None: nobody can."""
        source = self._leg_of(Part.PREFILL)
        assert source is not None and self._wound is not None
        wound = self._wound
        if worker is None:
            return self._resume_if_due(wound)
        self._wound = None
        self.num_attempts += 1
        sink = self._open(next(handles), worker, Part.DECODE)
        return [Submit(sink, tuple(self.token_ids[: self._start]), self._handoff_id, source.worker)]

    # -- tokens -----------------------------------------------------------------------------------------------------

    def token(self, handle: int, token: LegToken) -> Actions:
        leg = self._legs.get(handle)
        if leg is None:
            return _NOTHING
        if leg.part is Part.PREFILL:
            if leg.has_spoken:
                return _NOTHING
            leg.has_spoken = True
            return [Spoke(leg), *self._accept_first(token)]
        actions = self._hold(token) if self._is_first_due else self._accept(token, leg.part)
        if leg.has_spoken:
            return actions
        leg.has_spoken = True
        return [Spoke(leg), *actions]

    @property
    def _is_first_due(self) -> bool:
        """The PREFILL token is still to come."""
        return self._handoff_id is not None and len(self.token_ids) == self._start

    def _hold(self, token: LegToken) -> Actions:
        expected = self._start + 1 + len(self._early)
        if token.position > expected or token.position >= self._max_tokens:
            return self._gap(token, expected)
        if token.position == expected:
            self._early.append(token)
        return _NOTHING

    def _accept_first(self, token: LegToken) -> Actions:
        if token.position != self._start:
            return self._gap(token, self._start)
        actions = self._accept(token, Part.PREFILL)
        early, self._early = self._early, []
        for following in early:
            if not self.is_over:
                actions = self._accept(following, Part.DECODE)
        if self._wound is not None and not self.is_over:
            return self._resume(self._wound)
        return actions

    def _accept(self, token: LegToken, part: Part) -> Actions:
        expected = len(self.token_ids)
        if token.position != expected:
            return self._gap(token, expected) if token.position > expected else _NOTHING
        if self._wants_logprobs:
            if token.logprob is None:
                return self.fail(InternalError("a worker sent a token without the log-probability asked for"))
            self._logprobs.append(token.logprob)
        if expected == 0 and token.num_cached is not None:
            self.num_cached_tokens = min(token.num_cached, len(self.request.prompt_token_ids))
        self.token_ids.append(token.token_id)
        if token.finish is not None:
            return self._finish(token.finish, part)
        if len(self.token_ids) == self._max_tokens:
            return self.fail(InternalError("a worker made max_tokens tokens and did not finish"))
        return _NOTHING

    def _finish(self, finish: FinishReason, by: Part) -> Actions:
        """Only a sink whose source finished needs to be told."""
        self.finish = finish
        legs, self._legs = self._legs, {}
        return [Abort(leg) if by is Part.PREFILL and leg.part is Part.DECODE else Forget(leg) for leg in legs.values()]

    def _gap(self, token: LegToken, expected: int) -> Actions:
        return self.fail(
            InternalError(f"a worker sent the token at position {token.position} where {expected} was next")
        )

    # -- failures ---------------------------------------------------------------------------------------------------

    def failed(self, handle: int, error: DiptychError, *, handoff: bool = False) -> Actions:
        """A leg ended without finishing. `handoff`: its KV could not be had, which no other error is final for."""
        leg = self._legs.pop(handle, None)
        if leg is None:
            return _NOTHING
        if leg.part is Part.PREFILL and leg.has_spoken:
            return [Forget(leg)]
        if not (error.retryable or handoff):
            return [Forget(leg), *self.fail(error)]
        self.excluded.add(leg.worker)
        self._has_handoff_failed |= handoff
        self._layouts_differ |= isinstance(error, LayoutMismatch)
        if leg.part is not Part.DECODE:
            return [Forget(leg), *self._resume(error)]
        return [Forget(leg), *self._sink_failed(leg, error, handoff)]

    def fail(self, error: DiptychError) -> Actions:
        """End the request, if it has not ended: its deadline, no worker, or the client's going."""
        if self.is_over:
            return _NOTHING
        self.error = error
        return self._abort_legs()

    def _sink_failed(self, sink: Leg, error: DiptychError, handoff: bool) -> Actions:
        source = self._leg_of(Part.PREFILL)
        if source is not None and not sink.has_spoken and not handoff and self._may_send_another_sink:
            self._may_send_another_sink = isinstance(error, WorkerDraining)
            self._wound = error
            return [ChooseSink(source.worker)]
        return self._resume_if_due(error)

    def _resume_if_due(self, error: DiptychError) -> Actions:
        if self._is_first_due and self._leg_of(Part.PREFILL) is not None:
            self._wound = error
            return _NOTHING
        return self._resume(error)

    def _resume(self, error: DiptychError) -> Actions:
        """Draining is nobody's failure, and ends by itself: who drains is not chosen again."""
        actions = self._abort_legs()
        self.num_failures += not isinstance(error, WorkerDraining)
        if self.num_failures < self._max_attempts:
            return [*actions, Choose()]
        self.error = Unavailable(
            f"no worker could finish the request in {self.num_failures} attempts; "
            f"the last error was {type(error).__name__}: {error.message}"
        )
        return actions

    def _abort_legs(self) -> Actions:
        legs, self._legs = self._legs, {}
        self._early, self._wound, self._handoff_id = [], None, None
        return [Abort(leg) for leg in legs.values()]

    # -- legs -------------------------------------------------------------------------------------------------------

    def _open(self, handle: int, worker: str, part: Part) -> Leg:
        leg = Leg(handle, worker, part)
        self._legs[handle] = leg
        return leg

    def _leg_of(self, part: Part) -> Leg | None:
        return next((leg for leg in self._legs.values() if leg.part is part), None)
