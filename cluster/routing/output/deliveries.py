"""Rounds in which the tokens of all requests are passed on to their callers."""

import asyncio
import math

ROUND_SHARE = 0.5  # of the time that rounds of deliveries may take, if tokens come faster than they are sent


class Deliveries:
    """Rounds in which tokens are passed on: each wakes the callers of `RequestDriver.next` that have new ones.

    Sending costs a write to a socket for each request of a round, however many tokens it has. So where rounds would
    take more than ROUND_SHARE of the time, the next one waits, and the tokens of several steps are sent together: the
    router has time left to take them from the workers. A token waits for the length of one round at most.
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.Future[None], None] = {}
        self._is_planned = False
        self._next_at = -math.inf

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Set the result of `waiter` in the next round."""
        self._due[waiter] = None
        if self._is_planned:
            return
        self._is_planned, loop = True, asyncio.get_running_loop()
        if loop.time() >= self._next_at:
            loop.call_soon(self._begin, loop)
        else:
            loop.call_at(self._next_at, self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        began, due, self._due = loop.time(), self._due, {}
        for waiter in due:
            if not waiter.done():
                waiter.set_result(None)
        loop.call_soon(self._end, loop, began)  # the tasks that were woken run before

    def _end(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        self._is_planned = False
        self._next_at = began + (loop.time() - began) / ROUND_SHARE
        if self._due:
            self.add(next(iter(self._due)))
