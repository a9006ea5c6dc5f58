"""Bugs to plant in what follows a step that raised: see mutations.py."""

from typing import Any

from diptych.cluster.routing.failures import FailedStep, RequestFailures
from diptych.workers.common.errors import RequestFailsSteps
from diptych.workers.core.suspects import Suspects

from .mutations import Replacement


def suspects_are_computed_with_others() -> list[Replacement]:
    return [(Suspects, "add", lambda self, sequence: None)]


def who_was_beside_the_cause_is_blamed() -> list[Replacement]:
    def add_step(self: RequestFailures, worker: str, error: Any) -> RequestFailsSteps | None:
        self.steps.append(FailedStep(worker, error.num_output))
        return RequestFailsSteps(f"request {self.request_id} made steps fail") if len(self.steps) > 1 else None

    return [(RequestFailures, "add_step", add_step)]


def the_first_that_failed_is_blamed() -> list[Replacement]:
    def add_step(self: RequestFailures, worker: str, error: Any) -> RequestFailsSteps | None:
        self.steps.append(FailedStep(worker, error.num_output))
        return RequestFailsSteps(f"request {self.request_id} made a step fail")

    return [(RequestFailures, "add_step", add_step)]


STEPS = (suspects_are_computed_with_others, who_was_beside_the_cause_is_blamed, the_first_that_failed_is_blamed)
