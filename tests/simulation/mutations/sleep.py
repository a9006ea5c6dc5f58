"""Bugs to plant where a pool without workers gets one again: see mutations.py."""

from diptych.cluster.common.demand import ControlReport, WaitingRequests
from diptych.cluster.control.supervisor import Supervisor
from diptych.cluster.control.zero import ZeroScaling

from .mutations import Replacement


def requests_that_wait_wake_nobody() -> list[Replacement]:
    return [(ZeroScaling, "woken", lambda self, current, num_waiting: [])]


def a_wake_up_that_is_lost_is_not_repeated() -> list[Replacement]:
    """Each router says it once, and its first word in a supervisor's life is lost."""
    real = Supervisor.report
    heard: set[tuple[int, str]] = set()

    async def next_report(self: WaitingRequests) -> None:
        await self._has_begun.wait()
        self._has_begun.clear()

    def report(self: Supervisor, router: str, num_waiting: int) -> ControlReport:
        if num_waiting and (id(self), router) not in heard:
            heard.add((id(self), router))
            return ControlReport()
        return real(self, router, num_waiting)

    return [(WaitingRequests, "next_report", next_report), (Supervisor, "report", report)]


SLEEP = (requests_that_wait_wake_nobody, a_wake_up_that_is_lost_is_not_repeated)
