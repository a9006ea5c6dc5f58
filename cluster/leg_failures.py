"""What the failure of a leg says of its request, of its worker, and of what lies between two workers. Pure."""

from collections.abc import Sequence

from ..workers.errors import DiptychError, RequestFailsSteps, StepFailedAlone, TransportError, WorkerLost


def is_on_the_way(error: DiptychError) -> bool:
    """Source and sink could not reach each other: what is offered may be had by another."""
    return isinstance(error, TransportError | WorkerLost)


def fails_steps(request_id: str, workers: Sequence[str], error: DiptychError) -> RequestFailsSteps | None:
    """The request's end, where it is the cause of failed steps. `workers`: where steps with it failed, the last by
    `error`. None: it may be tried again."""
    if len(workers) < 2 or not isinstance(error, StepFailedAlone):
        return None
    return RequestFailsSteps(
        f"request {request_id} made steps fail on {' and '.join(workers)}, on the last with no other request in the "
        f"step: it is not tried again. {error.message}"
    )
