"""One request's state machine in thousands of orders of events: workers compute, hand off, die, drain and fail at
random; streams are read in any order."""

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from diptych.cluster.routing.actions import (
    Abort,
    Action,
    ChooseRoute,
    ChooseSink,
    CountedTokens,
    FirstToken,
    Forget,
    OfferSequence,
    Part,
    Route,
    Submit,
    WorkerRequest,
    WorkerToken,
)
from diptych.cluster.routing.request_state import RequestState
from diptych.workers.common.errors import (
    DiptychError,
    InternalError,
    LeaseLost,
    OutOfBlocks,
    TransportError,
    WorkerDraining,
    WorkerLost,
)
from diptych.workers.common.request import FinishReason, Request, SamplingParams

KV_GONE = LeaseLost("the lease lapsed")
UNREACHABLE = TransportError("the pull failed")


@dataclass(frozen=True)
class HandedOff:
    num_output_tokens: int
    handoff_id: str


@dataclass(frozen=True)
class Failure:
    error: DiptychError
    is_handoff: bool = False


@dataclass
class SimulatedHandoff:
    id: str
    source: "SimulatedRequest"
    sealed_at: int | None = None
    is_over: bool = False  # pulled, or gone

    @property
    def is_live(self) -> bool:
        return self.source.request.part is not Part.PREFILL


@dataclass
class SimulatedRequest:
    """A worker request as its worker sees it. Its messages wait in `stream` until the router reads them."""

    request: WorkerRequest
    position: int  # of its next token
    handoff: SimulatedHandoff | None = None  # that it pulls
    stream: deque[WorkerToken | HandedOff | Failure] = field(default_factory=deque[WorkerToken | HandedOff | Failure])
    is_done: bool = False  # sends nothing more
    has_pulled: bool = False

    @property
    def waits_for_kv(self) -> bool:
        return self.handoff is not None and not self.has_pulled

    def end(self, *last: Failure | HandedOff) -> None:
        self.is_done = True
        self.stream.extend(last)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_tokens = self.random.randint(1, 9)
        self.finish = self.random.choice([FinishReason.STOP, FinishReason.LENGTH])
        self.num_faults = self.random.choice([0, 1, 2, 4, 8])
        self.num_moves = self.random.choice([0, 1, 2, 8])
        max_tokens = self.num_tokens if self.finish is FinishReason.LENGTH else self.num_tokens + 3
        request = Request("request", (1, 2, 3), SamplingParams(max_tokens=max_tokens), timeout_s=60.0)
        self.state = RequestState(request, max_attempts=20)
        self.handles = itertools.count(1)
        self.ids = map(str, itertools.count(1))
        self.requests: dict[int, SimulatedRequest] = {}
        self.handoffs: dict[str, SimulatedHandoff] = {}
        self.closed: set[int] = set()
        self.delivered: list[int] = []
        self.last_finish: FinishReason | None = None

    def run(self) -> None:
        self._do([ChooseRoute()])
        while not self.state.is_over:
            choices = [self._compute] * 3 + [self._read] * 3 + [self._fault, self._migrate]
            self.random.choice(choices)()
            self._take()
        assert self.closed == set(self.requests), "a worker request was left running"

    def _take(self) -> None:
        delta = self.state.output.take(self.state.finish)
        if delta is not None:
            assert self.last_finish is None
            self.delivered += delta.token_ids
            self.last_finish = delta.finish_reason

    def _live(self) -> list[SimulatedRequest]:
        live = [s for handle, s in self.requests.items() if handle not in self.closed]
        assert live, "nobody works for the request: it would hang"
        assert any(not s.is_done or s.stream for s in live), "nobody will ever say anything: it would hang"
        return live

    def _compute(self) -> None:
        simulated = self.random.choice(self._live())
        if simulated.is_done:
            return
        if simulated.waits_for_kv and not self._pull(simulated):
            return
        if self.random.random() < 0.8:
            self._say_token(simulated)

    def _pull(self, sink: SimulatedRequest) -> bool:
        handoff = sink.handoff
        assert handoff is not None
        if handoff.is_over:
            sink.end(Failure(KV_GONE, is_handoff=True))
        elif handoff.sealed_at is not None:
            sink.position, sink.has_pulled, handoff.is_over = handoff.sealed_at, True, True
        elif handoff.is_live:  # it has caught up: the source stops
            handoff.sealed_at = handoff.source.position
            handoff.source.end(HandedOff(handoff.sealed_at, handoff.id))
        return sink.has_pulled

    def _say_token(self, simulated: SimulatedRequest) -> None:
        is_last = simulated.position == self.num_tokens - 1
        simulated.stream.append(
            WorkerToken(simulated.position, 100 + simulated.position, self.finish if is_last else None)
        )
        if self.random.random() < 0.1:
            simulated.stream.append(simulated.stream[-1])
        simulated.position += 1
        simulated.is_done = is_last or simulated.request.part is Part.PREFILL
        for handoff in self._offers_of(simulated):
            handoff.is_over |= is_last
            if simulated.is_done and not handoff.is_over:
                handoff.sealed_at = simulated.position

    def _offers_of(self, simulated: SimulatedRequest) -> list[SimulatedHandoff]:
        return [h for h in self.handoffs.values() if h.source is simulated]

    def _end(self, simulated: SimulatedRequest) -> None:
        simulated.is_done = True
        for handoff in self._offers_of(simulated):
            handoff.is_over = True

    def _fault(self) -> None:
        simulated = self.random.choice(self._live())
        if self.num_faults == 0:
            return
        self.num_faults -= 1
        kind = self.random.choice(["lost", "failed", "hand-off", "draining", "bug"])
        if kind == "lost":
            self._end(simulated)
            simulated.stream.clear()
            self._do(self.state.failed(simulated.request.handle, WorkerLost("lost")))
        elif simulated.is_done:
            return
        elif kind == "hand-off" and simulated.waits_for_kv:
            simulated.end(Failure(self.random.choice([KV_GONE, UNREACHABLE]), is_handoff=True))
        elif kind == "failed":
            self._end(simulated)
            simulated.end(Failure(OutOfBlocks("full")))
        elif kind == "draining" and not simulated.stream and simulated.position == len(self.delivered):
            self._end(simulated)
            simulated.end(Failure(WorkerDraining("draining")))
        elif kind == "bug" and simulated.handoff and simulated.handoff.is_live and not simulated.handoff.source.is_done:
            simulated.end(Failure(InternalError("a bug there")))

    def _read(self) -> None:
        simulated = self.random.choice([s for s in self.requests.values() if s.stream] or self._live())
        if not simulated.stream:
            return
        handle = simulated.request.handle
        match simulated.stream.popleft():
            case WorkerToken() as token:
                self._do(self.state.token(handle, token))
            case HandedOff() as handed_off:
                num, handoff_id = handed_off.num_output_tokens, handed_off.handoff_id
                self._do(self.state.handed_off(handle, num, handoff_id, CountedTokens(0, 0)))
            case Failure() as failure:
                self._do(self.state.failed(handle, failure.error, handoff=failure.is_handoff))

    def _migrate(self) -> None:
        if self.num_moves and self.state.movable() is not None:
            self.num_moves -= 1
            handoff_id = next(self.ids)
            self._do(self.state.migrate(f"M{handoff_id}", handoff_id, self.handles))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ChooseRoute():
                    a, b = self.random.sample("VWXYZ", 2)
                    route = Route(self.random.choice([None, a, a]), b)
                    self._do(self.state.begin(route, next(self.ids), self.handles))
                case ChooseSink():
                    sink = self.random.choice([None, "S"])
                    self._do(self.state.begin_sink(sink, self.handles))
                case Submit():
                    self._submit(action)
                case OfferSequence():
                    self._offer(self.requests[action.worker_request.handle], action.handoff_id)
                case FirstToken():
                    assert action.worker_request.handle in self.requests
                case Abort() | Forget():
                    self._close(action)
                case _:
                    raise AssertionError(action)

    def _close(self, action: Abort | Forget) -> None:
        handle = action.worker_request.handle
        assert handle not in self.closed, "closed twice"
        self.closed.add(handle)
        simulated = self.requests[handle]
        if isinstance(action, Forget):
            assert simulated.is_done, "still runs: it has to be aborted"
            assert all(h.is_over for h in self._offers_of(simulated)), "an offer stands still: it has to be aborted"
        self._end(simulated)

    def _offer(self, simulated: SimulatedRequest, handoff_id: str) -> None:
        """A new offer of a sequence takes the place of the one before."""
        assert handoff_id not in self.handoffs
        for handoff in self._offers_of(simulated):
            handoff.is_over |= handoff.sealed_at is None
        self.handoffs[handoff_id] = SimulatedHandoff(handoff_id, simulated, is_over=simulated.is_done)

    def _submit(self, submit: Submit) -> None:
        assert list(submit.output_token_ids) == [100 + i for i in range(len(submit.output_token_ids))]
        simulated = SimulatedRequest(submit.worker_request, len(submit.output_token_ids))
        self.requests[submit.worker_request.handle] = simulated
        if submit.source is not None:
            assert submit.handoff_id is not None
            simulated.handoff = self.handoffs[submit.handoff_id]
            assert simulated.handoff.source.request.handle not in self.closed
            assert simulated.handoff.source.request.worker == submit.source
        elif submit.handoff_id is not None:
            self._offer(simulated, submit.handoff_id)


@pytest.mark.parametrize("block", range(8))
def test_any_order_of_anything_gives_the_same_tokens(block: int) -> None:
    num_migrations = 0
    for seed in range(block * 1000, (block + 1) * 1000):
        simulation = Simulation(seed)
        try:
            simulation.run()
            assert simulation.state.error is None
            assert simulation.delivered == [100 + i for i in range(simulation.num_tokens)]
            assert simulation.last_finish is simulation.finish
            num_migrations += simulation.state.num_migrations
        except AssertionError as e:
            raise AssertionError(f"seed {seed}") from e
    assert num_migrations > 200
