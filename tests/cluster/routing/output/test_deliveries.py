"""Rounds of deliveries, on an event loop whose clock the test sets."""

import asyncio
from collections.abc import Callable, Generator

import pytest

from diptych.cluster.routing.output.deliveries import ROUND_SHARE, Deliveries

LONG_S = 1000.0
TURNS = 8  # of the event loop: more than two rounds that are due need


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until `now` is set."""

    now = 0.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def loop() -> Generator[ClockLoop]:
    loop = ClockLoop()
    yield loop
    loop.close()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def waiting(loop: ClockLoop, then: Callable[[], None] = lambda: None) -> asyncio.Future[None]:
    waiter: asyncio.Future[None] = loop.create_future()
    waiter.add_done_callback(lambda _: then())
    return waiter


def test_a_round_begins_at_once_where_rounds_are_short(loop: ClockLoop) -> None:
    async def main() -> None:
        deliveries = Deliveries()
        for _ in range(3):
            waiter = waiting(loop)
            deliveries.add(waiter)
            assert not waiter.done()  # not within the event that brought its tokens: others may follow
            await turns()
            assert waiter.done()

    loop.run_until_complete(main())


def test_a_round_waits_after_one_that_took_long(loop: ClockLoop) -> None:
    def take_long() -> None:
        loop.now += LONG_S

    async def main() -> None:
        deliveries = Deliveries()
        first, late, later = waiting(loop, take_long), waiting(loop), waiting(loop)
        deliveries.add(first)
        await turns()
        assert first.done()
        deliveries.add(late)
        await turns()
        deliveries.add(later)
        deliveries.add(later)
        loop.now = LONG_S / ROUND_SHARE - 1
        await turns()
        assert not late.done() and not later.done()
        loop.now = LONG_S / ROUND_SHARE
        await turns()
        assert late.done() and later.done()

    loop.run_until_complete(main())


def test_what_comes_while_a_round_runs_is_in_the_next(loop: ClockLoop) -> None:
    async def main() -> None:
        deliveries = Deliveries()
        second = waiting(loop)
        gone = waiting(loop)
        deliveries.add(waiting(loop, lambda: deliveries.add(second)))
        deliveries.add(gone)
        gone.cancel()
        await turns()
        assert second.done() and not second.cancelled()

    loop.run_until_complete(main())
