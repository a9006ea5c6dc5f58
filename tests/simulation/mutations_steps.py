"""Bugs to plant in what follows a step that raised: see mutations.py."""

from typing import Any

from diptych.cluster.routing import request_state
from diptych.workers.common.errors import RequestFailsSteps
from diptych.workers.core.suspects import Suspects

from .mutations import Replacement


def suspects_are_computed_with_others() -> list[Replacement]:
    return [(Suspects, "add", lambda self, sequence: None)]


def who_was_beside_the_cause_is_blamed() -> list[Replacement]:
    def fails_steps(request_id: str, workers: Any, error: Any) -> RequestFailsSteps | None:
        return RequestFailsSteps(f"request {request_id} made steps fail") if len(workers) > 1 else None

    return [(request_state, "fails_steps", fails_steps)]


def the_first_that_failed_is_blamed() -> list[Replacement]:
    def fails_steps(request_id: str, workers: Any, error: Any) -> RequestFailsSteps | None:
        return RequestFailsSteps(f"request {request_id} made a step fail")

    return [(request_state, "fails_steps", fails_steps)]


STEPS = (suspects_are_computed_with_others, who_was_beside_the_cause_is_blamed, the_first_that_failed_is_blamed)
