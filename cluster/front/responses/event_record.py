"""Keeps the events of a response that runs in the background, for any number of readers, each from where it stood."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator

from ..retries.event_ids import END


class EventRecord:
    """Events of one response, from its first. `timeout_s`: how long the response may run, in seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._chunks: list[str] = []
        self._ends: list[int] = []  # of each chunk: number of events up to its end
        self._is_over = False
        self._changed = asyncio.Event()

    @property
    def num_events(self) -> int:
        return self._ends[-1] if self._ends else 0

    def add(self, events: str) -> None:
        """Take the next events, as they are sent."""
        if events:
            self._chunks.append(events)
            self._ends.append(self.num_events + events.count(END))
            self._tell()

    def end(self) -> None:
        """Tell readers that no event follows. Idempotent."""
        self._is_over = True
        self._tell()

    async def after(self, num_seen: int) -> AsyncGenerator[str, None]:
        """Events after the first `num_seen`, those to come too. An empty one comes at once."""
        yield ""
        at = bisect_right(self._ends, num_seen)
        while True:
            while at < len(self._chunks):
                if new := self._unseen(at, num_seen):
                    yield new
                at += 1
            if self._is_over:
                return
            await self._changed.wait()

    def _unseen(self, at: int, num_seen: int) -> str:
        """Events of chunk `at` after the first `num_seen` of all."""
        chunk, begin = self._chunks[at], self._ends[at - 1] if at else 0
        return chunk if num_seen <= begin else type(chunk)(END.join(chunk.split(END)[num_seen - begin :]))

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
