"""Requests whose answers clients may ask for again (Request.record): what is known of their tokens.

    asked again, here while the first still runs: the first ends with AnswerTakenOver, its tokens go on here
    asked again, wherever its router was lost: workers tell the tokens that they recorded

The records are soft: where they are gone, the tokens are made again, and are the same, because their noise is a
function of seed and position. A record spares time; it may only ever have too few tokens.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from ....proto import worker_pb2
from ....workers.common.errors import AnswerTakenOver, DiptychError, IdempotencyKeyReused
from ....workers.common.request import FinishReason, Request

RECALL_S = 0.5  # a worker that answers later is not waited for

log = logging.getLogger("diptych.router")


class AnswerSoFar(Protocol):
    @property
    def request(self) -> Request: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def finish(self) -> FinishReason | None: ...


class RunningRequest(Protocol):
    """Request that runs at this router: its driver."""

    @property
    def state(self) -> AnswerSoFar: ...

    def fail(self, error: DiptychError) -> None: ...


class RecallLink(Protocol):
    async def recall(self, name: bytes, timeout_s: float) -> worker_pb2.RecalledAnswer | None: ...


class KeyedRequests:
    """Requests of one router that have a record, by its name."""

    def __init__(self) -> None:
        self._running: dict[bytes, RunningRequest] = {}

    async def recall(self, request: Request, links: Iterable[RecallLink], vocab_size: int) -> list[int]:
        """Tokens that workers have recorded, from the first on. Raises IdempotencyKeyReused where the name stands for
        another call."""
        self.check(request)
        record = request.record
        assert record is not None
        asked = (link.recall(record.name, RECALL_S) for link in links)
        found = await asyncio.gather(*asked, return_exceptions=True)
        answers = [each for each in found if isinstance(each, worker_pb2.RecalledAnswer) and each.call]
        if any(each.call != record.call for each in answers):
            raise _reused()
        parts = [part for each in answers for part in each.parts if _is_possible(part, vocab_size)]
        return usable(request, joined(parts), is_finished=any(each.is_finished for each in answers))

    def check(self, request: Request) -> None:
        """Raise IdempotencyKeyReused where another call runs under the request's name."""
        running = None if request.record is None else self._running.get(request.record.name)
        if running is not None and running.state.request.record != request.record:
            raise _reused()

    def begin(self, request: Request, running: RunningRequest, recalled: list[int]) -> list[int]:
        """Begin a request that was checked, in the place of the one that runs under the same name. Returns its tokens
        so far: the longer of `recalled` and of that one's."""
        record = request.record
        if record is None:
            return recalled
        before, self._running[record.name] = self._running.get(record.name), running
        if before is None:
            return recalled
        known = usable(request, before.state.token_ids, is_finished=before.state.finish is not None)
        before.fail(AnswerTakenOver("another call with the same Idempotency-Key goes on with this answer"))
        return max(recalled, known, key=len)

    def end(self, request: Request, running: RunningRequest) -> None:
        if request.record is not None and self._running.get(request.record.name) is running:
            del self._running[request.record.name]


def joined(parts: Iterable[worker_pb2.RecordedTokens]) -> list[int]:
    """Tokens from the first on, of which each worker that computed some has its part."""
    tokens: list[int] = []
    for part in sorted(parts, key=lambda part: part.first):
        if part.first <= len(tokens):
            tokens += part.token_ids[len(tokens) - part.first :]
    return tokens


def usable(request: Request, tokens: Sequence[int], *, is_finished: bool) -> list[int]:
    """Tokens that a request can begin with. A worker always makes the last one: it says why the answer ends."""
    sampling = request.sampling
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        return []  # log-probabilities are not recorded
    return list(tokens[: min(len(tokens) - is_finished, sampling.max_tokens - 1)])


def _is_possible(part: worker_pb2.RecordedTokens, vocab_size: int) -> bool:
    if not part.token_ids or max(part.token_ids) < vocab_size:
        return True
    log.warning("a worker recorded a token outside the vocabulary of %d: its record is not used", vocab_size)
    return False


def _reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        "the Idempotency-Key was used for another call: use a new key, or send the same body again",
        param="idempotency-key",
    )
