"""Ends the awaits of one task from outside it, and never the code between them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """An Interrupt was asked for while its task waited, or before."""


class Interrupt:
    """Interruption of the awaits of one task. The code between them may wait for a client who does not read: `end` is
    called if the interruption comes meanwhile."""

    def __init__(self, end: Callable[[], Coroutine[Any, Any, None]], after_s: float | None = None) -> None:
        """`after_s`: it comes then by itself."""
        self._timer = None if after_s is None else asyncio.get_running_loop().call_later(after_s, self.ask)
        self._is_asked = False
        self._waiting: asyncio.Task[Any] | None = None
        self._end = end
        self._ending: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Interrupt. Idempotent."""
        if self._is_asked:
            return
        self._is_asked = True
        if self._waiting is not None:
            self._waiting.cancel()
        else:
            self._ending = asyncio.create_task(self._end())

    async def keep(self, awaitable: Awaitable[T]) -> T:
        """Result of `awaitable`. Raises Interrupted if the interruption comes first."""
        if self._is_asked:
            raise Interrupted
        self._waiting = asyncio.current_task()
        try:
            return await awaitable
        except asyncio.CancelledError as e:
            if self._is_asked and self._waiting is not None and not self._waiting.uncancel():
                raise Interrupted from e
            raise
        finally:
            self._waiting = None

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ending is not None:
            await self._ending
