"""Runs one response from its first token to its end, and keeps it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ....workers.common.errors import DiptychError, InternalError
from ...common.quota import Quota
from ..generation import Generation
from ..interrupt import Interrupt, Interrupted
from ..whole_answers import num_logprobs
from .answer import ResponseAnswer
from .store import ResponseStore, Stored


class ResponseRun:
    def __init__(self, generation: Generation, answer: ResponseAnswer, store: ResponseStore, gathered: Quota) -> None:
        """`gathered`: of log-probabilities that are held until their answer ends."""
        self._generation = generation
        self._answer = answer
        self._store = store
        self._gathered = gathered
        self._entry: Stored | None = None  # where the response is kept
        self._is_kept = False  # it has begun there
        self._interrupt: Interrupt | None = None
        self._error: DiptychError | None = None

    def keep(self, entry: Stored) -> None:
        """Keep the response as `entry`, from when its events are first asked for: a client may leave before. Where one
        of the same key is kept already, from its first token: until then it may be refused."""
        self._entry = entry

    def keep_now(self, entry: Stored) -> None:
        """Keep the response as `entry` from now on: it runs without its client. Raises Overloaded."""
        self._entry = entry
        self._begin()

    def cancel(self) -> None:
        """End the response now, whether its client reads or not. Idempotent."""
        self._answer.cancel()
        self._stop()

    def fail(self, error: DiptychError) -> None:
        """End the response now, with an error. Does nothing where it has ended."""
        self._answer.fail(error)
        self._stop()

    def _stop(self) -> None:
        self._record()
        if self._interrupt is not None:
            self._interrupt.ask()

    async def events(self) -> AsyncGenerator[str, None]:
        """Events, as soon as there are any. Closing it cancels the response. Raises DiptychErrors before the first."""
        answer = self._answer
        try:
            if answer.status.is_over:
                raise Interrupted
            if self._entry is not None and self._entry.response_id not in self._store:
                self._begin()
            async with (
                aclosing(self._generation.batches()) as batches,
                aclosing(Interrupt(batches.aclose)) as self._interrupt,
            ):
                with self._gathered.share() as held:
                    while (batch := await self._interrupt.keep(anext(batches, None))) is not None:
                        held.take(sum(map(num_logprobs, batch)))
                        self._begin()
                        answer.push(batch)
                        if events := answer.take_events():
                            yield events
            answer.finish()
        except Interrupted:
            pass  # `cancel` has ended it
        except DiptychError as e:
            if not answer.has_begun:
                raise
            self._error = e
            answer.fail(e)
        except (GeneratorExit, asyncio.CancelledError):
            if answer.has_begun:
                answer.cancel()  # the client left, or the router ends
            raise
        finally:
            if answer.has_begun:
                answer.fail(InternalError("the router failed by its own fault: its log has the traceback"))  # else over
            self._record()
        yield answer.take_events()

    async def whole(self) -> bytes:
        """JSON of the whole response. Raises DiptychErrors."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        if self._error is not None:
            raise self._error
        return self._answer.json().encode()

    def _begin(self) -> None:
        """Begin to keep the response. Idempotent. Raises Overloaded."""
        if self._entry is not None and not self._is_kept:
            self._store.begin(self._entry)
            self._is_kept = True

    def _record(self) -> None:
        entry, self._entry = self._entry, None
        if entry is None:
            return
        if self._answer.has_begun:
            answer = self._answer
            self._store.end(entry, answer.json(), answer.messages(), is_whole=answer.is_whole)
        else:
            self._store.drop(entry)
