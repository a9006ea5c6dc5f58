"""Rules on failed worker requests: may another sink read the KV, which request made steps fail. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from ...workers.common.errors import DiptychError, RequestFailsSteps, StepFailedAlone, TransportError, WorkerLost


def is_on_the_way(error: DiptychError) -> bool:
    """Source and sink could not reach each other: what is offered may be had by another."""
    return isinstance(error, TransportError | WorkerLost)


class FailedStep(NamedTuple):
    """A step of one request that raised."""

    worker: str  # its incarnation
    num_output: int  # tokens of the answer that the worker had made; the router may have fewer


def num_alone(steps: Sequence[FailedStep], num_output: int) -> int:
    """Number of tokens that a request makes in steps of its own once it is resumed after `num_output` of them: until
    it is past the token at which a step failed. That is 2 at least: a prefill makes the first, a decode the second."""
    return max((max(step.num_output - num_output, 0) + 2 for step in steps), default=0)


def fails_steps(request_id: str, steps: Sequence[FailedStep], error: DiptychError) -> RequestFailsSteps | None:
    """The request's end, where it is the cause of the failed steps, the last of which raised `error`. None: it may be
    tried again."""
    if len(steps) < 2 or not isinstance(error, StepFailedAlone):
        return None
    workers = " and ".join(step.worker for step in steps)
    return RequestFailsSteps(
        f"request {request_id} made steps fail on {workers}, on the last with no other request in the "
        f"step: it is not tried again. {error.message}"
    )
