"""Bugs to plant in the supervisor, its plan, and how it watches workers: see mutations.py."""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from diptych.cluster.common.handles import WorkerHandle
from diptych.cluster.control import supervisor, worker_watch
from diptych.cluster.control.plan import Action, Failures, SetRole, Start
from diptych.cluster.control.supervisor import Supervisor
from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.control.worker_record import WorkerRecord
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.workers.common.errors import DiptychError
from diptych.workers.server.drain import DrainState

from .mutations import Replacement


def a_drain_ends_at_once() -> list[Replacement]:
    async def drain(gang: Sequence[WorkerRecord], timeout_s: float) -> None:
        pass

    return [(supervisor, "drain", drain)]


def who_does_not_answer_has_nothing_left() -> list[Replacement]:
    real = WorkerControl.is_drained

    async def is_drained(self: WorkerControl) -> bool:
        try:
            return await real(self)
        except DiptychError:
            return True

    return [(WorkerControl, "is_drained", is_drained)]


def what_a_drained_worker_hands_off_is_not_waited_for() -> list[Replacement]:
    async def is_drained(self: WorkerControl) -> bool:
        load = (await self.state()).load
        return load.draining and load.num_running + load.num_waiting == 0

    return [(WorkerControl, "is_drained", is_drained)]


def a_drained_worker_takes_what_is_new() -> list[Replacement]:
    return [(DrainState, "refuses", lambda _, link: link.knows_draining)]


def a_new_supervisor_forgets_a_worker() -> list[Replacement]:
    real = Supervisor._adopt

    async def adopt(self: Supervisor, existing: list[tuple[str, str]]) -> None:
        await real(self, existing[1:])

    return [(Supervisor, "_adopt", adopt)]


def a_new_supervisor_starts_all_again() -> list[Replacement]:
    real = Supervisor._adopt

    async def adopt(self: Supervisor, existing: list[tuple[str, str]]) -> None:
        self._num_started = 100 if existing else 0
        await real(self, [])

    return [(Supervisor, "_adopt", adopt)]


def a_new_supervisor_waits_for_all() -> list[Replacement]:
    return [(supervisor, "ADOPT_S", 1e9)]


def targets_are_not_kept() -> list[Replacement]:
    return _after_init(lambda self: setattr(self._launcher, "remember", lambda replicas: None))


def a_place_is_not_given_back() -> list[Replacement]:
    return _after_init(lambda self: setattr(self._launcher, "vacate", lambda gang_id: None))


def a_lost_worker_is_not_replaced() -> list[Replacement]:
    def after_failure(failures: Failures, error: str, *, lived_s: float, now: float) -> Failures:
        return Failures(failures.count + 1, error, float("inf"))

    return [(supervisor, "after_failure", after_failure)]


def one_too_many_is_started() -> list[Replacement]:
    real = supervisor.plan

    def plan(*args: Any) -> list[Action]:
        actions = real(*args)
        return actions + [a for a in actions if isinstance(a, Start)][:1]

    return [(supervisor, "plan", plan)]


def a_change_of_role_is_not_published() -> list[Replacement]:
    real = Supervisor._apply

    def apply(self: Supervisor, action: Action) -> None:
        if not isinstance(action, SetRole):
            real(self, action)
            return
        for worker in self._gang(action.worker_id):
            worker.pool = action.pool

    return [(Supervisor, "_apply", apply)]


def a_change_of_the_prefill_budget_is_lost() -> list[Replacement]:
    def set_prefill_budget(self: WorkerControl, num_tokens: int) -> None:
        pass

    return [(WorkerControl, "set_prefill_budget", set_prefill_budget)]


def silence_is_counted_in_seconds() -> list[Replacement]:
    class Silence:
        def __init__(self, limit: int) -> None:
            self.limit, self._since = limit, time.monotonic()

        def look(self, *, has_answered: bool) -> bool:
            now = time.monotonic()
            self._since = now if has_answered else self._since
            return now - self._since >= self.limit * worker_watch.TICK_S

    return [(worker_watch, "Silence", Silence)]


def a_worker_that_hangs_is_kept() -> list[Replacement]:
    return [(worker_watch, "SILENT_TICKS", 10**9)]


def a_death_before_the_hello_is_not_noticed() -> list[Replacement]:
    async def until_known(handle: WorkerHandle, opening: Coroutine[None, None, WorkerControl]) -> WorkerControl:
        return await opening

    return [(supervisor, "until_known", until_known)]


def a_silent_worker_that_was_taken_over_is_surplus() -> list[Replacement]:
    real = WorkerRecord.view
    return [(WorkerRecord, "view", lambda self, **given: replace(real(self, **given), is_silent=False))]


def half_a_gang_is_announced() -> list[Replacement]:
    def announced(workers: Sequence[WorkerRecord]) -> list[WorkerInfo]:
        return [info for worker in workers if (info := worker.info())]

    return [(supervisor, "announced", announced)]


def _after_init(act: Callable[[Any], None]) -> list[Replacement]:
    real = Supervisor.__init__

    def init(self: Supervisor, *args: Any) -> None:
        real(self, *args)
        act(self)

    return [(Supervisor, "__init__", init)]


SUPERVISOR = (
    a_drain_ends_at_once,
    who_does_not_answer_has_nothing_left,
    what_a_drained_worker_hands_off_is_not_waited_for,
    a_drained_worker_takes_what_is_new,
    a_new_supervisor_forgets_a_worker,
    a_new_supervisor_starts_all_again,
    a_new_supervisor_waits_for_all,
    targets_are_not_kept,
    a_place_is_not_given_back,
    a_lost_worker_is_not_replaced,
    one_too_many_is_started,
    a_change_of_role_is_not_published,
    a_change_of_the_prefill_budget_is_lost,
    silence_is_counted_in_seconds,
    a_worker_that_hangs_is_kept,
    a_death_before_the_hello_is_not_noticed,
    a_silent_worker_that_was_taken_over_is_surplus,
    half_a_gang_is_announced,
)
