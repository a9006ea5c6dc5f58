"""The failures of one request's worker requests, and what follows from them for its next attempt. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ...workers.common.errors import (
    DiptychError,
    LayoutMismatch,
    PromptReturned,
    RequestFailsSteps,
    StepFailed,
    StepFailedAlone,
    TransportError,
    Unavailable,
    WorkerDraining,
    WorkerLost,
)


def is_on_the_way(error: DiptychError) -> bool:
    """Return whether source and sink could not reach each other: another sink may still read the offered KV."""
    return isinstance(error, TransportError | WorkerLost)


class Loss(NamedTuple):
    """A worker was lost with the request."""

    worker: str
    num_output: int  # tokens of the answer
    error: WorkerLost


class FailedStep(NamedTuple):
    """Step of one request that raised."""

    worker: str  # its incarnation
    num_output: int  # tokens of the answer that the worker had generated or drafted; the router may have fewer


@dataclass(slots=True, eq=False)
class RequestFailures:
    """Failed attempts, workers, hand-offs and steps of one request."""

    request_id: str
    max_attempts: int
    num_attempts: int = 0  # that failed
    workers: set[str] = field(default_factory=set[str])  # that failed this request
    pairs: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])  # source and sink of failed hand-offs
    steps: list[FailedStep] = field(default_factory=list[FailedStep])
    losses: dict[str, int] = field(default_factory=dict[str, int])  # that cost an attempt each: tokens, by worker
    _last_loss: Loss | None = None
    _given_back: dict[str, int] = field(default_factory=dict[str, int])  # tokens at a worker's last loss that cost none
    _uncounted: StepFailed | None = None  # the last failed step, if it costs no attempt
    _layouts_differ: bool = False
    _has_handoff_failed: bool = False

    @property
    def is_exhausted(self) -> bool:
        return self.num_attempts >= self.max_attempts

    @property
    def may_hand_off(self) -> bool:
        """Return whether the next attempt may use two workers. The last one must not if a hand-off has failed."""
        is_last = self.num_attempts == self.max_attempts - 1
        return not self._layouts_differ and not (self._has_handoff_failed and is_last)

    def add(self, worker: str, error: DiptychError, num_output: int, *, is_handoff: bool) -> None:
        """Note that a worker request failed. `num_output`: tokens of the answer; `is_handoff`: it could not get its
        KV."""
        self.workers.add(worker)
        if isinstance(error, WorkerLost) and not is_handoff:
            self._last_loss = Loss(worker, num_output, error)
        self._has_handoff_failed |= is_handoff
        self._layouts_differ |= isinstance(error, LayoutMismatch)

    def add_step(self, worker: str, error: StepFailed) -> RequestFailsSteps | None:
        """Note that a step raised. Returns the error that ends the request, if the request is the cause: at least two
        steps have failed, and no other request was in the last one. None: it may be tried again, without an attempt
        less where other requests were in the step, each time at a later token: the cause may be one of them."""
        is_further = all(error.num_output > step.num_output for step in self.steps)
        self._uncounted = error if is_further and not isinstance(error, StepFailedAlone) else None
        self.steps.append(FailedStep(worker, error.num_output))
        if len(self.steps) < 2 or not isinstance(error, StepFailedAlone):
            return None
        workers = " and ".join(step.worker for step in self.steps)
        return RequestFailsSteps(
            f"request {self.request_id} made steps fail on {workers}, on the last with no other request in the "
            f"step: it is not tried again. {error.message}"
        )

    def end_attempt(self, error: DiptychError) -> Unavailable | None:
        """Count a failed attempt. Returns the error that ends the request after the last one. An attempt that ended
        because its worker drains, or gave the prompt back, does not count: that worker is not chosen again. Nor does
        one that others may have ended: see add_step."""
        self.num_attempts += not (isinstance(error, WorkerDraining | PromptReturned) or error is self._uncounted)
        if (loss := self._last_loss) is not None and loss.error is error:
            self.losses[loss.worker] = loss.num_output
        if not self.is_exhausted:
            return None
        return Unavailable(
            f"no worker could finish the request in {self.num_attempts} attempts; "
            f"the last error was {type(error).__name__}: {error.message}"
        )

    def answers_again(self, worker: str) -> None:
        """Give back the attempt that a worker's loss has cost, if any: only the connection to it had broken. Once for
        each worker and token: a request that breaks connections is not tried for ever."""
        num_output = self.losses.pop(worker, None)
        if num_output is not None and num_output > self._given_back.get(worker, -1):
            self._given_back[worker] = num_output
            self.num_attempts -= 1
            self.workers.discard(worker)

    def num_alone(self, num_output: int) -> int:
        """Number of tokens that the request makes in steps of its own, resumed after `num_output` of them: until it is
        past the token at which a step failed. At least 2: a prefill makes the first, a decode the second."""
        return max((max(step.num_output - num_output, 0) + 2 for step in self.steps), default=0)
