"""Source of answers that a beam search finds. A step of a search asks the router for one token after each of its beams,
with the most likely ones; what a step asks for again, the workers' prefix caches hold. So hand-offs, resumption and
bounds are those of any request.

    the first stream of a prompt begins its search ──> over: each stream gives its own answer as one delta
                                                   └── fails: each raises the error
    the last stream is closed: what still runs is aborted
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ....workers.common.errors import InternalError, InvalidRequest
from ....workers.common.request import MAX_LOGPROBS, FinishReason, Request, SamplingParams
from ....workers.core.runner import ModelInfo
from ...routing.token_source import TokenDelta, TokenStreams
from .search import Beam, BeamSearch

LEAST_S = 0.001  # time-out of a step
MAX_LENGTH_PENALTY = 10.0  # of either sign


@dataclass(frozen=True, slots=True)
class AskedBeams:
    """Beam search that a client asks for; its width is the number of completions."""

    length_penalty: float = 1.0


class BeamSource(TokenStreams):
    """Streams of the completions of one call."""

    def __init__(
        self, source: TokenStreams, asked: AskedBeams, requests: Sequence[Request], n: int, info: ModelInfo
    ) -> None:
        """`requests`: of the completions, `n` for each prompt. Raises InvalidRequest."""
        self._places: dict[str, tuple[_RunningSearch, int]] = {}
        for start in range(0, len(requests), n):
            search = _RunningSearch(source, asked, requests[start], n, info)
            for place, request in enumerate(requests[start : start + n]):
                self._places[request.request_id] = search, place

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        search, place = self._places[request.request_id]
        yield await search.answer(place)


class _RunningSearch:
    """Search of the answers to one prompt."""

    def __init__(self, source: TokenStreams, asked: AskedBeams, first: Request, width: int, info: ModelInfo) -> None:
        if abs(asked.length_penalty) > MAX_LENGTH_PENALTY:
            most = MAX_LENGTH_PENALTY
            raise InvalidRequest(
                f"length_penalty must be in [-{most:g}, {most:g}], got {asked.length_penalty}", param="length_penalty"
            )
        sampling = first.sampling
        end_ids = frozenset((*(() if sampling.ignore_eos else info.eos_token_ids), *sampling.stop_token_ids))
        max_tokens = min(sampling.max_tokens, info.max_context_tokens - len(first.prompt_token_ids))
        kept = sampling.min_tokens, sampling.logprobs
        self._search = BeamSearch(width, max_tokens, end_ids, asked.length_penalty, *kept)
        _check(sampling, width, self._search.num_next, info)
        self._source = source
        self._first = first
        num_logprobs = max(self._search.num_next, sampling.logprobs or 0)
        step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_logprobs)
        self._step = replace(first, sampling=step, trace=None, record=None, speculates=False)
        self._num_steps = 0
        self._num_cached = self._num_stored = 0  # tokens of the prompt
        self._num_readers = 0
        self._task: asyncio.Task[list[Beam]] | None = None

    async def answer(self, place: int) -> TokenDelta:
        """Return the answer of that place; with the last of those who wait for one the search is aborted."""
        began = asyncio.get_running_loop().time()
        self._task = task = self._task or asyncio.create_task(self._run())
        self._num_readers += 1
        try:
            beam = (await asyncio.shield(task))[place]
        finally:
            self._num_readers -= 1
            if not self._num_readers and not task.done():
                task.cancel()
                await asyncio.wait([task])
        return TokenDelta(
            beam.token_ids,
            beam.logprobs,
            FinishReason.STOP if beam.has_ended else FinishReason.LENGTH,
            self._num_cached,
            asyncio.get_running_loop().time() - began,
            num_stored_tokens=self._num_stored,
        )

    async def _run(self) -> list[Beam]:
        deadline = asyncio.get_running_loop().time() + self._first.timeout_s
        while not self._search.is_over:
            left_s = max(deadline - asyncio.get_running_loop().time(), LEAST_S)
            try:
                async with asyncio.TaskGroup() as group:
                    steps = [group.create_task(self._next(i, left_s)) for i in range(len(self._search.running))]
            except BaseExceptionGroup as e:
                raise e.exceptions[0] from None
            if not self._num_steps:
                first = steps[0].result()
                self._num_cached, self._num_stored = first.num_cached_tokens, first.num_stored_tokens
            self._num_steps += 1
            self._search.extend([step.result().logprobs[0].top for step in steps])
        return self._search.best()

    async def _next(self, i: int, left_s: float) -> TokenDelta:
        """Return the next token of a beam, with the most likely ones."""
        request = replace(
            self._step,
            request_id=f"{self._first.request_id}-{self._num_steps}-{i}",
            prompt_token_ids=(*self._first.prompt_token_ids, *self._search.running[i].token_ids),
            timeout_s=left_s,
        )
        async with aclosing(self._source.stream(request)) as deltas:
            found = [delta async for delta in deltas]
        if not found or not found[0].logprobs:
            raise InternalError("a token of a beam came without log-probabilities: please report this")
        return found[0]


def _check(sampling: SamplingParams, width: int, num_next: int, info: ModelInfo) -> None:
    """Raise InvalidRequest for what a search cannot do."""
    most = min(MAX_LOGPROBS, info.vocab_size)
    if num_next > most:
        raise InvalidRequest(
            f"a beam search of n={width} needs the {num_next} most likely tokens of a step (n + tokens that end an "
            f"answer), at most {most}: lower n",
            param="n",
        )
    asked = {
        sampling.grammar.field if sampling.grammar else "": sampling.grammar is not None,
        "thinking_token_budget": sampling.thought is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "logit_bias": bool(sampling.logit_bias),
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
    }
    for field in filter(asked.get, asked):
        raise InvalidRequest(
            f"a beam search goes by the model's own probabilities: leave {field} or use_beam_search out", param=field
        )
