"""Bugs to plant where the supervisor moves prefill budgets: see mutations.py."""

from typing import Any

from diptych.cluster.control import budgets
from diptych.cluster.routing.request_driver import RequestDriver
from diptych.cluster.routing.worker_link import WorkerLink
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.load import EngineLoad

from .mutations import Replacement
from .supervisor import a_change_of_the_prefill_budget_is_lost


def budgets_follow_every_look() -> list[Replacement]:
    return [(budgets, name, 0) for name in ("REST_S", "SETTLE_S", "HOLD_LOOKS", "LEAST_GAIN")]


def a_budget_is_reported_and_not_used() -> list[Replacement]:
    real = EngineLoad.report
    told: dict[int, int] = {}

    def set_prefill_budget(self: Engine, num_tokens: int) -> None:
        told[id(self._load)] = min(num_tokens, self.scheduler.config.step_tokens)

    def report(self: EngineLoad) -> Any:
        message = real(self)
        message.prefill_budget = told.get(id(self), message.prefill_budget)
        return message

    return [(Engine, "set_prefill_budget", set_prefill_budget), (EngineLoad, "report", report)]


def a_request_that_goes_on_elsewhere_counts_at_both_workers() -> list[Replacement]:
    def close_request(self: RequestDriver, handle: int) -> WorkerLink:
        if self.state.is_over:
            self._context.fleet.remove_request(handle)
        return self._links.pop(handle)

    return [(RequestDriver, "_close_request", close_request)]


DIAL = (
    budgets_follow_every_look,
    a_budget_is_reported_and_not_used,
    a_change_of_the_prefill_budget_is_lost,
    a_request_that_goes_on_elsewhere_counts_at_both_workers,
)
