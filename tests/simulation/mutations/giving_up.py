"""Bugs to plant where a request survives its workers: see mutations.py."""

from typing import Any

from diptych.cluster.routing.request_driver import RequestDriver
from diptych.cluster.routing.request_state import RequestState
from diptych.cluster.routing.worker_link import WorkerLink
from diptych.workers.common.errors import Unavailable

from .mutations import Replacement


def a_request_whose_worker_failed_is_failed() -> list[Replacement]:
    def resume(self: RequestState, error: Any) -> Any:
        actions = self._abort_worker_requests()
        self.failures.num_attempts += 1
        self.error = Unavailable(f"no worker could finish the request: {error.message}")
        return actions

    return [(RequestState, "_resume", resume)]


def a_request_that_no_worker_can_take_is_failed_at_once() -> list[Replacement]:
    return [(RequestDriver, "_wait_for_worker", lambda self, error: self.fail(error))]


def a_worker_that_comes_is_not_tried() -> list[Replacement]:
    return [(RequestDriver, "on_worker", lambda self: None)]


def who_waits_on_a_broken_link_is_not_told() -> list[Replacement]:
    real = WorkerLink._go_down

    def go_down(self: WorkerLink, reason: str) -> None:
        self._listeners = {}
        real(self, reason)

    return [(WorkerLink, "_go_down", go_down)]


GIVING_UP = (
    a_request_whose_worker_failed_is_failed,
    a_request_that_no_worker_can_take_is_failed_at_once,
    a_worker_that_comes_is_not_tried,
    who_waits_on_a_broken_link_is_not_told,
)
