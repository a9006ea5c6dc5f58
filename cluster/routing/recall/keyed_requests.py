"""Requests whose answers clients may ask for again (Request.record): what is known of their tokens.

    asked again, here while the first still runs: the first ends with AnswerTakenOver, its tokens go on here
    asked again, wherever its router was lost: workers tell the tokens that they recorded

The records are soft: where they are gone, the tokens are made again, and are the same, because their noise is a
function of seed and position. A record spares time; it may only ever have too few tokens.

Two runs of one answer may differ after two tokens that are equally likely up to rounding, and where they had other
weights. What begins with tokens of one run goes on with that run's, on workers of its revision.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from ....proto import worker_pb2
from ....workers.common.errors import AnswerTakenOver, DiptychError, IdempotencyKeyReused
from ....workers.common.request import FinishReason, Request

RECALL_S = 0.5  # a worker that answers later is not waited for

log = logging.getLogger("diptych.router")


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens that an answer begins with, and the revision of the weights that made them; empty: any may go on."""

    token_ids: list[int] = field(default_factory=list[int])
    revision: str = ""


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

    @property
    def revision(self) -> str: ...

    def fail(self, error: DiptychError) -> None: ...


class RecallLink(Protocol):
    def recall(self, name: bytes, timeout_s: float) -> Awaitable[worker_pb2.RecalledAnswer | None]: ...


class KeyedRequests:
    """Requests of one router that have a record, by its name."""

    def __init__(self) -> None:
        self._running: dict[bytes, RunningRequest] = {}

    async def recall(self, request: Request, links: Sequence[tuple[str, RecallLink]], vocab_size: int) -> KnownTokens:
        """Tokens that workers of one revision have recorded, from the first on: of the revision with the most. `links`:
        with the revision of each one's worker. Raises IdempotencyKeyReused where the name stands for another call."""
        self.check(request)
        record = request.record
        assert record is not None
        found = await asyncio.gather(*(link.recall(record.name, RECALL_S) for _, link in links))
        by_revision: dict[str, list[worker_pb2.RecalledAnswer]] = {}
        for (revision, _), each in zip(links, found, strict=True):
            if each is not None and each.call:
                if each.call != record.call:
                    raise _reused()
                if all(_is_possible(part, vocab_size) for part in each.parts):
                    by_revision.setdefault(revision, []).append(each)
        best, most = KnownTokens(), (-1, -1)
        for revision, answers in by_revision.items():
            tokens, is_finished = joined(answers)
            known = usable(request, tokens, is_finished=is_finished)
            if (num := (len(known), len(tokens))) > most:
                best, most = KnownTokens(known, revision), num
        return best

    def check(self, request: Request) -> None:
        """Raise IdempotencyKeyReused where another call runs under the request's name."""
        running = None if request.record is None else self._running.get(request.record.name)
        if running is not None and running.state.request.record != request.record:
            raise _reused()

    def begin(self, request: Request, running: RunningRequest, recalled: KnownTokens) -> KnownTokens:
        """Begin a request that was checked, in the place of the one that runs under the same name. Returns its tokens
        so far: the longer of `recalled` and of that one's."""
        record = request.record
        if record is None:
            return recalled
        before, self._running[record.name] = self._running.get(record.name), running
        if before is None:
            return recalled
        tokens, revision = before.state.token_ids, before.revision
        known = usable(request, tokens, is_finished=before.state.finish is not None)
        before.fail(AnswerTakenOver("another call with the same Idempotency-Key goes on with this answer"))
        return KnownTokens(known, revision) if tokens and len(known) >= len(recalled.token_ids) else recalled

    def end(self, request: Request, running: RunningRequest) -> None:
        if request.record is not None and self._running.get(request.record.name) is running:
            del self._running[request.record.name]


def joined(answers: Sequence[worker_pb2.RecalledAnswer]) -> tuple[list[int], bool]:
    """Tokens of one run from the first on, of which each worker that computed some has its part; and whether the last
    is the answer's last. Of several runs that differ, the one whose first part is longest."""
    parts = [(part.first, list(part.token_ids)) for each in answers for part in each.parts]
    tokens: list[int] = []
    differ = False  # parts that were looked at
    for first, group in groupby(sorted(parts, key=lambda p: (p[0], -len(p[1]))), key=lambda p: p[0]):
        same_first = [each for _, each in group]
        differ |= any(each != same_first[0][: len(each)] for each in same_first)
        # Where runs differ, a part without an overlap may be of any.
        if first > len(tokens) or (differ and first == len(tokens) > 0):
            break
        for part in same_first:
            if _agree(tokens, first, part):
                tokens += part[len(tokens) - first :]
            else:
                differ = True
    return tokens, any(each.is_finished and _ends(tokens, each) for each in answers)


def _agree(tokens: Sequence[int], first: int, part: Sequence[int]) -> bool:
    known = tokens[first : first + len(part)]
    return known == part[: len(known)]


def _ends(tokens: Sequence[int], answer: worker_pb2.RecalledAnswer) -> bool:
    """Return whether the last part of a record is the end of `tokens`."""
    if not answer.parts:
        return False
    last = answer.parts[-1]
    return len(tokens) == last.first + len(last.token_ids) and _agree(tokens, last.first, list(last.token_ids))


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
        "the Idempotency-Key was used for another call, with another body or after another end of the earlier "
        "response: use a new key, or send the same body again, to the router that has the earlier response",
        param="idempotency-key",
    )
