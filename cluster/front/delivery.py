"""Bound on the time to send an answer, where sending waits for the client to read."""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

from ...workers.common.errors import DeadlineExceeded

GRACE_S = 1.0  # after a request's deadline, to send the error


class Delivery:
    """Context in which one task sends: until GRACE_S after the request's deadline, and at most `stall_s` for one
    message. Raises DeadlineExceeded."""

    def __init__(self, timeout_s: float, stall_s: float) -> None:
        self._limit = asyncio.timeout(timeout_s + GRACE_S)
        self._stall_s = stall_s
        self._is_sending = False
        self._num_sent = 0

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look_later()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as e:
            raise DeadlineExceeded("the client did not read the answer in time: read it as it arrives") from e

    async def of(self, sending: Awaitable[None]) -> None:
        self._is_sending = True
        await sending
        self._is_sending = False
        self._num_sent += 1

    def _look_later(self) -> None:
        num_sent = self._num_sent if self._is_sending else None
        self._timer = asyncio.get_running_loop().call_later(self._stall_s, self._look, num_sent)

    def _look(self, num_sent: int | None) -> None:
        if self._is_sending and num_sent == self._num_sent:
            self._limit.reschedule(asyncio.get_running_loop().time())
        else:
            self._look_later()
