"""Requests that wait for a worker: when they are reported, and for how long a report counts."""

import asyncio

from diptych.cluster.common.demand import HEARD_S, WaitingReports, WaitingRequests


async def test_the_first_request_that_waits_is_reported_at_once_and_again_while_it_waits() -> None:
    waiting = WaitingRequests()
    report = asyncio.ensure_future(waiting.next_report())
    await asyncio.sleep(0)
    assert not report.done() and waiting.num == 0
    waiting.add()
    await report
    assert waiting.num == 1
    loop = asyncio.get_running_loop()
    began = loop.time()
    await waiting.next_report()
    assert loop.time() - began >= 0.99, "not in a loop without a pause"
    waiting.remove()
    assert waiting.num == 0


async def test_a_request_that_cannot_wait_counts_for_a_while() -> None:
    waiting = WaitingRequests()
    waiting.refuse()
    waiting.refuse()
    assert waiting.num == 1


def test_the_newest_report_of_each_router_counts_while_it_is_new() -> None:
    reports = WaitingReports()
    reports.report("a", 3, 10.0)
    reports.report("b", 2, 11.0)
    reports.report("a", 1, 12.0)
    assert reports.total(12.0) == 3
    assert reports.total(11.0 + HEARD_S) == 1
    assert reports.total(12.0 + HEARD_S) == 0
