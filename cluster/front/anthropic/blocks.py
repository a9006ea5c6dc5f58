"""Converts the messages of Anthropic's API, whose content is blocks, into the form that chat templates read.

One message may become several: results of tools are messages of their own there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from ....workers.common.errors import InvalidRequest
from ...tokens.chat_template import Message
from ..openai.fields import FieldCheck, Known, shorten
from ..openai.messages import Many

BILLING = "x-anthropic-billing-header:"  # begins a text that Claude Code sends with the instructions
ROLES = ("user", "assistant", "system")
_MODEL = ConfigDict(extra="allow", strict=True, frozen=True)


class Block(BaseModel):
    """Block of a message's content. Which fields it has depends on its type."""

    model_config = _MODEL

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | Many[Block] | None" = None
    is_error: bool | None = None
    data: str | None = None

    def the_text(self, where: str, fields: FieldCheck) -> str:
        """Text of a block that must be text. Raises InvalidRequest."""
        if self.type != "text":
            raise _not_served(self.type, where)
        self._check(where, fields)
        return _needed(self.text, f"{where}.text")

    def call(self, where: str, fields: FieldCheck) -> tuple[str, Mapping[str, object]]:
        """Name and call of a block of type tool_use."""
        self._check(where, fields)
        name, call_id = _named(self.name, f"{where}.name"), _named(self.id, f"{where}.id")
        if self.input is None:
            raise InvalidRequest(f"{where}.input is missing: send an object", param=f"{where}.input")
        function = {"name": name, "arguments": self.input}
        return call_id, {"id": call_id, "type": "function", "function": function}

    def result(self, where: str, names: Mapping[str, str], fields: FieldCheck) -> Message:
        """Message of a block of type tool_result. `names`: of the tools that were called, by the ids of the calls."""
        self._check(where, fields)
        call_id = _named(self.tool_use_id, f"{where}.tool_use_id")
        text = text_of(self.content or "", f"{where}.content", fields)
        message = {"role": "tool", "tool_call_id": call_id, "content": f"Error: {text}" if self.is_error else text}
        return message | {"name": names[call_id]} if call_id in names else message

    def thought(self, where: str, fields: FieldCheck) -> str:
        self._check(where, fields)
        return _needed(self.thinking, f"{where}.thinking")

    def check_redacted(self, where: str, fields: FieldCheck) -> None:
        """Check a block that only its maker can read. Raises InvalidRequest."""
        self._check(where, fields)
        _needed(self.data, f"{where}.data")

    def _check(self, where: str, fields: FieldCheck) -> None:
        if self.model_extra:
            fields.check(self.model_extra, _BLOCK, f"{where}.")


class GivenMessage(BaseModel):
    model_config = _MODEL

    role: str
    content: str | Many[Block]


def text_of(content: str | Sequence[Block], where: str, fields: FieldCheck) -> str:
    """Text of a content that is only text. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return "\n".join(block.the_text(f"{where}[{i}]", fields) for i, block in enumerate(content))


def system_messages(content: str | Sequence[Block], where: str, fields: FieldCheck) -> list[Message]:
    """System message of a content; none where it has only a billing header, a line that differs from call to call: no
    cached prefix would be found behind it. Raises InvalidRequest."""
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [block.the_text(f"{where}[{i}]", fields) for i, block in enumerate(content)]
    found = ((text, text.partition("\n")[2] if text.startswith(BILLING) else text) for text in texts)
    kept = [rest for text, rest in found if rest or not text]
    return [{"role": "system", "content": "\n".join(kept)}] if kept else []


def plain_messages(messages: Sequence[GivenMessage], fields: FieldCheck) -> list[Message]:
    """Messages as chat templates read them. Raises InvalidRequest."""
    names: dict[str, str] = {}  # of the tools that were called
    found: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        fields.check(message.model_extra or {}, _MESSAGE, f"{where}.")
        match message.role:
            case "user":
                found += _of_user(message.content, f"{where}.content", names, fields)
            case "assistant":
                found.append(_of_assistant(message.content, f"{where}.content", names, fields))
            case "system":
                found += system_messages(message.content, f"{where}.content", fields)
            case role:
                raise InvalidRequest(
                    f"{where}.role must be one of {', '.join(ROLES)}, got {shorten(role)}", param=f"{where}.role"
                )
    return found


def _of_user(content: str | Sequence[Block], where: str, names: Mapping[str, str], fields: FieldCheck) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    found: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(content):
        if block.type == "tool_result":
            found += _of_texts(texts)
            texts = []
            found.append(block.result(f"{where}[{i}]", names, fields))
        else:
            texts.append(block.the_text(f"{where}[{i}]", fields))
    return found + (_of_texts(texts) if found else [{"role": "user", "content": "\n".join(texts)}])


def _of_texts(texts: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": "\n".join(texts)}] if texts else []


def _of_assistant(content: str | Sequence[Block], where: str, names: dict[str, str], fields: FieldCheck) -> Message:
    """Message of the assistant. Adds the names of the tools that it called to `names`."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Mapping[str, object]] = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        match block.type:
            case "tool_use":
                call_id, call = block.call(place, fields)
                names[call_id] = block.name or ""
                calls.append(call)
            case "thinking":
                thoughts.append(block.thought(place, fields))
            case "redacted_thinking":
                block.check_redacted(place, fields)
            case _:
                texts.append(block.the_text(place, fields))
    message: dict[str, object] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "\n".join(thoughts)  # templates use one name or the other
    return message


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where} is missing: send a string", param=where)
    return value


def _named(value: str | None, where: str) -> str:
    if not value:
        raise InvalidRequest(f"{where} is missing or empty: send a name", param=where)
    return value


def _not_served(kind: str, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}.type: {shorten(kind)} is not supported here; text is, tool_result in a user's message, and thinking "
        "and tool_use in an assistant's",
        param=f"{where}.type",
    )


_NO_EFFECT = frozenset({"cache_control", "caller", "citations", "signature", "toolset_name"})
_BLOCK = Known(tuple(Block.model_fields), {}, _NO_EFFECT)
_MESSAGE = Known(tuple(GivenMessage.model_fields), {})
