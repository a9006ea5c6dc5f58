"""OpenAI's request bodies: JSON -> GenerationSpec.

Parameters that nobody knows are ignored, as OpenAI-compatible servers do; parameters that clients may rely on and that
are not served get an error that names them. vLLM's extra sampling parameters are understood. Every error is an
InvalidRequest whose `param` names the field.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..workers.errors import InvalidRequest
from ..workers.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from .front_door import Chat, GenerationSpec, Prompt
from .openai_format import Include

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions

# What clients may send without harm; any other value would change the answer in a way that is not served.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "best_of": (None,),
}
# A union's own errors name its arms, not what the client should send.
_EXPECTED = {
    "prompt": "a string, an array of strings, an array of token ids, or an array of arrays of token ids",
    "stop": "a string or an array of strings",
    "logit_bias": "an object of token ids (as strings) and numbers",
}
_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)

T = TypeVar("T")
# One error is reported, so a million are not collected.
Many = Annotated[list[T], Field(fail_fast=True)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class _Body(BaseModel):
    """What both endpoints take. None: not given."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    n: int | None = None
    stop: str | Many[str] | None = None
    seed: Seed | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    # vLLM's
    top_k: int | None = None  # 0 or -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None  # prefixes are shared among those who send the same
    # Diptych's
    timeout_s: float | None = None
    timings: bool | None = None  # tell where the time went

    @property
    def include(self) -> Include:
        return Include(bool(self.stream_options and self.stream_options.include_usage), bool(self.timings))

    def check(self) -> None:
        """Raise InvalidRequest for what is known and not served, and for what contradicts itself."""
        for name, value in (self.model_extra or {}).items():
            if name in _HARMLESS and value not in _HARMLESS[name]:
                raise InvalidRequest(f"{name} is not supported: leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", param="stream_options")
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt must be a non-empty string: leave it out to share", param="cache_salt")

    def sampling(self, logprobs: int | None) -> SamplingParams:
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            logit_bias=_logit_bias(self.logit_bias or {}),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
        )

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of is not supported beyond n: leave it out", param="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("logprobs of the prompt are not supported: leave out echo or logprobs", param="echo")

    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if self.prompt and isinstance(self.prompt[0], int):
            return (_token_ids(self.prompt),)
        return [entry if isinstance(entry, str) else _token_ids(entry) for entry in self.prompt]

    def spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        self.check()
        return GenerationSpec(
            prompts=self.prompts(),
            sampling=self.sampling(self.logprobs),
            n=1 if self.n is None else self.n,
            stop=self.stops(),
            seed=self.seed,
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
        )


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[dict[str, Any]] | None = None
    name: str | None = None

    def plain(self, where: str) -> dict[str, str]:
        """As chat templates know it. `where` names the message in errors."""
        if (self.model_extra or {}).get("tool_calls"):
            raise InvalidRequest(f"{where}.tool_calls: tools are not supported", param=f"{where}.tool_calls")
        if self.content is None:
            raise InvalidRequest(f"{where}.content is missing: send a string", param=f"{where}.content")
        parts = [self.content] if isinstance(self.content, str) else _text_parts(self.content, f"{where}.content")
        # "developer" is what OpenAI's newer models call "system"; templates know the older word.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(parts)} | ({"name": self.name} if self.name else {})


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: Many[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}", param="top_logprobs"
            )

    def spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        self.check()
        messages = [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]
        return GenerationSpec(
            prompts=(Chat(messages, self.chat_template_kwargs or {}),),
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            n=1 if self.n is None else self.n,
            stop=self.stops(),
            seed=self.seed,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
        )


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse(kind: type[Body], body: bytes) -> Body:
    """A request body. Raises InvalidRequest."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise _invalid(e) from e


def _invalid(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    loc, kind = problem["loc"], problem["type"]
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    if not loc:
        return InvalidRequest("the body must be a JSON object")
    param = str(loc[0])
    if kind == "missing" and len(loc) == 1:
        return InvalidRequest(f"{param} is missing", param=param)
    if param in _EXPECTED:
        return InvalidRequest(f"{param} must be {_EXPECTED[param]}", param=param)
    if param == "messages":
        # messages[2].role; what follows a field of the message names the arm of a union.
        param += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:3])
    return InvalidRequest(f"{param}: {problem['msg']}", param=param)


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    bias: dict[int, float] = {}
    for key, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and is_number):
            raise InvalidRequest(f"logit_bias must be {_EXPECTED['logit_bias']}", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidRequest("a logit_bias must be in [-100, 100]", param="logit_bias")
        bias[int(key)] = float(value)
    return bias


def _text_parts(parts: list[dict[str, Any]], where: str) -> list[str]:
    texts: list[str] = []
    for i, part in enumerate(parts):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise InvalidRequest(
                f"{where}[{i}].type: only text parts are supported, got {str(kind)[:40]!r}", param=f"{where}[{i}].type"
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{i}].text must be a string", param=f"{where}[{i}].text")
        texts.append(text)
    return texts


def _token_ids(entry: object) -> tuple[int, ...]:
    assert isinstance(entry, list)
    return tuple(entry)
