"""Bodies of vLLM's /tokenize and /detokenize: a text or a conversation to count, and token ids to read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ....workers.common.errors import InvalidRequest
from ...tokens.prompt_encoding import ChatPrompt
from .fields import FieldCheck, Known, UnknownField
from .messages import ChatMessage, Many, end_of_prompt
from .tools import Tool, read_tools

_MODEL = ConfigDict(extra="allow", strict=True, frozen=True)
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    prompt: str | ChatPrompt
    special: bool  # a text's special tokens are added
    strings: bool  # the answer has the names of the tokens
    model: str | None
    unknown: Sequence[UnknownField]


class TokenizeBody(BaseModel):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model_config = _MODEL

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    tools: Many[Tool] | None = None
    documents: Many[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @classmethod
    def known(cls) -> Known:
        return _TOKENIZE

    def call(self) -> TokenizeCall:
        """Raises InvalidRequest."""
        fields = FieldCheck()
        fields.check(self.model_extra or {}, self.known())
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        of_chats = {"tools": self.tools, "documents": self.documents, "chat_template_kwargs": self.chat_template_kwargs}
        if self.prompt is not None and (name := next((name for name, value in of_chats.items() if value), None)):
            raise InvalidRequest(f"{name} needs messages: leave it out", param=name)
        return TokenizeCall(
            prompt=self._chat(fields) if self.prompt is None else self.prompt,
            special=self.add_special_tokens is not False,
            strings=bool(self.return_token_strs),
            model=self.model,
            unknown=fields.unknown,
        )

    def _chat(self, fields: FieldCheck) -> ChatPrompt:
        messages = [message.plain(f"messages[{i}]", fields) for i, message in enumerate(self.messages or ())]
        tools = read_tools(self.tools or (), None, None, fields)
        end = end_of_prompt(messages, adds_header=self.add_generation_prompt, continues=self.continue_final_message)
        options, special = self.chat_template_kwargs or {}, bool(self.add_special_tokens)
        return ChatPrompt(messages, options, tools.shown, end, special, self.documents or ())


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = _MODEL

    model: str | None = None
    tokens: Many[TokenId]

    @classmethod
    def known(cls) -> Known:
        return _DETOKENIZE

    def check(self, vocab_size: int) -> tuple[UnknownField, ...]:
        """Unknown fields of the body. Raises InvalidRequest."""
        fields = FieldCheck()
        fields.check(self.model_extra or {}, self.known())
        if (most := max(self.tokens, default=0)) >= vocab_size:
            raise InvalidRequest(f"tokens must be in [0, {vocab_size}), got {most}", param="tokens")
        return fields.unknown


_TOKENIZE = Known(
    tuple(TokenizeBody.model_fields),
    {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    },
)
_DETOKENIZE = Known(tuple(DetokenizeBody.model_fields), {})
