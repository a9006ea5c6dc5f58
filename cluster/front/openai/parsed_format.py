"""Writes OpenAI's chat answers that are parsed: thoughts beside the content, calls of tools as OpenAI streams them.

TextDelta -> AnswerParser -> parts -> deltas of the message -> chunks, or one message
"""

import asyncio
import json
from collections.abc import Iterable, Sequence

import pydantic_core

from ....workers.common.request import FinishReason
from ...dialects.events import ArgumentsPart, CallBegin, CallEnd, Part, TextPart, ThoughtPart
from ...dialects.reader import AnswerParser, without_surrogates
from ...dialects.tools import INPUT, ToolUse
from ...tokens.tokenizer import Tokenizer
from ..generation import Generation
from ..retries.ids import IdSource
from ..text_completion import TextDelta
from .format import TEXT_MARK, ChatFormat, Include, chat_chunk, chat_logprobs, ending, slices, to_event
from .tokens import Json

_CALLS = {"function": "arguments", "custom": "input", "function_call": "arguments"}  # text of each kind of call


class ParsedChoice:
    """Message of one choice: its next deltas, from the text that the model writes."""

    def __init__(
        self, parser: AnswerParser, tools: ToolUse, ids: IdSource, *, short_ids: bool, reasoning: bool
    ) -> None:
        """`ids`: of calls; `short_ids`: they have nine letters and digits; `reasoning`: thoughts are sent."""
        self._parser = parser
        self._ids = ids
        self._tools = tools
        self._custom = {tool.name for tool in tools.tools if tool.custom}
        self._short_ids = short_ids
        self._reasoning = reasoning
        self._num_calls = 0
        self._held: list[str] | None = None  # arguments of a custom tool's call, which are sent as a whole
        self._is_kept = True  # the call that is being read
        self._num_tokens = 0  # whose text has not come yet
        self.num_thought_tokens = 0  # up to the last text of a thought

    def deltas(self, delta: TextDelta) -> list[Json]:
        """Deltas of the message that the text completes."""
        parts = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += self._end_of_text(was_cut=delta.finish_reason is not FinishReason.STOP)
        self._count(parts, len(delta.token_ids))
        return [found for part in parts if (found := self._delta(part))]

    def _end_of_text(self, *, was_cut: bool) -> list[Part]:
        parts = self._parser.end(was_cut=was_cut)
        if was_cut and self._tools.choice == "required":  # what is left there is the mark of a call, or its beginning
            return [part for part in parts if not isinstance(part, TextPart)]
        return parts

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and self._num_calls:
            return "function_call" if self._tools.legacy else "tool_calls"
        return None if reason is None else reason.value

    def message(self, deltas: Iterable[Json]) -> Json:
        """Message that the deltas are parts of."""
        texts: dict[str, list[str]] = {}
        called: list[Json] = []
        arguments: list[list[str]] = []  # of each call
        for delta in deltas:
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    texts.setdefault(name, []).append(delta[name])
            parts = delta.get("tool_calls", ()) if "function_call" not in delta else (delta,)
            for part in parts:
                kind, field = next((kind, field) for kind, field in _CALLS.items() if kind in part)
                if "name" in part[kind]:
                    called.append(part)
                    arguments.append([])
                arguments[-1].append(part[kind][field])
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        message |= {name: "".join(parts) for name, parts in texts.items()}
        calls = [_whole_call(call, "".join(parts)) for call, parts in zip(called, arguments, strict=True)]
        if calls and self._tools.legacy:
            return message | calls[0]
        if self._tools.choice == "required":  # as in vLLM, whose clients count the calls
            return {**message, "content": message["content"] or "", "tool_calls": calls}
        if calls:
            return message | {"tool_calls": calls}
        return {**message, "content": message["content"] or ""}

    def _count(self, parts: Sequence[Part], num_tokens: int) -> None:
        self._num_tokens += num_tokens
        for part in parts:
            if isinstance(part, ThoughtPart):
                self.num_thought_tokens += self._num_tokens
            self._num_tokens = 0

    def _delta(self, part: Part) -> Json | None:
        match part:
            case TextPart(text):
                return {"content": text}
            case ThoughtPart(text):
                return {"reasoning": text, "reasoning_content": text} if self._reasoning else None
            case CallBegin():
                return self._begin(part)
            case ArgumentsPart(text) if self._is_kept and self._held is not None:
                self._held.append(text)
                return None
            case ArgumentsPart(text):
                return self._call({"function": {"arguments": text}}) if self._is_kept else None
            case CallEnd():
                return self._end()

    def _begin(self, call: CallBegin) -> Json | None:
        """Begin a call. Of calls that may not be parallel only the first is kept, and none where none was offered."""
        is_parallel = self._tools.parallel and not self._tools.legacy
        self._is_kept = self._tools.is_parsed and (is_parallel or not self._num_calls)
        if not self._is_kept:
            return None
        self._num_calls += 1
        head: Json = {"id": call.call_id or self._new_id()}
        if call.name in self._custom:
            self._held = []
            return self._call(head | {"type": "custom", "custom": {"name": call.name, "input": ""}})
        return self._call(head | {"type": "function", "function": {"name": call.name, "arguments": ""}})

    def _end(self) -> Json | None:
        if not self._is_kept or self._held is None:
            return None
        arguments, self._held = "".join(self._held), None
        return self._call({"custom": {"input": _input(arguments)}})

    def _call(self, call: Json) -> Json:
        if self._tools.legacy:
            return {"function_call": call["function"]}
        return {"tool_calls": [{"index": self._num_calls - 1} | call]}

    def _new_id(self) -> str:
        return self._ids.letters(9) if self._short_ids else f"call_{self._ids.hex(12)}"


class ParsedChatFormat(ChatFormat):
    """Answers of /v1/chat/completions whose text is parsed."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        model: str,
        include: Include,
        tools: ToolUse,
        short_ids: bool,
        prefix: str = "",
    ) -> None:
        """`short_ids`: of calls; `prefix`: as in ChatFormat."""
        super().__init__(generation, tokenizer, model, include, prefix)
        self._choices = [
            ParsedChoice(completion.parser, tools, completion.ids, short_ids=short_ids, reasoning=include.reasoning)
            for completion in generation.completions
            if completion.parser is not None
        ]
        self._around_thought: dict[int, list[str]] = {}

    def _event(self, delta: TextDelta) -> str:
        """Chunks of a delta: one for each of its parts, at least one. The last has what belongs to its tokens."""
        index, choice = delta.index, self._choices[delta.index]
        opening, self._opening[index] = self._opening[index], ""
        deltas = choice.deltas(delta) or [{}]
        origins = self._origins(delta, self._num_tokens[index])
        self._num_tokens[index] += len(delta.token_ids)
        if not (self._varies or delta.logprobs or delta.finish_reason is not None):
            return opening + "".join(self._chunk_of(index, each) for each in deltas)
        logprobs = chat_logprobs(self._names, (delta,)) if delta.logprobs else None
        last = chat_chunk(index, deltas[-1], logprobs) | ending(delta) | origins
        last["finish_reason"] = choice.finish_reason(delta.finish_reason)
        if self._include.token_ids:
            last["token_ids"] = delta.token_ids
        before = "".join(self._chunk_of(index, each) for each in deltas[:-1])
        return opening + before + to_event(self._chunk(last))

    def _chunk_of(self, index: int, delta: Json) -> str:
        text = delta.get("content") or delta.get("reasoning")
        if text is None or self._include.continuous_usage:
            return to_event(self._chunk(chat_chunk(index, delta)))
        if "content" in delta:
            return json.dumps(text).join(self._around.get(index) or self._add_around(index))
        if index not in self._around_thought:
            marked = chat_chunk(index, {"reasoning": TEXT_MARK, "reasoning_content": TEXT_MARK})
            self._around_thought[index] = self._around_text(marked)
        return json.dumps(text).join(self._around_thought[index])

    def _usage(self) -> Json:
        usage = super()._usage()
        usage["completion_tokens_details"]["reasoning_tokens"] = sum(each.num_thought_tokens for each in self._choices)
        return usage

    async def _whole_choice(self, index: int, deltas: Sequence[TextDelta]) -> Json:
        choice = self._choices[index]
        parts: list[Json] = [{"content": self._prefix}] if self._prefix else []
        for some in slices(deltas):
            for delta in some:
                parts += choice.deltas(delta)
            await asyncio.sleep(0)  # let others run
        plain = await super()._whole_choice(index, deltas)
        return plain | {
            "message": choice.message(parts),
            "finish_reason": choice.finish_reason(deltas[-1].finish_reason),
        }


def _whole_call(call: Json, arguments: str) -> Json:
    """Call with all its arguments. `call`: its first part."""
    whole = {name: value for name, value in call.items() if name != "index"}
    kind, field = next((kind, field) for kind, field in _CALLS.items() if kind in whole)
    return whole | {kind: whole[kind] | {field: arguments}}


def _input(arguments: str) -> str:
    """Text of a custom tool's call, as far as it goes; its arguments as they are where the model wrote them wrongly."""
    for read in (json.loads, _read_cut):
        try:
            given = read(arguments)
        except (ValueError, RecursionError):
            continue
        text = given.get(INPUT) if isinstance(given, dict) else None
        if isinstance(text, str):
            return without_surrogates(text)
        if given == {}:  # it was cut before its text began
            return ""
    return arguments


def _read_cut(arguments: str) -> object:
    """Value of JSON that may lack its end. Raises ValueError."""
    return pydantic_core.from_json(arguments, allow_partial="trailing-strings")
