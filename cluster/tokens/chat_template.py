"""Renders a checkpoint's chat template: messages in, prompt text out, as Hugging Face's `apply_chat_template` does.

Found in this order: `chat_template.jinja`, `chat_template.json`, `chat_template` in `tokenizer_config.json` (a text, or
a list of named ones of which "default" is taken). A template is a program that came with the checkpoint: it runs in
jinja2's immutable sandbox, which bounds neither time nor memory: a router renders in prompt_process.py.
"""

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...workers.common.errors import CheckpointError, InvalidRequest

Message = Mapping[str, object]  # role, content, and other keys that the template reads
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents", *SPECIAL_TOKENS}
)
# Stands at the end of the message that an answer continues. A template that trims messages takes its space away.
_MARK, _MARK_SPACE = "THE-ANSWER-GOES-ON-HERE", " "


class PromptEnd(enum.StrEnum):
    """End of a prompt, after its messages."""

    HEADER = "header"  # of the assistant's next message
    MESSAGE = "message"  # nothing more
    OPEN_MESSAGE = "open_message"  # the last message is not ended: the answer continues it


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(jinja2.TemplateError):
    """Raised by `raise_exception` of a template."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models are not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: "bos_token" and others that the template may name. Raises CheckpointError."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        env.filters["tojson"] = _tojson
        try:
            self._template = env.from_string(source, _GLOBALS)
        except jinja2.TemplateError as e:
            raise CheckpointError(f"the checkpoint's chat template does not compile: {e}. Correct or remove it") from e
        self._special_tokens = dict(special_tokens)
        self._reserved = _RESERVED | special_tokens.keys() | env.globals.keys() | _GLOBALS.keys()

    def render(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        documents: Sequence[Mapping[str, object]] = (),
        *,
        end: PromptEnd = PromptEnd.HEADER,
        max_chars: int | None = None,
    ) -> str:
        """Prompt of the messages. `options`: the template's own switches ("enable_thinking"); `tools`, `documents`:
        shown to the model. Rendering stops where the text has more than `max_chars`. Raises InvalidRequest, with the
        template's own message, if it has one."""
        if reserved := self._reserved & (options or {}).keys():
            raise InvalidRequest(f"chat_template_kwargs must not set {sorted(reserved)}", param="chat_template_kwargs")
        values = self._special_tokens | dict(options or {})
        values |= {"add_generation_prompt": end is PromptEnd.HEADER, "tools": tools or None}
        values["documents"] = documents or None
        if end is PromptEnd.OPEN_MESSAGE:
            messages = _with_mark(messages)
        try:
            text = self._text(messages, values, max_chars)
        except _Refused as e:
            raise InvalidRequest(f"the model's chat template refused the messages: {e}", param="messages") from e
        # A template is a program of the model's authors: on unexpected messages it may raise anything.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as e:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {type(e).__name__}: {e}", param="messages"
            ) from e
        is_whole = max_chars is None or len(text) <= max_chars
        return _up_to_mark(text) if end is PromptEnd.OPEN_MESSAGE and is_whole else text

    def _text(self, messages: Sequence[Message], values: Mapping[str, Any], max_chars: int | None) -> str:
        """Text of the messages. Many templates take one system message alone, as the first: where one refuses others,
        they are a part of it. Raises _Refused, and whatever the template raises."""
        try:
            return _join(self._template.generate(messages=messages, **values), max_chars)
        except _Refused:
            if (joined := _with_one_system(messages)) is None:
                raise
            return _join(self._template.generate(messages=joined, **values), max_chars)


def _with_one_system(messages: Sequence[Message]) -> list[Message] | None:
    """Messages whose system messages are one, the first; None: they are so already, or one of them ends the
    conversation, which then would end with another turn."""
    at = [i for i, message in enumerate(messages) if message.get("role") == "system"]
    if at in ([], [0]) or at[-1] == len(messages) - 1:
        return None
    text = "\n\n".join(str(messages[i]["content"]) for i in at)
    return [{**messages[at[0]], "content": text}, *(m for m in messages if m.get("role") != "system")]


def _with_mark(messages: Sequence[Message]) -> list[Message]:
    """Messages, with the mark at the end of the last one's text. Raises InvalidRequest."""
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str) or last.get("tool_calls"):
        raise InvalidRequest(
            "only a message of text can be continued: the last one has calls of tools", param="messages"
        )
    return [*before, {**last, "content": content + _MARK + _MARK_SPACE}]


def _up_to_mark(text: str) -> str:
    """Text up to the mark; as in transformers, without spaces at its end where the template trims messages. Raises
    InvalidRequest."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not show the last message, so that it cannot be continued: end the "
            "messages with the user's",
            param="messages",
        )
    return before if after.startswith(_MARK_SPACE) else before.rstrip()


def _join(pieces: Iterable[str], max_chars: int | None) -> str:
    kept: list[str] = []
    num_chars = 0
    for piece in pieces:
        kept.append(piece)
        num_chars += len(piece)
        if max_chars is not None and num_chars > max_chars:
            break
    return "".join(kept)


def find_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Text of the template, None where there is none. `config`: of tokenizer_config.json. Raises CheckpointError."""
    if (path := folder / "chat_template.jinja").is_file():
        return read_text(path)
    found: object = None
    if (path := folder / "chat_template.json").is_file():
        found = read_json(path).get("chat_template")
    found = config.get("chat_template") if found is None else found
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and "name" in entry}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{folder}: chat_template is a {type(found).__name__}, not a text")
    return found


def read_text(path: Path) -> str:
    """Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"cannot read {path}: {e}. Download the checkpoint again") from e


def read_json(path: Path) -> dict[str, Any]:
    """JSON object of the file, {} where there is no file. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}. Download the checkpoint again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object. Download the checkpoint again")
    return value
