"""Writes OpenAI's answers: TextDelta -> JSON and server-sent events.

Streamed chunks differ only in their text: the JSON around the text is made once, and an event costs one JSON string.
"""

import asyncio
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from ....workers.common.errors import InvalidRequest
from ...routing.token_source import TokenLogprob
from ...tokens.tokenizer import Tokenizer
from ..generation import Generation
from ..json_parts import SLICE, Written, to_text
from ..text_completion import TextDelta
from .prompt_logprobs import CallPrompts
from .tokens import Json, TokenNames, finite

DONE = "data: [DONE]\n\n"
MAX_REPEATED_TOKENS = 1 << 18  # of prompts, in one answer, over its choices
MAX_SMALL_TOKENS = 2048  # of an answer that is written at once, prompts included: about a millisecond
TEXT_MARK = "\0"  # marks the place of the text in a chunk that is made once


@dataclass(frozen=True, slots=True)
class Include:
    """Optional parts of an answer. An answer that is not streamed always has its usage."""

    usage: bool = False
    continuous_usage: bool = False  # in every chunk: usage of its choice so far
    timings: bool = False
    service_tier: bool = False  # that served the call
    token_ids: bool = False  # of the prompt and of the answer
    tokens_as_ids: bool = False  # log-probabilities name tokens "token_id:5"
    reasoning: bool = True  # thoughts of a chat
    prompt_logprobs: int | None = None  # number of alternatives, in an answer that is not streamed
    origins: bool = False  # of each chunk's tokens: which workers made them, and when they came


class AnswerFormat:
    """Writer of one endpoint's answers to one call. `kind`, `chunk_kind`: OpenAI's names of the objects."""

    kind: str
    chunk_kind: str

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, model: str, include: Include, echo: Sequence[str] = ()
    ) -> None:
        """`echo`: text of the prompt for each choice, which begins with it (empty: no echo). Raises InvalidRequest
        where the answer would repeat too many tokens of prompts."""
        if include.token_ids:
            check_repeated(generation, "return_token_ids")
        self._generation = generation
        self._created = int(time.time())
        self._model = model
        self._include = include
        self._prompts = [c.request.prompt_token_ids for c in generation.completions]
        self._indices = range(len(self._prompts))
        self._around: dict[int, list[str]] = {}  # of each choice: the event of a chunk around its text
        self._num_tokens = [0 for _ in self._indices]  # of each choice, in the chunks so far
        self._names = TokenNames(tokenizer, include.tokens_as_ids)
        self._wants_logprobs = generation.completions[0].request.sampling.logprobs is not None
        self._echoes_logprobs = bool(echo) and self._wants_logprobs
        self._prompt_logprobs = CallPrompts(
            generation, self._names, echo if self._wants_logprobs else (), num_listed=include.prompt_logprobs
        )
        # Log-probabilities of prompts will come: `prepare` each batch.
        self.tells_of_prompts = self._prompt_logprobs.is_waiting
        # Chunks differ in more than the text.
        self._varies = include.continuous_usage or include.token_ids or include.origins

    @property
    def is_small(self) -> bool:
        """Return whether the answer has few tokens, each with its text and id at most."""
        num_tokens = sum(len(c.request.prompt_token_ids) + c.num_tokens for c in self._generation.completions)
        return num_tokens <= MAX_SMALL_TOKENS and not (self._wants_logprobs or self.tells_of_prompts)

    async def prepare(self, batch: Sequence[TextDelta]) -> Sequence[TextDelta]:
        """Deltas of this and earlier batches that can be written now. The event loop runs meanwhile."""
        return await self._prompt_logprobs.take(batch)

    def events(self, batch: Sequence[TextDelta]) -> str:
        """Server-sent events of new deltas: one for each, also where its text is held back or empty, so that a client
        sees each token when it is made."""
        return "".join(map(self._event, batch))

    def last_events(self) -> str:
        """Last events of a stream."""
        if not (self._include.usage or self._include.timings):
            return DONE
        usage: Json = {"usage": self._usage()} if self._include.usage else {}
        return to_event(self._head(self.chunk_kind) | {"choices": []} | usage | self._timings()) + DONE

    async def whole(self, deltas: Sequence[TextDelta]) -> Json:
        """Whole answer as JSON. The event loop runs meanwhile."""
        if self.tells_of_prompts:
            deltas = await self.prepare(deltas)
        own: list[list[TextDelta]] = [[] for _ in self._indices]
        for delta in deltas:
            own[delta.index].append(delta)
        choices = [await self._whole_choice(i, own[i]) for i in self._indices]
        return self._head(self.kind) | {"choices": choices, "usage": self._usage()} | self._timings()

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.stored_tokens,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": usage.accepted_prediction_tokens,
                "rejected_prediction_tokens": usage.rejected_prediction_tokens,
            },
        }

    def _timings(self) -> Json:
        if not self._include.timings:
            return {}
        return {"timings": [timings.to_json(index) for index, timings in self._generation.timings]}

    def _head(self, kind: str) -> Json:
        head: Json = {"id": self._generation.request_id, "object": kind, "created": self._created, "model": self._model}
        return head | {"service_tier": self._generation.service_tier} if self._include.service_tier else head

    def _chunk(self, choice: Json, besides: Json | None = None) -> Json:
        usage = self._chunk_usage(choice["index"])
        return self._head(self.chunk_kind) | {"choices": [choice]} | usage | (besides or {})

    def _chunk_usage(self, index: int) -> Json:
        if not self._include.continuous_usage:
            return {"usage": None} if self._include.usage else {}
        prompt, completion = len(self._prompts[index]), self._num_tokens[index]
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {"usage": counts}

    def _origins(self, delta: TextDelta, first: int) -> Json:
        """Fields of a chunk's choice that name the workers of its tokens, where they are asked for. `first`: position
        of the chunk's first token in the answer."""
        if not self._include.origins:
            return {}
        runs, end = self._generation.completions[delta.index].origins, first + len(delta.token_ids)
        ends = [*(position for position, _ in runs[1:]), end]
        found = [
            {"worker": worker, "num_tokens": min(run_end, end) - max(begin, first)}
            for (begin, worker), run_end in zip(runs, ends, strict=False)
            if begin < end and run_end > first
        ]
        return {"origins": found, "elapsed_s": round(delta.elapsed_s, 6)}

    def _token_ids(self, deltas: Sequence[TextDelta]) -> list[int]:
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def _add_around(self, index: int) -> list[str]:
        self._around[index] = self._around_text(self._marked(index))
        return self._around[index]

    def _around_text(self, choice: Json) -> list[str]:
        """Event of a chunk around the JSON of its text, whose places `choice` marks with TEXT_MARK."""
        return to_event(self._chunk(choice)).split(json.dumps(TEXT_MARK))

    @abstractmethod
    def _marked(self, index: int) -> Json:
        """Choice of a chunk in which TEXT_MARK stands for its text."""
        ...

    @abstractmethod
    def _event(self, delta: TextDelta) -> str: ...

    @abstractmethod
    async def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        """Whole choice, from its deltas (at least one)."""
        ...

    async def _all_logprobs(self, of: "LogprobsOf", deltas: Sequence[TextDelta]) -> Json | None:
        """Result of `of` for all deltas, made in slices. Its lists are Written."""
        if not self._wants_logprobs:
            return None
        found: Json = {}
        for part in slices(deltas):
            for name, value in of(self._names, part).items():
                found[name] = found.get(name, Written(())) + Written.of(value) if isinstance(value, list) else value
            await asyncio.sleep(0)
        return found


class CompletionFormat(AnswerFormat):
    """Answers of /v1/completions. With `echo`, text and `logprobs` of a choice begin with those of its prompt, which
    the first choice of a prompt gets for all of them."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, model: str, include: Include, echo: Sequence[str] = ()
    ) -> None:
        super().__init__(generation, tokenizer, model, include, echo)
        self._echo = list(echo) or [""] * len(self._indices)
        self._num_echoed = [len(text) for text in self._echo]
        self._owes_prompt = [
            bool(echo) or include.token_ids for _ in self._indices
        ]  # whether its first chunk still has to name the prompt

    def _marked(self, index: int) -> Json:
        return {"index": index, "text": TEXT_MARK, "logprobs": None, "finish_reason": None}

    def _event(self, delta: TextDelta) -> str:
        index = delta.index
        is_first, self._owes_prompt[index] = self._owes_prompt[index], False
        if not (is_first or self._varies or delta.logprobs or delta.finish_reason is not None):
            before, after = self._around.get(index) or self._add_around(index)
            return f"{before}{json.dumps(delta.text)}{after}"
        logprobs = self._logprobs(index, (delta,), is_first) if self._wants_logprobs else None
        choice = self._choice(index, (delta,), logprobs)
        if self._include.token_ids:
            if is_first:
                choice["prompt_token_ids"] = self._prompts[index]
            choice["token_ids"] = delta.token_ids
        choice |= self._origins(delta, self._num_tokens[index])
        self._num_tokens[index] += len(delta.token_ids)
        self._echo[index] = ""
        if is_first:  # the part of its prompt is Written
            return f"data: {to_text(self._chunk(choice))}\n\n"
        return to_event(self._chunk(choice))

    async def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        asked = self._include.token_ids  # null where not asked for, as in vLLM
        num_echoed = self._num_echoed[index]
        logprobs = await self._all_logprobs(lambda names, part: _completion_logprobs(names, part, num_echoed), deltas)
        if logprobs is not None and self._echoes_logprobs:
            prompt = self._prompt_logprobs.echoed(index)
            logprobs = {name: prompt[name] + column for name, column in logprobs.items()}
        return self._choice(index, deltas, logprobs) | {
            "token_ids": self._token_ids(deltas) if asked else None,
            "prompt_token_ids": self._prompts[index] if asked else None,
            "prompt_logprobs": self._prompt_logprobs.listed(index),
        }

    def _choice(self, index: int, deltas: Sequence[TextDelta], logprobs: Json | None) -> Json:
        return {
            "index": index,
            "text": self._echo[index] + "".join(d.text for d in deltas),
            "logprobs": logprobs,
            "finish_reason": None,
            **ending(deltas[-1]),
        }

    def _logprobs(self, index: int, deltas: Sequence[TextDelta], is_first: bool) -> Json:
        own = _completion_logprobs(self._names, deltas, self._num_echoed[index])
        if not (self._echoes_logprobs and is_first):
            return own
        prompt = self._prompt_logprobs.echoed(index)
        return {name: prompt[name] + Written.of(column) for name, column in own.items()}


class ChatFormat(AnswerFormat):
    """Answers of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, model: str, include: Include, prefix: str = ""
    ) -> None:
        """`prefix`: text that each answer begins with, of the message that it continues. Raises InvalidRequest."""
        super().__init__(generation, tokenizer, model, include)
        if prefix:
            check_repeated(generation, "echo")
        self._prefix = prefix
        first = {"role": "assistant", "content": prefix}
        self._opening = [to_event(self._chunk(chat_chunk(i, first), self._prompt_ids(i))) for i in self._indices]

    async def whole(self, deltas: Sequence[TextDelta]) -> Json:
        answer = await super().whole(deltas) | (self._prompt_ids(0) or {"prompt_token_ids": None})
        return answer | {"prompt_logprobs": self._prompt_logprobs.listed(0)}

    def _marked(self, index: int) -> Json:
        return chat_chunk(index, {"content": TEXT_MARK})

    def _prompt_ids(self, index: int) -> Json:
        return {"prompt_token_ids": self._prompts[index]} if self._include.token_ids else {}

    def _event(self, delta: TextDelta) -> str:
        index = delta.index
        opening, self._opening[index] = self._opening[index], ""
        if not (self._varies or delta.logprobs or delta.finish_reason is not None):
            before, after = self._around.get(index) or self._add_around(index)
            return f"{opening}{before}{json.dumps(delta.text)}{after}"
        origins = self._origins(delta, self._num_tokens[index])
        self._num_tokens[index] += len(delta.token_ids)
        logprobs = chat_logprobs(self._names, (delta,)) if delta.logprobs else None
        choice = chat_chunk(index, {"content": delta.text}, logprobs) | ending(delta) | origins
        if self._include.token_ids:
            choice["token_ids"] = delta.token_ids
        return opening + to_event(self._chunk(choice))

    async def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": self._prefix + "".join(d.text for d in deltas),
                "refusal": None,
            },
            "logprobs": await self._all_logprobs(chat_logprobs, deltas),
            **ending(deltas[-1]),
            "token_ids": self._token_ids(deltas) if self._include.token_ids else None,
        }


def slices(deltas: Sequence[TextDelta]) -> Iterator[Sequence[TextDelta]]:
    """Slices of `deltas`, of SLICE tokens each plus those of one delta; at least one slice."""
    start = num_tokens = 0
    for end, delta in enumerate(deltas, start=1):
        num_tokens += len(delta.token_ids)
        if num_tokens >= SLICE or end == len(deltas):
            yield deltas[start:end]
            start, num_tokens = end, 0


LogprobsOf = Callable[[TokenNames, Sequence[TextDelta]], Json]


def to_event(value: Json) -> str:
    return f"data: {to_json(value, ensure_ascii=True).decode()}\n\n"


def chat_chunk(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def ending(delta: TextDelta) -> Json:
    """Fields of the end of a choice; none before. `stop_reason`, as in vLLM: the stop string or the token of
    `stop_token_ids` that ended it."""
    if delta.finish_reason is None:
        return {}
    stop = delta.stop_token_id if delta.stop_string is None else delta.stop_string
    return {"finish_reason": delta.finish_reason.value, "stop_reason": stop}


def _completion_logprobs(names: TokenNames, deltas: Sequence[TextDelta], num_echoed: int) -> Json:
    """`num_echoed`: characters before the completion's own."""
    entries = [entry for d in deltas for entry in d.logprobs]

    def top(entry: TokenLogprob) -> Json:
        # The sampled token is always included, as with OpenAI, and comes first, as with vLLM: up to k + 1 entries.
        both = ((entry.token_id, entry.logprob), *entry.top)
        return {names.legacy(token_id): finite(logprob) for token_id, logprob in both}

    return {
        "tokens": [names.legacy(e.token_id) for e in entries],
        "token_logprobs": [finite(e.logprob) for e in entries],
        "top_logprobs": [top(e) for e in entries],
        "text_offset": [num_echoed + offset for d in deltas for offset in d.offsets],
    }


def chat_logprobs(names: TokenNames, deltas: Sequence[TextDelta]) -> Json:
    def token(token_id: int, logprob: float) -> Json:
        return names.chat(token_id) | {"logprob": finite(logprob)}

    content = [
        token(entry.token_id, entry.logprob) | {"top_logprobs": [token(i, p) for i, p in entry.top]}
        for delta in deltas
        for entry in delta.logprobs
    ]
    return {"content": content, "refusal": None}


def check_repeated(generation: Generation, param: str) -> None:
    """Raise InvalidRequest where an answer that repeats its prompts would repeat too many tokens."""
    num = sum(len(completion.request.prompt_token_ids) for completion in generation.completions)
    if num > MAX_REPEATED_TOKENS:
        raise InvalidRequest(
            f"{param} would repeat {num} tokens of prompts, at most {MAX_REPEATED_TOKENS}: lower n, or leave it out",
            param=param,
        )
