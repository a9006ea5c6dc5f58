"""Converts OpenAI's chat messages into the form that chat templates read, with the calls of earlier turns."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field

from ....workers.common.errors import InvalidRequest
from ...dialects.tools import INPUT
from ...tokens.chat_template import Message, PromptEnd
from .fields import FieldCheck, Known

T = TypeVar("T")
# Only one error is reported, so a million are not collected.
Many = Annotated[list[T], Field(fail_fast=True)]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # by a part's type
_EMPTY = ("", [], {})
_OF_ANSWERS = ("annotations", "logprobs")  # in a part that was copied from an answer


class _MessagePart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def extra(self) -> Mapping[str, object]:
        return self.model_extra or {}


class FunctionCall(_MessagePart):
    name: str
    arguments: str | dict[str, Any] | None = None

    def plain(self, where: str, fields: FieldCheck) -> Mapping[str, object]:
        """Call as templates read it: with its arguments as an object."""
        fields.check(self.extra, _FUNCTION_CALL, f"{where}.")
        arguments: object = self.arguments or {}
        if isinstance(arguments, str):
            try:
                arguments = pydantic_core.from_json(arguments, allow_inf_nan=False)
            except ValueError:  # a model wrote them, and clients send its calls back as they are
                arguments = readable_arguments(arguments)
        return {"name": self.name, "arguments": arguments}


class CustomCall(_MessagePart):
    name: str
    input: str


class ToolCall(_MessagePart):
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    def plain(self, where: str, fields: FieldCheck) -> Mapping[str, object]:
        """Call as templates read it."""
        fields.check(self.extra, _CALL, f"{where}.")
        if self.type == "custom" and self.custom is not None:
            function: Mapping[str, object] = {"name": self.custom.name, "arguments": {INPUT: self.custom.input}}
        elif self.type == "function" and self.function is not None:
            function = self.function.plain(f"{where}.function", fields)
        else:
            raise InvalidRequest(f"{where}.{self.type}: field required", param=f"{where}.{self.type}")
        given_id = {"id": self.id} if self.id is not None else {}
        return given_id | {"type": "function", "function": function}


class ChatMessage(_MessagePart):
    role: str
    content: str | Many[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def plain(self, where: str, fields: FieldCheck) -> Message:
        """Message as chat templates read it. `where`: names the message in errors."""
        if self.model_extra:
            fields.check(self.model_extra, _MESSAGE, f"{where}.")
        if self.role not in ROLES:
            fields.add_word(self.role, ROLES, f"{where}.role")
        # OpenAI's newer models call "system" "developer"; templates know only "system".
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, object] = {"role": role, "content": self._text(where, fields)}
        if self.name:
            plain["name"] = self.name
        if self.tool_calls or self.function_call:
            plain["tool_calls"] = self._calls(where, role, fields)
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            plain["reasoning"] = plain["reasoning_content"] = reasoning  # templates use one name or the other
        return plain

    def _calls(self, where: str, role: str, fields: FieldCheck) -> list[Mapping[str, object]]:
        if role != "assistant":
            field = "tool_calls" if self.tool_calls else "function_call"
            raise InvalidRequest(f"{where}.{field}: only an assistant's message has them", param=f"{where}.{field}")
        calls = [call.plain(f"{where}.tool_calls[{i}]", fields) for i, call in enumerate(self.tool_calls or ())]
        if self.function_call is not None:
            function = self.function_call.plain(f"{where}.function_call", fields)
            calls.append({"type": "function", "function": function})
        return calls

    def _text(self, where: str, fields: FieldCheck) -> str:
        if self.refusal:
            return self._refused(where, fields)
        if isinstance(self.content, str):
            return self.content
        where = f"{where}.content"
        if self.content is not None:
            return "\n".join(text_of(part, f"{where}[{i}]", fields) for i, part in enumerate(self.content))
        if self.tool_calls or self.function_call or self.reasoning or self.reasoning_content:
            return ""
        raise InvalidRequest(f"{where} is missing: send a string", param=where)

    def _refused(self, where: str, fields: FieldCheck) -> str:
        """Text of an answer of the assistant that is, or ends with, a refusal."""
        if self.role != "assistant":
            param = f"{where}.refusal"
            raise InvalidRequest(f"{param} is not supported: only an assistant's message has one", param=param)
        before = "" if self.content is None else self.model_copy(update={"refusal": None})._text(where, fields)
        return "\n".join(filter(None, (before, self.refusal)))


def readable_arguments(text: str) -> dict[str, Any]:
    """Arguments of a call, as far as what the model wrote can be read: it may have been cut, or be no JSON."""
    try:
        arguments = pydantic_core.from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def text_of(part: dict[str, Any], where: str, fields: FieldCheck) -> str:
    """Text of a part. `where`: names it in errors. Raises InvalidRequest for a part that is no text."""
    kind = part.get("type")
    field = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise InvalidRequest(
            f"{where}.type: only text parts are supported, got {str(kind)[:40]!r}", param=f"{where}.type"
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{field} must be a string", param=f"{where}.{field}")
    if len(part) > 2:
        served = ("type", field)
        known = Known(served, {}, _OF_ANSWERS)
        fields.check({k: v for k, v in part.items() if k not in served}, known, f"{where}.")
    return text


def end_of_prompt(messages: Sequence[Message], *, adds_header: bool | None, continues: bool | None) -> PromptEnd:
    """End of a chat's prompt. `adds_header`: vLLM's `add_generation_prompt`; `continues`: its `continue_final_message`;
    None: not given. Raises InvalidRequest."""
    if not continues:
        return PromptEnd.MESSAGE if adds_header is False else PromptEnd.HEADER
    param = "continue_final_message"
    if adds_header:
        raise InvalidRequest(f"{param} and add_generation_prompt exclude each other: leave one out", param=param)
    if messages and messages[-1].get("tool_calls"):
        raise InvalidRequest(f"{param}: the last message calls tools: only text can be continued", param=param)
    return PromptEnd.OPEN_MESSAGE


def continued_text(messages: Sequence[Message], end: PromptEnd) -> str | None:
    """Text of the message that the answer continues; None: it is a message of its own."""
    return str(messages[-1]["content"]) if messages and end is PromptEnd.OPEN_MESSAGE else None


def _known(model: type[BaseModel], not_served: Mapping[str, tuple[object, ...]], *no_effect: str) -> Known:
    return Known(tuple(model.model_fields), not_served, frozenset(no_effect))


_CALL = _known(ToolCall, {}, "index")  # position in the streamed answer that it was copied from
_FUNCTION_CALL = _known(FunctionCall, {})
_MESSAGE = _known(ChatMessage, {"audio": (), "tools": _EMPTY}, "annotations")
