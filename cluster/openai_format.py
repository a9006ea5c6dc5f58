"""OpenAI's answers: TextDelta -> JSON and server-sent events.

A streamed chunk differs from the one before it in its text alone: what surrounds the text is made once, and an event
costs one JSON string.
"""

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .generation import Generation, TextDelta, TokenLogprob, Usage
from .tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's word for "never": JSON has no infinity
_TEXT = "\0"  # stands for the text in a chunk that is made once

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Include:
    """What an answer tells besides, because it was asked for. A whole answer always has its usage."""

    usage: bool = False
    timings: bool = False


class Format:
    """One endpoint's answers to one call. `kind` and `chunk_kind` are OpenAI's names of the objects."""

    kind: str
    chunk_kind: str

    def __init__(self, generation: Generation, tokenizer: Tokenizer, model: str, include: Include) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._model = model
        self._include = include
        self._indices = range(len(generation.completions))
        self._wants_logprobs = generation.completions[0].request.sampling.logprobs is not None

    def events(self, batch: Sequence[TextDelta]) -> str:
        """Server-sent events of what is new: one for each delta, also where its text is held back or empty, so that a
        client sees each token when it is made."""
        return "".join(map(self._event, batch))

    def last_events(self) -> str:
        """What ends a stream."""
        if not (self._include.usage or self._include.timings):
            return DONE
        usage: Json = {"usage": _usage(self._generation.usage)} if self._include.usage else {}
        return to_event(self._head(self.chunk_kind) | {"choices": []} | usage | self._timings()) + DONE

    def whole(self, deltas: Sequence[TextDelta]) -> Json:
        """The answer in one piece."""
        own: list[list[TextDelta]] = [[] for _ in self._indices]
        for delta in deltas:
            own[delta.index].append(delta)
        choices = [self._choice(i, own[i]) for i in self._indices]
        usage = _usage(self._generation.usage)
        return self._head(self.kind) | {"choices": choices, "usage": usage} | self._timings()

    def _timings(self) -> Json:
        if not self._include.timings:
            return {}
        return {"timings": [timings.to_json(index) for index, timings in self._generation.timings]}

    def _head(self, kind: str) -> Json:
        return {"id": self._generation.request_id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choice: Json) -> str:
        usage = {"usage": None} if self._include.usage else {}
        return to_event(self._head(self.chunk_kind) | {"choices": [choice]} | usage)

    def _around_text(self, choice: Json) -> tuple[str, str]:
        """The chunk's event before and after the JSON of its text, which `choice` marks with _TEXT."""
        before, after = self._chunk(choice).split(json.dumps(_TEXT))
        return before, after

    @abstractmethod
    def _event(self, delta: TextDelta) -> str: ...

    @abstractmethod
    def _choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        """A whole choice, of its deltas (one at least)."""
        ...


class CompletionFormat(Format):
    """/v1/completions. `echo`: what each choice's text begins with (none: no echo)."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, model: str, include: Include, echo: Sequence[str] = ()
    ) -> None:
        super().__init__(generation, tokenizer, model, include)
        self._echo = list(echo) or [""] * len(self._indices)
        plain: Json = {"text": _TEXT, "logprobs": None, "finish_reason": None}
        self._around = [self._around_text({"index": i} | plain) for i in self._indices]

    def _event(self, delta: TextDelta) -> str:
        if delta.logprobs or delta.finish_reason is not None or self._echo[delta.index]:
            event = self._chunk(self._choice(delta.index, (delta,)))
            self._echo[delta.index] = ""
            return event
        before, after = self._around[delta.index]
        return f"{before}{json.dumps(delta.text)}{after}"

    def _choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        return {
            "index": index,
            "text": self._echo[index] + "".join(d.text for d in deltas),
            "logprobs": _completion_logprobs(self._tokenizer, deltas) if self._wants_logprobs else None,
            "finish_reason": _finish_reason(deltas[-1]),
        }


class ChatFormat(Format):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, generation: Generation, tokenizer: Tokenizer, model: str, include: Include) -> None:
        super().__init__(generation, tokenizer, model, include)
        self._around = [self._around_text(_chat_chunk(i, {"content": _TEXT})) for i in self._indices]
        self._opening = [self._chunk(_chat_chunk(i, {"role": "assistant", "content": ""})) for i in self._indices]

    def _event(self, delta: TextDelta) -> str:
        index = delta.index
        event, self._opening[index] = self._opening[index], ""
        if delta.logprobs:
            logprobs = _chat_logprobs(self._tokenizer, (delta,))
            event += self._chunk(_chat_chunk(index, {"content": delta.text}, logprobs))
        elif delta.text or delta.finish_reason is None:
            before, after = self._around[index]
            event += f"{before}{json.dumps(delta.text)}{after}"
        if delta.finish_reason is not None:
            event += self._chunk(_chat_chunk(index, {}, finish_reason=_finish_reason(delta)))
        return event

    def _choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(d.text for d in deltas), "refusal": None},
            "logprobs": _chat_logprobs(self._tokenizer, deltas) if self._wants_logprobs else None,
            "finish_reason": _finish_reason(deltas[-1]),
        }


def to_event(value: Json) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def _chat_chunk(index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(delta: TextDelta) -> str | None:
    return None if delta.finish_reason is None else delta.finish_reason.value


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _completion_logprobs(tokenizer: Tokenizer, deltas: Sequence[TextDelta]) -> Json:
    entries = [entry for d in deltas for entry in d.logprobs]

    def top(entry: TokenLogprob) -> Json:
        # The sampled token is always among them, as OpenAI has it: up to k + 1 entries.
        both = (*entry.top, (entry.token_id, entry.logprob))
        return {_legacy_name(tokenizer, token_id): _finite(logprob) for token_id, logprob in both}

    return {
        "tokens": [_legacy_name(tokenizer, e.token_id) for e in entries],
        "token_logprobs": [_finite(e.logprob) for e in entries],
        "top_logprobs": [top(e) for e in entries],
        "text_offset": [offset for d in deltas for offset in d.offsets],
    }


def _legacy_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; where it is none by itself, its bytes as OpenAI writes them: "bytes:\\xe2\\x82"."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_logprobs(tokenizer: Tokenizer, deltas: Sequence[TextDelta]) -> Json:
    def token(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        token(entry.token_id, entry.logprob) | {"top_logprobs": [token(i, p) for i, p in entry.top]}
        for delta in deltas
        for entry in delta.logprobs
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
