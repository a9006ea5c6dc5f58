"""Reports between routers and the supervisor beside the fleet: requests that wait, and when a worker comes.

A router reports at once when its first request has no worker, again every REPEAT_S seconds while some wait, and every
IDLE_S seconds otherwise. So a report that is lost, or a supervisor that is new, delays a start by REPEAT_S at most.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

REPEAT_S = 1.0
IDLE_S = 5.0
HEARD_S = 3.0  # for so long a router's report counts
KNOWN_S = 20.0  # for so long a router shows what the supervisor has reported last
REFUSED_S = 10.0  # for so long a request counts that could not even wait


@dataclass(frozen=True, slots=True)
class ControlSeries:
    """Metric of the controller, for routers to show: its value for each value of its one label."""

    name: str  # without the prefix of all metrics
    what: str
    label: str
    values: tuple[tuple[str, float], ...]
    is_counter: bool = False


@dataclass(frozen=True, slots=True)
class DecisionNote:
    """Decision of the controller, for routers to show."""

    age_s: float
    kind: str  # budgets or replicas
    subject: str  # pools
    action: str
    reason: str
    result: str  # empty: not known yet
    has_failed: bool


@dataclass(frozen=True, slots=True)
class PoolNote:
    """State of a pool, for routers to show. Numbers of workers."""

    name: str
    target: int
    num_ready: int
    num_starting: int
    num_draining: int
    last_error: str = ""  # of failures in a row; empty where there are none


@dataclass(frozen=True, slots=True)
class ControlReport:
    """Answer of the supervisor to a router's report. `ready_in_s`: until a worker is expected that is being started
    for requests which wait; None where none is, or where no start of its pool has been measured."""

    ready_in_s: float | None = None
    series: tuple[ControlSeries, ...] = ()
    decisions: tuple[DecisionNote, ...] = ()  # the last ones, newest first
    pools: tuple[PoolNote, ...] = ()


class WaitingRequests:
    """Requests of one router for which there is no worker. Used on one event loop."""

    def __init__(self) -> None:
        self._num = 0
        self._refused_until = float("-inf")
        self._has_begun = asyncio.Event()

    @property
    def num(self) -> int:
        """Number of requests that wait, and one more for those that came and could not wait."""
        return self._num + (asyncio.get_running_loop().time() < self._refused_until)

    def add(self) -> None:
        self._num += 1
        self._has_begun.set()

    def remove(self) -> None:
        self._num -= 1

    def refuse(self) -> None:
        """Note a request that is refused for lack of a worker; its client may come again."""
        self._refused_until = asyncio.get_running_loop().time() + REFUSED_S
        self._has_begun.set()

    async def next_report(self) -> None:
        """Return when the next report is due."""
        self._has_begun.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(REPEAT_S if self.num else IDLE_S):
                await self._has_begun.wait()
        self._has_begun.clear()


class WaitingReports:
    """Newest reports of all routers."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, float]] = {}  # number, and when it was reported, by router

    def report(self, router: str, num_waiting: int, now: float) -> None:
        self._reports = {name: found for name, found in self._reports.items() if now - found[1] < HEARD_S}
        self._reports[router] = num_waiting, now

    def total(self, now: float) -> int:
        """Return how many requests wait, by the reports that still count."""
        return sum(num for num, at in self._reports.values() if now - at < HEARD_S)
