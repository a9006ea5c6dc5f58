"""Client of the supervisor by which a router learns the fleet, a long poll, and reports what waits for a worker. Knows
no Ray."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..common.demand import ControlReport, WaitingRequests
from ..routing.fleet import WorkerInfo

RETRY_S = 0.5

log = logging.getLogger("diptych.fleet")

Watch = Callable[[int], Awaitable[tuple[int, list[WorkerInfo]]]]  # Supervisor.watch_fleet of a supervisor
Report = Callable[[int], Awaitable[ControlReport]]  # Supervisor.report of a supervisor, for one router


async def follow(
    find: Callable[[], Awaitable[Watch]],
    update_fleet: Callable[[list[WorkerInfo]], None],
    away: tuple[type[Exception], ...],
) -> None:
    """Pass each fleet that the supervisor reports to `update_fleet`, until cancelled. While no supervisor answers, call
    nothing: its successor will answer, and requests go on by the last view. `away`: the errors of `find` and of a call
    that mean this."""
    version = 0
    while True:
        try:
            watch_fleet = await find()
            while True:
                version, workers = await watch_fleet(version)
                update_fleet(workers)
        except away as e:
            log.warning("no supervisor answers: %s", last_line(e))
            await asyncio.sleep(RETRY_S)


async def report_waiting(
    find: Callable[[], Awaitable[Report]],
    waiting: WaitingRequests,
    on_control: Callable[[ControlReport], None],
    away: tuple[type[Exception], ...],
) -> None:
    """Report the requests that wait, until cancelled, and pass on what the supervisor answers. A report that no
    supervisor answers is made again. `away`: as of `follow`, which tells that nobody answers."""
    while True:
        try:
            report = await find()
            while True:
                on_control(await report(waiting.num))
                await waiting.next_report()
        except away:
            await asyncio.sleep(RETRY_S)


def last_line(error: Exception) -> str:
    """Ray's errors are pages, which end with what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
