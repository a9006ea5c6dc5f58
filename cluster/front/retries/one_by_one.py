"""Order of the events of an answer that may be asked for again: a function of its tokens, never of time.

    deltas of one completion -> one token each          deltas of several -> each one's first, each one's second, ...

So the n-th event is the same whoever makes it, and a client is served from there by a number alone.
"""

from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from ....workers.common.request import FinishReason
from ...routing.token_source import TokenDelta


class ChoiceDelta(Protocol):
    """Part of one of several completions."""

    @property
    def index(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


D = TypeVar("D", bound=ChoiceDelta)


async def one_by_one(deltas: AsyncGenerator[TokenDelta, None]) -> AsyncGenerator[TokenDelta, None]:
    """Deltas of one token each. Closing it closes `deltas`."""
    async with aclosing(deltas):
        async for delta in deltas:
            for part in split(delta):
                yield part


def split(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split a delta into those of its tokens."""
    num = len(delta.token_ids)
    if num <= 1:
        yield delta
        return
    for i, token_id in enumerate(delta.token_ids):
        is_last = i == num - 1
        yield TokenDelta(
            (token_id,),
            delta.logprobs[i : i + 1],
            delta.finish_reason if is_last else None,
            0 if i else delta.num_cached_tokens,
            delta.elapsed_s,
            delta.timings if is_last else None,
            () if i else delta.prompt_logprobs,
            delta.drafts,
            None,
            delta.origins,
            0 if i else delta.num_stored_tokens,
        )


class Turns(Generic[D]):
    """Deltas of several completions, in turn: each gives one, as long as it has not ended."""

    def __init__(self, num: int) -> None:
        self._waiting: list[deque[D]] = [deque() for _ in range(num)]
        self._running = deque(range(num))  # the first one's turn is next

    def take(self, batch: Sequence[D]) -> list[D]:
        """Add deltas, and return those whose turn has come."""
        for delta in batch:
            self._waiting[delta.index].append(delta)
        due: list[D] = []
        while self._running and self._waiting[self._running[0]]:
            index = self._running.popleft()
            due.append(self._waiting[index].popleft())
            if due[-1].finish_reason is None:
                self._running.append(index)
        return due


async def in_turn(batches: AsyncGenerator[list[D], None], num: int) -> AsyncGenerator[list[D], None]:
    """Batches of the deltas of `num` completions in turn. Closing it closes `batches`."""
    turns: Turns[D] = Turns(num)
    async with aclosing(batches):
        async for batch in batches:
            if due := turns.take(batch):
                yield due
