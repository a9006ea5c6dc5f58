"""Encodes prompts as token ids, bounded by the context. Synchronous: the caller chooses the process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...workers.common.errors import InvalidRequest, PromptTooLong
from ...workers.common.request import check_prediction_length, context_exceeded
from .chat_template import Message, PromptEnd
from .tokenizer import Tokenizer

MAX_MESSAGES = 8192
_INSTRUCTIONS = ("system", "developer")  # roles of messages that are never left out


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Conversation that the chat template turns into a prompt."""

    messages: Sequence[Message]
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: Sequence[Mapping[str, object]] = ()  # shown to the model by the template
    end: PromptEnd = PromptEnd.HEADER
    special: bool = False  # what the template writes gets the tokens of the tokenizer's post-processor, too
    documents: Sequence[Mapping[str, object]] = ()  # shown to the model by templates that read them
    min_room: int = 0  # tokens of the context for the answer, for which the oldest turns are left out; 0: none are


@dataclass(frozen=True, slots=True)
class WrittenChat:
    """ChatPrompt as JSON: it is rendered in another process, and is not read before."""

    json: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Prompt that is token ids already."""

    token_ids: tuple[int, ...]
    text: str | None = None  # of the prompt, where the answer repeats it


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cut of prompts that are too long. `num_tokens`: most that is kept; None: as many as the context has room for."""

    num_tokens: int | None = None
    keeps_end: bool = True  # else the beginning

    def cut(self, token_ids: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Tokens that are kept of a prompt. `room`: of the context."""
        num = max(1, room) if self.num_tokens is None else self.num_tokens
        return token_ids[-num:] if self.keeps_end else token_ids[:num]


Prompt = str | tuple[int, ...] | ChatPrompt | WrittenChat | Encoded


def check_num_messages(num: int) -> None:
    """Raise InvalidRequest for none or too many."""
    if not num:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    if num > MAX_MESSAGES:
        raise InvalidRequest(f"{num} messages; a conversation has at most {MAX_MESSAGES}", param="messages")


def encode_text(tokenizer: Tokenizer, text: str, max_context_tokens: int, *, special: bool = True) -> tuple[int, ...]:
    """Token ids of a text; an empty one has those that begin each text of the model, or none. Raises PromptTooLong."""
    if len(text) > max_context_tokens * tokenizer.max_token_chars:
        raise context_exceeded(
            max_context_tokens,
            f"the prompt has at least {len(text)} characters, more than this number of tokens can hold",
            "Please reduce the length of the prompt",
        )
    return tokenizer.encode(text, special=special)


def check_prediction_chars(tokenizer: Tokenizer, text: str) -> None:
    """Raise InvalidRequest for a text that has more tokens than a prediction may have, however it is encoded."""
    check_prediction_length(-(-len(text) // tokenizer.max_token_chars))


def encode_prediction(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of what an answer is expected to be like. Raises InvalidRequest."""
    check_prediction_chars(tokenizer, text)
    token_ids = tokenizer.encode(text, special=False)
    check_prediction_length(len(token_ids))
    return token_ids


def encode_chat(tokenizer: Tokenizer, chat: ChatPrompt, max_context_tokens: int) -> tuple[int, ...]:
    """Token ids of a chat, rendered by the template. Raises InvalidRequest, PromptTooLong."""
    check_num_messages(len(chat.messages))
    if chat.min_room:
        return _encode_newest(tokenizer, chat, max_context_tokens)
    most = max_context_tokens * tokenizer.max_token_chars
    end = PromptEnd(chat.end)  # a text, where the chat was written as JSON
    shown = chat.tools, chat.documents
    text = tokenizer.render_chat(chat.messages, chat.template_options, *shown, end=end, max_chars=most)
    return encode_text(tokenizer, text, max_context_tokens, special=chat.special)


def _encode_newest(tokenizer: Tokenizer, chat: ChatPrompt, max_context_tokens: int) -> tuple[int, ...]:
    """Token ids of the instructions at the beginning, and of as many of the newest turns as leave the room that is
    wanted; of one at least. A turn begins with a user's message: no result of a tool is left without its call."""
    messages = list(chat.messages)
    num_fixed = next((i for i, m in enumerate(messages) if m.get("role") not in _INSTRUCTIONS), len(messages))
    begins = [num_fixed, *(i for i in range(num_fixed + 1, len(messages)) if messages[i].get("role") == "user")]

    def encode(begin: int) -> tuple[int, ...]:
        kept = replace(chat, messages=messages[:num_fixed] + messages[begin:], min_room=0)
        return encode_chat(tokenizer, kept, max_context_tokens)

    def fitting(begin: int) -> tuple[int, ...] | None:
        try:
            token_ids = encode(begin)
        except PromptTooLong:
            return None
        return token_ids if len(token_ids) + chat.min_room <= max_context_tokens else None

    if (found := fitting(begins[0])) is not None:
        return found
    low, high = 1, len(begins) - 1
    while low <= high:
        middle = (low + high) // 2
        token_ids = fitting(begins[middle])
        if token_ids is None:
            low = middle + 1
        else:
            found, high = token_ids, middle - 1
    return encode(begins[-1]) if found is None else found
