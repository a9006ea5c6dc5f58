"""How a router learns the fleet, while supervisors come and go."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.cluster.common.demand import ControlReport, WaitingRequests
from diptych.cluster.placement import fleet_watch, supervisor_name
from diptych.cluster.placement.fleet_watch import Report, Watch, follow, report_waiting
from diptych.cluster.placement.supervisor_name import found_supervisor
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.workers.common.errors import Unavailable

FIRST = [WorkerInfo("a", "127.0.0.1:1", "decode", "decode")]
SECOND = [WorkerInfo("b", "127.0.0.1:2", "decode", "decode")]


class Away(Exception):
    """No supervisor answers."""


async def test_a_router_keeps_its_last_view_until_the_next_supervisor_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_watch, "RETRY_S", 0.0)
    asked: list[int] = []
    seen: list[list[WorkerInfo]] = []
    num_found = 0
    is_over = asyncio.Event()

    async def find() -> Watch:
        nonlocal num_found
        num_found += 1
        if num_found == 2:
            raise Unavailable("there is no cluster of that name")
        return first if num_found == 1 else second

    async def first(version: int) -> tuple[int, list[WorkerInfo]]:
        asked.append(version)
        if len(asked) > 1:
            raise Away
        return 7, FIRST

    async def second(version: int) -> tuple[int, list[WorkerInfo]]:
        asked.append(version)
        if version == 9:
            is_over.set()
            await asyncio.Event().wait()
        return 9, SECOND

    following = asyncio.create_task(follow(find, seen.append, (Away, Unavailable)))
    await is_over.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert seen == [FIRST, SECOND]
    assert asked == [0, 7, 7, 9]


async def test_a_router_serves_while_rays_gcs_does_not_answer_where_its_supervisor_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_back = threading.Event()
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def find(cluster: str) -> Any:
        loop.call_soon_threadsafe(asked.set)
        is_back.wait()
        return SimpleNamespace(watch_fleet=SimpleNamespace(remote=cluster))

    monkeypatch.setattr(supervisor_name, "find_supervisor", find)
    finding = asyncio.create_task(found_supervisor("default"))
    await asked.wait()  # for ever, where the loop waits for the GCS
    is_back.set()
    assert (await finding).watch_fleet.remote == "default"


async def test_what_is_no_sign_of_absence_ends_it() -> None:
    async def watch(version: int) -> tuple[int, list[WorkerInfo]]:
        raise ZeroDivisionError

    async def find() -> Watch:
        return watch

    with pytest.raises(ZeroDivisionError):
        await follow(find, lambda _: None, (Away,))


async def test_what_waits_is_reported_again_to_the_next_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_watch, "RETRY_S", 0.0)
    waiting = WaitingRequests()
    reported: list[int] = []
    answers: list[ControlReport] = []
    is_over = asyncio.Event()

    async def find() -> Report:
        return report

    async def report(num_waiting: int) -> ControlReport:
        reported.append(num_waiting)
        if len(reported) == 1:
            asyncio.get_running_loop().call_soon(waiting.add)
        if len(reported) == 2:
            raise Away  # the report is lost with the supervisor
        if len(reported) == 3:
            is_over.set()
        return ControlReport(float(len(reported)))

    reporting = asyncio.create_task(report_waiting(find, waiting, answers.append, (Away,)))
    await is_over.wait()
    await asyncio.sleep(0)
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)
    assert reported == [0, 1, 1]
    assert [answer.ready_in_s for answer in answers] == [1.0, 3.0]
