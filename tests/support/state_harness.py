"""A RequestState that a test gives events, and whose actions it reads."""

import itertools
from collections.abc import Iterator

from diptych.cluster.routing.actions import (
    Action,
    AwaitLostWorkers,
    ChooseRoute,
    ChooseSink,
    CountedTokens,
    FirstToken,
    OfferPrefix,
    OfferSequence,
    Route,
    WorkerToken,
)
from diptych.cluster.routing.request_state import RequestState
from diptych.workers.common.errors import (
    DiptychError,
    LeaseLost,
    TransportError,
    WorkerLost,
)
from diptych.workers.common.request import FinishReason, Request, SamplingParams

LOST = WorkerLost("lost")
KV_GONE = LeaseLost("the lease lapsed")
UNREACHABLE = TransportError("the pull failed")


class StateHarness:
    """A state with handles 1, 2, ..; `log` holds the actions of the last event."""

    def __init__(
        self, max_tokens: int = 4, max_attempts: int = 3, logprobs: int | None = None, num_prompt: int = 3
    ) -> None:
        prompt = tuple(range(1, num_prompt + 1))
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        self.state = RequestState(Request("request", prompt, sampling, timeout_s=60.0), max_attempts)
        self.handles: Iterator[int] = itertools.count(1)
        self.log: list[Action] = []

    def begin(self, prefill: str | None, decode: str) -> None:
        self.log = list(self.state.begin(Route(prefill, decode), "secret", self.handles))

    def token(self, handle: int, position: int, finish: FinishReason | None = None) -> None:
        self.log = list(self.state.token(handle, WorkerToken(position, 100 + position, finish)))

    def failed(self, handle: int, error: DiptychError, handoff: bool = False) -> None:
        self.log = list(self.state.failed(handle, error, handoff=handoff))

    def migrate(self, worker: str) -> None:
        handle = next(self.handles)
        self.handles = itertools.chain([handle], self.handles)
        self.log = list(self.state.migrate(worker, f"move-{handle}", self.handles))

    def handed_off(self, handle: int, num_output_tokens: int, handoff_id: str = "") -> None:
        """Report a hand-off's end, by default of the newest offer."""
        offered = [offer for worker_request in self.state.worker_requests() for offer in worker_request.offers]
        newest = handoff_id or (offered[-1] if offered else "never")
        self.log = list(self.state.handed_off(handle, num_output_tokens, newest, CountedTokens(0, 0)))

    def sink(self, worker: str | None) -> None:
        self.log = list(self.state.begin_sink(worker, self.handles))

    @property
    def told(self) -> list[tuple[str, int | str]]:
        """The last event's actions in short."""
        short: list[tuple[str, int | str]] = []
        for action in self.log:
            match action:
                case ChooseRoute():
                    short.append(("choose", ""))
                case AwaitLostWorkers():
                    short.append(("await lost workers", ""))
                case ChooseSink():
                    short.append(("choose sink", action.source))
                case FirstToken():
                    short.append(("first", action.worker_request.handle))
                case OfferSequence():
                    short.append(("offer", action.worker_request.handle))
                case OfferPrefix():
                    short.append(("offer prefix", action.worker))
                case _:
                    short.append((type(action).__name__.lower(), action.worker_request.handle))
        return short

    def taken(self) -> list[int]:
        delta = self.state.output.take(self.state.finish)
        return list(delta.token_ids) if delta else []


def split() -> StateHarness:
    harness = StateHarness()
    harness.begin("P", "D")
    return harness
