"""Writes the answers of Anthropic's API: TextDelta -> a message of blocks, as JSON or as server-sent events.

deltas of a chat's message (openai/parsed_format.py) -> blocks that begin, grow and end -> events, or one message
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....workers.common.request import FinishReason
from ...dialects.tools import NO_TOOLS, ToolUse
from ..generation import Generation
from ..openai.format import TEXT_MARK, slices
from ..openai.messages import readable_arguments
from ..openai.parsed_format import ParsedChoice
from ..openai.tokens import Json
from ..text_completion import TextDelta

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}  # Anthropic's names of OpenAI's
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_DELTA_OF_CALL = ("input_json_delta", "partial_json")
_MAX_SMALL_TOKENS = 2048  # of an answer that is written at once
_to_ascii = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class BlockBegin:
    block: Json


@dataclass(frozen=True, slots=True)
class BlockText:
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    pass


Step = BlockBegin | BlockText | BlockEnd


class BlockSteps:
    """Steps of the blocks of one answer, from the deltas of a chat's message."""

    def __init__(self) -> None:
        self._open: str | None = None  # type of the block that has not ended

    def steps(self, deltas: Iterable[Json]) -> Iterator[Step]:
        for delta in deltas:
            for name, kind in (("reasoning", "thinking"), ("content", "text")):
                if text := delta.get(name):
                    yield from self._text(kind, text)
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)

    def end(self) -> Iterator[Step]:
        if self._open is not None:
            self._open = None
            yield BlockEnd()

    def _text(self, kind: str, text: str) -> Iterator[Step]:
        if self._open != kind:
            yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        yield BlockText(text)

    def _call(self, call: Json) -> Iterator[Step]:
        function = call["function"]
        if "name" in function:
            yield from self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        if function["arguments"]:
            yield BlockText(function["arguments"])

    def _begin(self, block: Json) -> Iterator[Step]:
        yield from self.end()
        self._open = block["type"]
        yield BlockBegin(block)


class MessagesFormat:
    """Writer of the answer to one call, which has one completion."""

    tells_of_prompts = False

    def __init__(
        self,
        generation: Generation,
        model: str,
        tools: ToolUse | None,
        *,
        num_asked: int | None,
        short_ids: bool,
        reasoning: bool,
    ) -> None:
        """`num_asked`: most tokens that the client wanted; `short_ids`: of calls; `reasoning`: thoughts are sent."""
        self._generation = generation
        self._model = model
        [completion] = generation.completions
        self._is_bounded_by_context = num_asked is not None and completion.request.sampling.max_tokens < num_asked
        self._choice = None
        if completion.parser is not None:
            self._choice = ParsedChoice(
                completion.parser, tools or NO_TOOLS, completion.ids, short_ids=short_ids, reasoning=reasoning
            )
        self._steps = BlockSteps()
        self._index = -1  # of the block that was begun last
        self._around: list[str] = []  # event that adds text to it, around the text
        self._has_begun = False
        self._finish: tuple[str | None, str | None] = (None, None)  # OpenAI's reason, stop string

    @property
    def is_small(self) -> bool:
        return self._generation.completions[0].num_tokens <= _MAX_SMALL_TOKENS

    async def prepare(self, batch: Sequence[TextDelta]) -> Sequence[TextDelta]:
        return batch

    def events(self, batch: Sequence[TextDelta]) -> str:
        """Server-sent events of new deltas; empty where their text is held back."""
        opening = "" if self._has_begun else self._opening()
        self._has_begun = True
        return opening + "".join(
            self._event(step) for delta in batch for step in self._steps.steps(self._deltas(delta))
        )

    def last_events(self) -> str:
        """Last events of a stream."""
        end = "".join(map(self._event, self._steps.end()))
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return end + to_event(delta) + to_event({"type": "message_stop"})

    async def whole(self, deltas: Sequence[TextDelta]) -> Json:
        """Whole answer as JSON. The event loop runs meanwhile."""
        blocks: list[tuple[Json, list[str]]] = []
        for some in slices(deltas):
            for step in self._steps.steps(part for delta in some for part in self._deltas(delta)):
                match step:
                    case BlockBegin(block):
                        blocks.append((block, []))
                    case BlockText(text):
                        blocks[-1][1].append(text)
                    case BlockEnd():
                        pass
            await asyncio.sleep(0)
        content = [_whole_block(block, "".join(texts)) for block, texts in blocks]
        return self._message(content) | self._stop() | {"usage": self._usage()}

    def _deltas(self, delta: TextDelta) -> Sequence[Json]:
        """Deltas of a chat's message. Keeps the reason for which the answer ends."""
        if self._choice is None:
            reason = None if delta.finish_reason is None else delta.finish_reason.value
            deltas: Sequence[Json] = ({"content": delta.text},)
        else:
            deltas = self._choice.deltas(delta)
            reason = self._choice.finish_reason(delta.finish_reason)
        if delta.finish_reason is not None:
            self._finish = (reason, delta.stop_string)
        return deltas

    def _event(self, step: Step) -> str:
        match step:
            case BlockBegin(block):
                self._index += 1
                kind, field = _DELTAS.get(block["type"], _DELTA_OF_CALL)
                grow = {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: TEXT_MARK}}
                self._around = to_event(grow).split(json.dumps(TEXT_MARK))
                return to_event({"type": "content_block_start", "index": self._index, "content_block": block})
            case BlockText(text):
                return json.dumps(text).join(self._around)
            case BlockEnd():
                return to_event({"type": "content_block_stop", "index": self._index})

    def _opening(self) -> str:
        stop = {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._generation.usage.prompt_tokens, "output_tokens": 0}  # divided at the end
        message = self._message([]) | stop | {"usage": usage}
        return to_event({"type": "message_start", "message": message}) + to_event({"type": "ping"})

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _stop(self) -> Json:
        reason, stop = self._finish
        if stop is not None and reason == FinishReason.STOP.value:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == FinishReason.LENGTH.value and self._is_bounded_by_context:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _REASONS.get(reason or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.stored_tokens,
            "cache_creation_input_tokens": usage.stored_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def to_event(value: Json) -> str:
    return f"event: {value['type']}\ndata: {_to_ascii(value)}\n\n"


def _whole_block(block: Json, text: str) -> Json:
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    return block | {"input": readable_arguments(text)}
