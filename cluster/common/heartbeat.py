"""Watches whether a process still answers its owner, which ends it and starts another where it does not.

    worker       <- supervisor    its load reports; while it starts, `alive`
    router       <- supervisor    `alive`, answered by the event loop that serves requests
    supervisor   <- `serve`       `status`

Silence is counted in looks, not in seconds: an owner that was stopped for a while itself blames nobody for that. It is
never a reason to end anything but the process that is silent.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Silence:
    """Looks in a row at which there was no answer. Pure."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_looks = 0

    def look(self, *, has_answered: bool) -> bool:
        """Return whether it has lasted too long. Then the count begins again, for what is started in its place."""
        self._num_looks = 0 if has_answered else self._num_looks + 1
        if self._num_looks < self.limit:
            return False
        self._num_looks = 0
        return True


class Heartbeat:
    """Asks `ask` again and again, one call at a time; one that raises is no answer. Used on a running event loop;
    `close` it. `first_limit`: of looks before the first answer, where it is not `limit`."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, None]], limit: int, first_limit: int | None = None
    ) -> None:
        self._ask = ask
        self._limit = limit
        self._silence = Silence(first_limit or limit)
        self._call = asyncio.ensure_future(ask())

    @property
    def limit(self) -> int:
        """Looks that silence may last now."""
        return self._silence.limit

    def look(self) -> bool:
        """Return whether it has been silent for too long."""
        if not self._call.done():
            return self._silence.look(has_answered=False)
        if has_answered := self._call.exception() is None:
            self._silence = Silence(self._limit)
        self._call = asyncio.ensure_future(self._ask())
        return self._silence.look(has_answered=has_answered)

    def close(self) -> None:
        self._call.cancel()
        self._call.add_done_callback(lambda call: call.cancelled() or call.exception())
