"""All completions of one call, merged as their text comes. Knows neither HTTP nor gRPC.

Life of a Generation:  made by FrontDoor.start -> batches() runs one task for each completion -> the last one finishes |
an error of any ends all | the caller closes batches(). However it ends, every token stream is closed before batches()
returns, and when the deadline comes, whether the caller reads or not.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ...workers.common.errors import DeadlineExceeded, InternalError, RequestAborted
from ..common.timings import RequestTimings
from ..routing.token_source import TokenStreams
from .access.usage import Usage
from .interrupt import Interrupt, Interrupted
from .retries.one_by_one import in_turn, one_by_one
from .text_completion import TextCompletion, TextDelta

MAX_UNREAD_DELTAS = 1024  # of a generation with a slow reader
MAX_BATCH_TOKENS = 256  # in a batch, plus those of its last delta
MIN_LARGE_SIZE = 2048  # of a request: work on larger ones is interrupted to let others run


class Generation:
    """All completions of one call: n for each prompt; those of one prompt are adjacent."""

    def __init__(
        self,
        source: TokenStreams,
        request_id: str,
        completions: Sequence[TextCompletion],
        n: int,
        asked_s: float | None = None,
        *,
        is_one_by_one: bool = False,
    ) -> None:
        """`asked_s`: the client's whole time-out, where a part of it has passed already. `is_one_by_one`: deltas are of
        one token each, in an order that tokens alone decide."""
        assert completions and len(completions) % n == 0
        self.request_id = request_id
        self.completions = completions
        self.n = n  # completions of each prompt
        self._source = source
        self._firsts = completions[::n]
        self.timeout_s = completions[0].request.timeout_s
        self._asked_s = self.timeout_s if asked_s is None else asked_s
        self._num_running = len(completions)
        self._is_one_by_one = is_one_by_one

    @property
    def is_over(self) -> bool:
        """Return whether the last completion has ended: no batch follows the one that was given last."""
        return not self._num_running

    @property
    def service_tier(self) -> str:
        return self.completions[0].request.level.tier

    @property
    def usage(self) -> Usage:
        """Tokens used so far. A prompt counts once, whatever its number of completions."""
        return Usage(
            prompt_tokens=sum(len(c.request.prompt_token_ids) for c in self._firsts),
            completion_tokens=sum(c.num_tokens for c in self.completions),
            cached_tokens=sum(c.num_cached_tokens for c in self._firsts),
            accepted_prediction_tokens=sum(c.drafts.num_accepted for c in self.completions),
            rejected_prediction_tokens=sum(c.drafts.num_rejected for c in self.completions),
            stored_tokens=sum(c.num_stored_tokens for c in self._firsts),
        )

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the completions that have ended."""
        return [c.finish_reason.value for c in self.completions if c.finish_reason is not None]

    @property
    def timings(self) -> list[tuple[int, RequestTimings]]:
        """Index and timings of each completion that has timings."""
        return [(c.index, c.timings) for c in self.completions if c.timings is not None]

    def batches(self) -> AsyncGenerator[list[TextDelta], None]:
        """New deltas, as soon as there are any. Use it within `aclosing`: closing it aborts what still runs. Raises
        DiptychErrors."""
        if len(self.completions) == 1:
            return self._alone(self.completions[0])
        return in_turn(self._merged(), len(self.completions)) if self._is_one_by_one else self._merged()

    async def _merged(self) -> AsyncGenerator[list[TextDelta], None]:
        """New deltas of several completions, each of which has a task."""
        queue = _DeltaQueue()
        tasks: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(self.timeout_s, self._expire, tasks, queue)
        try:
            for completion in self.completions:
                task = asyncio.create_task(self._receive(completion, queue))
                task.add_done_callback(queue.report)
                tasks.append(task)
                if completion.request.size >= MIN_LARGE_SIZE:
                    await asyncio.sleep(0)  # let others run: submitting takes long
            while self._num_running:
                batch, error = await queue.take()
                self._num_running -= sum(delta.finish_reason is not None for delta in batch)
                if batch:
                    yield batch
                if error is not None and self._num_running:
                    raise error
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _alone(self, completion: TextCompletion) -> AsyncGenerator[list[TextDelta], None]:
        """New deltas of a single completion, without a second task."""
        stream = self._source.stream(completion.request)
        try:
            async with (
                aclosing(one_by_one(stream) if self._is_one_by_one else stream) as deltas,
                aclosing(Interrupt(deltas.aclose, self.timeout_s)) as deadline,
            ):
                while (delta := await deadline.keep(anext(deltas, None))) is not None:
                    text = completion.push(delta)
                    if text.finish_reason is not None:
                        self._num_running = 0
                    yield [text]
                    if text.finish_reason is not None:
                        return
            raise _unfinished()
        except (Interrupted, TimeoutError) as e:
            raise self._deadline_exceeded() from e
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _given_up() from e

    async def _receive(self, completion: TextCompletion, queue: "_DeltaQueue") -> None:
        stream = self._source.stream(completion.request)
        async with aclosing(one_by_one(stream) if self._is_one_by_one else stream) as deltas:
            async for delta in deltas:
                text = completion.push(delta)
                await queue.put(text)
                if text.finish_reason is not None:
                    return
        raise _unfinished()

    def _expire(self, tasks: Sequence[asyncio.Task[None]], queue: "_DeltaQueue") -> None:
        queue.fail(self._deadline_exceeded())
        for task in tasks:
            task.cancel()

    def _deadline_exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request did not finish within {self._asked_s:g} s: ask for fewer tokens, or for a longer timeout_s"
        )


def _given_up() -> RequestAborted:
    return RequestAborted("the router gave the request up: send it again")


def _unfinished() -> InternalError:
    return InternalError("the token stream ended without a finish reason: please report this")


class _DeltaQueue:
    """Queue from the tasks of a Generation to its reader: deltas, and the error that ends it."""

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []
        self._error: BaseException | None = None
        self._has_deltas, self._has_room = asyncio.Event(), asyncio.Event()

    async def put(self, delta: TextDelta) -> None:
        """Add a delta; wait while the queue is full. Meanwhile the source merges its tokens into one delta."""
        while len(self._deltas) >= MAX_UNREAD_DELTAS:
            self._has_room.clear()
            await self._has_room.wait()
        self._deltas.append(delta)
        self._has_deltas.set()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._has_deltas.set()

    def report(self, task: asyncio.Task[None]) -> None:
        """Take the outcome of a task."""
        error = _given_up() if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    async def take(self) -> tuple[list[TextDelta], BaseException | None]:
        """Deltas that have come, at most MAX_BATCH_TOKENS, and the error. Waits for one of the two."""
        await self._has_deltas.wait()
        self._has_room.set()
        num_tokens, end = 0, 0
        for delta in self._deltas:
            num_tokens, end = num_tokens + len(delta.token_ids), end + 1
            if num_tokens >= MAX_BATCH_TOKENS:
                break
        batch, self._deltas = self._deltas[:end], self._deltas[end:]
        if self._deltas:
            await asyncio.sleep(0)  # let others run: there are many deltas
            return batch, None
        self._has_deltas.clear()
        return batch, self._error
