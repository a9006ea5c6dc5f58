"""Converts the items of a conversation between the forms of the Responses API and of chat templates.

    input items -> messages for the template, and items as GET /v1/responses/{id}/input_items lists them
    output items -> messages of the next turn

A template's assistant message has its thought, its text and its calls together: such items that follow each other
become one message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ....workers.common.errors import InvalidRequest
from ...tokens.chat_template import Message
from ...tokens.prompt_encoding import MAX_MESSAGES
from ..openai.fields import FieldCheck, Known, Values, shorten
from ..openai.messages import ChatMessage, CustomCall, FunctionCall, Many, ToolCall
from ..openai.tokens import Json
from ..retries.ids import IdSource

MAX_ID_CHARS = 64  # of an item, as the client names it
_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_EMPTY: Values = ([], "")
_INPUT_IDS = IdSource()

Model = TypeVar("Model", bound=BaseModel)


class _Item(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class FunctionCallItem(_Item):
    call_id: str
    name: str
    arguments: str


class CustomCallItem(_Item):
    call_id: str
    name: str
    input: str


class CallOutputItem(_Item):
    call_id: str
    output: str | Many[dict[str, Any]]


class ReasoningItem(_Item):
    content: Many[dict[str, Any]] | None = None


def new_item_id(kind: str, ids: IdSource) -> str:
    return f"{_PREFIX[kind]}_{ids.hex(16)}"


class Conversation:
    """Messages of a conversation, made item by item."""

    def __init__(self, fields: FieldCheck) -> None:
        self.messages: list[dict[str, Any]] = []
        self.items: list[Json] = []  # as they are listed
        self._fields = fields
        self._assistant: dict[str, Any] | None = None  # message that further items of the same turn belong to

    def add_text(self, text: str) -> None:
        """Add a user's message."""
        self.add({"type": "message", "role": "user", "content": text}, "input")

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add an item. `where`: names it in errors. Raises InvalidRequest."""
        kind = item.get("type") or "message"
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._function_call(item, where)
            case "custom_tool_call":
                self._custom_call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, where)
            case _:
                raise InvalidRequest(
                    f"{where}.type {shorten(str(kind))} is not supported: send {', '.join(_PREFIX)}",
                    param=f"{where}.type",
                )
        self.items.append(_listed(item, kind))
        if len(self.items) > MAX_MESSAGES:
            raise InvalidRequest(f"input has more than {MAX_MESSAGES} items: send fewer", param="input")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        given = {name: value for name, value in item.items() if name not in _OF_MESSAGES}
        plain = dict(_read(ChatMessage, given, where).plain(where, self._fields))
        if plain["role"] != "assistant":
            self._assistant = None
            self.messages.append(plain)
        elif (message := self._assistant) is None or message["content"] or "tool_calls" in message:
            self._begin(plain)
        else:
            message["content"] = plain["content"]

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        read = _read(ReasoningItem, item, where)
        self._check(read, where)
        parts = [part.get("text") for part in read.content or ()]
        if not all(isinstance(part, str) for part in parts):
            raise InvalidRequest(f"{where}.content: each part needs a text", param=f"{where}.content")
        if parts:  # the thought of another server's item may be in its summary only, which no model has written
            thought = "".join(map(str, parts))
            self._begin({"role": "assistant", "content": "", "reasoning": thought, "reasoning_content": thought})

    def _function_call(self, item: Mapping[str, Any], where: str) -> None:
        read = _read(FunctionCallItem, item, where)
        self._check(read, where)
        function = FunctionCall(name=read.name, arguments=read.arguments)
        self._call(ToolCall(id=read.call_id, function=function).plain(where, self._fields))

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        read = _read(CustomCallItem, item, where)
        self._check(read, where)
        custom = CustomCall(name=read.name, input=read.input)
        self._call(ToolCall(id=read.call_id, type="custom", custom=custom).plain(where, self._fields))

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        read = _read(CallOutputItem, item, where)
        self._check(read, where)
        message = ChatMessage(role="tool", content=read.output, tool_call_id=read.call_id)
        self._assistant = None
        self.messages.append(dict(message.plain(where, self._fields)))

    def _check(self, read: _Item, where: str) -> None:
        known = Known(tuple(type(read).model_fields), _NOT_SERVED, _NO_EFFECT)
        self._fields.check(read.model_extra or {}, known, f"{where}.")

    def _call(self, call: Mapping[str, object]) -> None:
        if self._assistant is None:
            self._begin({"role": "assistant", "content": ""})
        assert self._assistant is not None
        self._assistant.setdefault("tool_calls", []).append(call)

    def _begin(self, message: dict[str, Any]) -> None:
        self._assistant = message
        self.messages.append(message)


def output_messages(items: Sequence[Json]) -> Sequence[Message]:
    """Messages of an answer, for the next turn."""
    conversation = Conversation(FieldCheck())
    for item in items:
        conversation.add(item, "output")
    return conversation.messages


def _listed(item: Mapping[str, Any], kind: str) -> Json:
    """Item with all that OpenAI's types require."""
    given_id = item.get("id")
    is_named = isinstance(given_id, str) and 0 < len(given_id) <= MAX_ID_CHARS
    listed: Json = {**item, "id": given_id if is_named else new_item_id(kind, _INPUT_IDS), "type": kind}
    listed.setdefault("status", "completed")
    match kind:
        case "message":
            if isinstance(content := item.get("content"), str):
                part: Json = {"type": "input_text", "text": content}
                if item.get("role") == "assistant":
                    part = {"type": "output_text", "text": content, "annotations": []}
                listed["content"] = [part]
        case "reasoning":
            listed.setdefault("summary", [])
        case _:
            pass
    return listed


def _read(model: type[Model], item: Mapping[str, Any], where: str) -> Model:
    try:
        return model.model_validate(item)
    except ValidationError as e:
        problem = e.errors(include_url=False, include_context=False, include_input=False)[0]
        param = f"{where}.{problem['loc'][0]}"
        raise InvalidRequest(f"{param}: {problem['msg']}", param=param) from e


_OF_MESSAGES = ("type", "id", "status", "phase")
_NO_EFFECT = ("type", "id", "status", "summary", "created_by")
_NOT_SERVED: Mapping[str, Values] = {
    "encrypted_content": _EMPTY,
    "namespace": _EMPTY,
    "caller": ({"type": "direct"},),
    "async": (False,),
}
