"""Names of answers that one worker is asked for: one message at a time, and those that come meanwhile in the next.

A call of n completions asks for n answers in one moment, of each worker: so they are asked for together.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ....proto import worker_pb2
from ....workers.common.request import MAX_RECALLED

Answer = worker_pb2.RecalledAnswer | None  # None: the worker cannot be asked, or has not answered in time
Send = Callable[[Sequence[bytes], float], Awaitable[Sequence[worker_pb2.RecalledAnswer] | None]]


class RecallQueue:
    def __init__(self, send: Send) -> None:
        """`send`: ask for some names within a time, in seconds; it returns an answer for each, or None."""
        self._send = send
        self._waiting: deque[tuple[bytes, float, asyncio.Future[Answer]]] = deque()  # with the loop s until which
        self._task: asyncio.Task[None] | None = None

    def ask(self, name: bytes, timeout_s: float) -> asyncio.Future[Answer]:
        """Ask for one answer. The future has no exception."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((name, loop.time() + timeout_s, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run())  # begins after those that ask in this turn of the loop
        return answer

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                asked = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_RECALLED))]
                found: Sequence[Answer] | None = None
                try:
                    if (left_s := asked[0][1] - loop.time()) > 0:  # the first has waited longest
                        found = await self._send([name for name, _, _ in asked], left_s)
                finally:
                    _answer([answer for _, _, answer in asked], found)
        finally:
            self._task = None
            _answer([answer for _, _, answer in self._waiting], None)  # there are some only after a bug
            self._waiting.clear()


def _answer(asked: Sequence[asyncio.Future[Answer]], found: Sequence[Answer] | None) -> None:
    if found is None or len(found) != len(asked):
        found = [None] * len(asked)
    for answer, each in zip(asked, found, strict=True):
        if not answer.done():
            answer.set_result(each)
