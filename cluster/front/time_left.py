"""Time-out of a call while its prompt is read."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ...workers.common.errors import DeadlineExceeded

T = TypeVar("T")


class TimeLeft:
    """Rest of a call's time-out, in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def check(self) -> float:
        """Seconds that are left. Raises DeadlineExceeded where there are none."""
        if self._seconds <= 0:
            raise _unread()
        return self._seconds

    async def spend(self, work: Awaitable[T]) -> T:
        """Result of `work`. Raises DeadlineExceeded where it takes longer than is left."""
        loop = asyncio.get_running_loop()
        began, deadline = loop.time(), asyncio.timeout(self._seconds)
        try:
            async with deadline:
                return await work
        except TimeoutError as e:
            if not deadline.expired():
                raise
            raise _unread() from e
        finally:
            self._seconds -= loop.time() - began


def _unread() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the prompt was not read before the request's time was over: send less, or ask for a longer timeout_s"
    )
