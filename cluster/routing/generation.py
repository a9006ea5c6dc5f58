"""The seam between the front door and the router, and what stands right above it: tokens become text.

    TokenSource     the router: token deltas come up, requests and aborts go down
    TextCompletion  one request's tokens -> text: detokenised, cut at stop strings. Pure
    Generation      all completions that one call asked for, merged as they come

The front door owns everything above the seam (text, ids, seeds, stop strings, n completions, usage), the router
everything below (workers, routes, resumption). This file knows neither HTTP nor gRPC.

Life of a Generation:  made by FrontDoor.start -> batches() runs one task a completion -> the last finishes | an error
of any ends all | the caller closes batches(). However it ends, every token stream is closed before batches() returns,
and when the deadline comes, whether the caller reads or not.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from ...workers.common.errors import DeadlineExceeded, InternalError, RequestAborted
from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import FinishReason, Request
from ...workers.core.runner import ModelInfo
from ..common.timings import RequestTimings
from ..tokens.detokenizer import Detokenizer
from ..tokens.stop_strings import StopStrings

T = TypeVar("T")

MAX_UNREAD_DELTAS = 1024  # of a generation whose reader is slow
MAX_BATCH_TOKENS = 256  # of a batch, and those of one delta more
MIN_LARGE_SIZE = 2048  # of a request that others do not wait for


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) of one sampled token and of the most likely ones, (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # one a token: a frozen one takes three times as long to make
class TokenDelta:
    """New tokens of one completion, as the router got them from a worker."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids; empty unless asked for
    finish_reason: FinishReason | None = None  # set on the last delta
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache; set on the first delta
    elapsed_s: float = field(default=0.0, compare=False)  # since the router got the request
    timings: RequestTimings | None = field(default=None, compare=False)  # with the first two tokens and the last delta
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # all that were asked for, in order; set on the first delta


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: a request sent now would be computed. A mixed worker counts in `num_mixed_workers` alone."""

    ready: bool
    num_prefill_workers: int = 0
    num_decode_workers: int = 0
    num_mixed_workers: int = 0
    num_requests: int = 0  # in flight at this router


class TokenSource(Protocol):
    """Computes requests; the Router is one."""

    def model(self) -> ModelInfo:
        """The served model. Raises Unavailable before the first worker is known."""
        ...

    def admit(self, num_sequences: int) -> None:
        """Raise Overloaded where that many sequences more would be too many; reserves nothing."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The completion's tokens, ending after the delta with a finish reason. Closing the generator (`aclose`) aborts
        the request. Raises DiptychErrors."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...


@dataclass(slots=True)
class TextDelta:
    """New text of completion `index`, and the tokens that came with it.

    Text lags behind tokens while a character, or what may become a stop string, is unfinished.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()  # parallel to logprobs: where each token begins in the completion's text, characters
    finish_reason: FinishReason | None = None  # set on the last delta
    stop_string: str | None = None  # the stop string that ended it
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # TokenDelta's, of the first of a prompt's completions


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextCompletion:
    """Turns one request's tokens into text."""

    def __init__(
        self, index: int, request: Request, detokenizer: Detokenizer, stops: StopStrings, *, prompt_only: bool = False
    ) -> None:
        """prompt_only: of the request's tokens nothing is told."""
        self._prompt_only = prompt_only
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.timings: RequestTimings | None = None  # complete once it has ended
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_chars = 0  # of detokenised text, held back or not

    def push(self, delta: TokenDelta) -> TextDelta:
        """The delta's text. On a stop string the text ends before it, the tokens with the one that completed it."""
        if not self.num_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        self.timings = delta.timings or self.timings
        if delta.finish_reason is FinishReason.ABORT:
            raise RequestAborted("the worker aborted the request: send it again")
        if self._prompt_only:
            end = FinishReason.LENGTH
            return TextDelta(self.index, "", (), finish_reason=end, prompt_logprobs=delta.prompt_logprobs)
        text: list[str] = []
        offsets: list[int] = []
        stop = None
        for i, token_id in enumerate(delta.token_ids, start=1):
            self.num_tokens += 1
            offsets.append(self._num_chars)
            # The token that ended it (end of sequence, or a stop token) is not text.
            is_end = delta.finish_reason is FinishReason.STOP and i == len(delta.token_ids)
            shown, stop = self._show("" if is_end else self._detokenizer.push(token_id))
            text.append(shown)
            if stop is not None:
                return self._ended(delta, "".join(text), offsets, stop)
        if delta.finish_reason is not None:
            shown, stop = self._show(self._detokenizer.flush())
            text += (shown, self._stops.flush() if stop is None else "")
            return self._ended(delta, "".join(text), offsets, stop)
        return TextDelta(
            self.index,
            "".join(text),
            delta.token_ids,
            delta.logprobs,
            tuple(offsets) if delta.logprobs else (),
            prompt_logprobs=delta.prompt_logprobs,
        )

    def _show(self, piece: str) -> tuple[str, str | None]:
        self._num_chars += len(piece)
        if self.num_tokens <= self.request.sampling.min_tokens:
            return piece, None
        return self._stops.push(piece)

    def _ended(self, delta: TokenDelta, text: str, offsets: list[int], stop: str | None) -> TextDelta:
        num = len(offsets)
        # A stop string ends it here: the router does not know that this was the last delta.
        self.timings = self.timings and replace(self.timings, total_s=delta.elapsed_s)
        return TextDelta(
            self.index,
            text,
            delta.token_ids[:num],
            delta.logprobs[:num],
            tuple(offsets) if delta.logprobs else (),
            delta.finish_reason if stop is None else FinishReason.STOP,
            stop,
            delta.prompt_logprobs,
        )


class Generation:
    """The completions of one call: n for each prompt, those of a prompt side by side."""

    def __init__(
        self,
        source: TokenSource,
        request_id: str,
        completions: Sequence[TextCompletion],
        n: int,
        asked_s: float | None = None,
    ) -> None:
        """`asked_s`: the client's time-out, where a part of it has gone already."""
        assert completions and len(completions) % n == 0
        self.request_id = request_id
        self.completions = completions
        self.n = n  # those of one prompt follow each other
        self._source = source
        self._firsts = completions[::n]
        self.timeout_s = completions[0].request.timeout_s
        self._asked_s = self.timeout_s if asked_s is None else asked_s

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts once however many completions it has."""
        return Usage(
            prompt_tokens=sum(len(c.request.prompt_token_ids) for c in self._firsts),
            completion_tokens=sum(c.num_tokens for c in self.completions),
            cached_tokens=sum(c.num_cached_tokens for c in self._firsts),
        )

    @property
    def timings(self) -> list[tuple[int, RequestTimings]]:
        """Of each completion that has any, by its index."""
        return [(c.index, c.timings) for c in self.completions if c.timings is not None]

    async def batches(self) -> AsyncGenerator[list[TextDelta], None]:
        """All that is new, as soon as something is. Use it within `aclosing`: to close it aborts what still runs.
        Raises DiptychErrors."""
        if len(self.completions) == 1:
            async with aclosing(self._alone(self.completions[0])) as batches:
                async for batch in batches:
                    yield batch
            return
        news = _News()
        tasks: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(self.timeout_s, self._expire, tasks, news)
        try:
            for completion in self.completions:
                task = asyncio.create_task(self._receive(completion, news))
                task.add_done_callback(news.report)
                tasks.append(task)
                if completion.request.size >= MIN_LARGE_SIZE:
                    await asyncio.sleep(0)  # for others: to submit it takes a while
            num_running = len(tasks)
            while num_running:
                batch, error = await news.take()
                if batch:
                    yield batch
                num_running -= sum(delta.finish_reason is not None for delta in batch)
                if error is not None and num_running:
                    raise error
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _alone(self, completion: TextCompletion) -> AsyncGenerator[list[TextDelta], None]:
        """The same of a single completion, without a task beside the caller's."""
        try:
            async with (
                aclosing(self._source.stream(completion.request)) as deltas,
                aclosing(_Deadline(self.timeout_s, deltas.aclose)) as deadline,
            ):
                while (delta := await deadline.keep(anext(deltas, None))) is not None:
                    text = completion.push(delta)
                    yield [text]
                    if text.finish_reason is not None:
                        return
            raise _unfinished()
        except TimeoutError as e:
            raise self._deadline_exceeded() from e
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _given_up() from e

    async def _receive(self, completion: TextCompletion, news: "_News") -> None:
        async with aclosing(self._source.stream(completion.request)) as deltas:
            async for delta in deltas:
                text = completion.push(delta)
                await news.put(text)
                if text.finish_reason is not None:
                    return
        raise _unfinished()

    def _expire(self, tasks: Sequence[asyncio.Task[None]], news: "_News") -> None:
        news.fail(self._deadline_exceeded())
        for task in tasks:
            task.cancel()

    def _deadline_exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request did not finish within {self._asked_s:g} s: ask for fewer tokens, or for a longer timeout_s"
        )


class _Deadline:
    """asyncio.timeout over several awaits of one task, between which other code runs that it must not interrupt. That
    may wait for a client who does not read: `end` is called for it when the deadline comes meanwhile."""

    def __init__(self, timeout_s: float, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        self._has_expired = False
        self._waiting: asyncio.Task[Any] | None = None
        self._end = end
        self._ending: asyncio.Task[None] | None = None

    async def keep(self, awaitable: Awaitable[T]) -> T:
        """What it gives. Raises TimeoutError if the deadline comes first."""
        if self._has_expired:
            raise TimeoutError
        self._waiting = asyncio.current_task()
        try:
            return await awaitable
        except asyncio.CancelledError as e:
            if self._has_expired and self._waiting is not None and not self._waiting.uncancel():
                raise TimeoutError from e
            raise
        finally:
            self._waiting = None

    async def aclose(self) -> None:
        self._timer.cancel()
        if self._ending is not None:
            await self._ending

    def _expire(self) -> None:
        self._has_expired = True
        if self._waiting is not None:
            self._waiting.cancel()
        else:
            self._ending = asyncio.create_task(self._end())


def _given_up() -> RequestAborted:
    return RequestAborted("the router gave the request up: send it again")


def _unfinished() -> InternalError:
    return InternalError("the token stream ended without a finish reason: please report this")


class _News:
    """What the tasks of a Generation tell its reader: deltas, and the error that ends it."""

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []
        self._error: BaseException | None = None
        self._has_news, self._has_room = asyncio.Event(), asyncio.Event()

    async def put(self, delta: TextDelta) -> None:
        """Waits while the reader has much to read: what a source has meanwhile, it gives in one piece."""
        while len(self._deltas) >= MAX_UNREAD_DELTAS:
            self._has_room.clear()
            await self._has_room.wait()
        self._deltas.append(delta)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._has_news.set()

    def report(self, task: asyncio.Task[None]) -> None:
        """How a task ended."""
        error = _given_up() if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    async def take(self) -> tuple[list[TextDelta], BaseException | None]:
        """What has come, up to a bound: one of the two at least."""
        await self._has_news.wait()
        self._has_room.set()
        num_tokens, end = 0, 0
        for delta in self._deltas:
            num_tokens, end = num_tokens + len(delta.token_ids), end + 1
            if num_tokens >= MAX_BATCH_TOKENS:
                break
        batch, self._deltas = self._deltas[:end], self._deltas[end:]
        if self._deltas:
            await asyncio.sleep(0)  # for others: it is much that waits here
            return batch, None
        self._has_news.clear()
        return batch, self._error
