"""Bugs to plant in the path of a request's service level: see mutations.py."""

from typing import Any

from diptych.cluster.routing import request_driver, submit_message
from diptych.cluster.routing.request_driver import RequestDriver
from diptych.workers.common.request import RequestLevel

from .mutations import Replacement


def workers_do_not_learn_the_level() -> list[Replacement]:
    real = submit_message.submit_from_request

    def submit(handle: int, *args: Any) -> Any:
        message = real(handle, *args)
        message.ClearField("level")
        return message

    return [(submit_message, "submit_from_request", submit)]


def a_request_that_has_begun_is_refused() -> list[Replacement]:
    real = RequestDriver._refusal

    def refused(self: RequestDriver, *args: Any) -> Any:
        num_attempts, self.state.num_attempts = self.state.num_attempts, 0
        found = real(self, *args)
        self.state.num_attempts = num_attempts
        return found

    return [(RequestDriver, "_refusal", refused)]


def who_would_wait_is_refused() -> list[Replacement]:
    real = RequestDriver.route

    def route(self: RequestDriver) -> None:
        request = self.state.request
        asked = request.level
        object.__setattr__(request, "level", RequestLevel(asked.ttft_s, asked.tpot_s, refuse=True))
        real(self)
        object.__setattr__(request, "level", asked)

    return [(RequestDriver, "route", route)]


def refusals_name_a_time_that_has_passed() -> list[Replacement]:
    real = request_driver.refusal

    def refusal(*args: Any) -> Any:
        found = real(*args)
        if found is not None:
            found.retry_after_s = 0.0
        return found

    return [(request_driver, "refusal", refusal)]


LEVELS = (
    workers_do_not_learn_the_level,
    a_request_that_has_begun_is_refused,
    who_would_wait_is_refused,
    refusals_name_a_time_that_has_passed,
)
