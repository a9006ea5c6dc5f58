"""Runs responses to their end without their clients, who read them where they are kept."""

import asyncio
import logging
from contextlib import aclosing

from ....workers.common.errors import Overloaded
from .answer import ResponseAnswer
from .run import ResponseRun
from .store import ResponseStore, Stored

log = logging.getLogger("diptych.responses")


class BackgroundRuns:
    """All of one router. They end with it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, run: ResponseRun, answer: ResponseAnswer, entry: Stored) -> asyncio.Task[None]:
        """Keep `run` as `entry` and run it in a task. Raises Overloaded."""
        run.keep_now(entry)
        if entry.events is not None:
            entry.events.add(answer.take_events())
        task = asyncio.create_task(self._to_end(run, answer, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _to_end(self, run: ResponseRun, answer: ResponseAnswer, entry: Stored) -> None:
        record = entry.events
        try:
            async with aclosing(run.events()) as events:
                async for text in events:
                    if record is not None:
                        record.add(text)
                        self._count(run, entry, len(text))
        except Exception:
            log.exception("the response %s broke off", entry.response_id)
        finally:
            if record is not None:
                record.add(answer.take_events())
                record.end()

    def _count(self, run: ResponseRun, entry: Stored, num_bytes: int) -> None:
        try:
            self._store.grow(entry, num_bytes)
        except Overloaded as e:
            run.fail(e)
