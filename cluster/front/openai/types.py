"""Parses OpenAI's request bodies: JSON -> ParsedRequest.

Fields that are not read here follow the rule of fields.py. vLLM's extra sampling parameters are read too.
Every error is an InvalidRequest whose `param` names the field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, NO_BIAS, Grammar, SamplingParams
from ...tokens.prompt_encoding import ChatPrompt, Prompt
from ..front_door import GenerationSpec
from ..levels import AskedLevel
from .fields import NO_EFFECT, NOT_SERVED, FieldCheck, Known, UnknownField, name_some
from .format import Include
from .messages import ChatMessage, Many
from .structured import (
    GUIDED_NAMES,
    NAMES,
    ResponseFormat,
    StructuredOutputs,
    check_structured,
    the_only,
)
from .tools import FunctionDefinition, GivenTools, NamedTool, Tool, ToolChoice, read_functions, read_tools

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions

# Errors of a union name its members, which is no remedy for a client.
_EXPECTED = {
    "prompt": "a string, an array of strings, an array of token ids, or an array of arrays of token ids",
    "stop": "a string or an array of strings",
    "logit_bias": "an object of token ids (as strings) and numbers",
    "input": "a string or an array of items",
    "tool_choice": "a string or an object",
    "function_call": "a string or an object",
    "guided_json": "a JSON Schema, or a string that holds one",
}
_NESTED = frozenset(
    {
        "messages",
        "tools",
        "functions",
        "stream_options",
        "response_format",
        "structured_outputs",
        "text",
        "reasoning",
        "metadata",
    }
)
_STRUCTURED = frozenset({"response_format", "text", "structured_outputs", *GUIDED_NAMES.values()})
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

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Request, checked, as the front door takes it."""

    spec: GenerationSpec
    include: Include
    stream: bool
    echo: bool
    unknown: tuple[UnknownField, ...]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(BaseModel):
    """Fields that all endpoints have. None: not given."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    model: str | None = None
    stop: str | Many[str] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    service_tier: str | None = None
    # vLLM's
    top_k: int | None = None  # 0 or -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None  # this and the next five: older names of the same
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    cache_salt: str | None = None  # requests with the same salt share cached prefixes
    # Diptych's
    timeout_s: float | None = None

    def check(self, fields: FieldCheck) -> None:
        """Raise InvalidRequest for fields that are not served, and for contradictions."""
        if self.structured_outputs is not None:
            check_structured(self.structured_outputs, fields)
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt must be a non-empty string: leave it out to share", param="cache_salt")

    @property
    def format_grammar(self) -> Grammar | None:
        """Grammar that the endpoint's own field gives. Raises InvalidRequest."""
        return None

    def _grammar(self) -> Grammar | None:
        """Return the grammar of the answer, if any. Raises InvalidRequest."""
        asked = [] if (own := self.format_grammar) is None else [own]
        if self.structured_outputs is not None:
            asked += self.structured_outputs.grammars(NAMES)
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=self.guided_json_object,
            whitespace_pattern=self.guided_whitespace_pattern,
        )
        asked += guided.grammars(GUIDED_NAMES)
        return the_only(asked)

    def sampling(self, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            logit_bias=_logit_bias(self.logit_bias) if self.logit_bias else NO_BIAS,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self._grammar() if self.__pydantic_fields_set__ & _STRUCTURED else None,
        )

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class _RequestBody(SamplingBody):
    """Fields that completions and chats have."""

    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    prompt_logprobs: int | None = None  # number of alternatives for each token of the prompt
    return_token_ids: bool | None = None  # of the prompt and of the answer
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens "token_id:5"
    # Diptych's
    timings: bool | None = None  # add timings to the answer

    @classmethod
    def known(cls) -> Known:
        return _KNOWN[cls]

    @property
    def include(self) -> Include:
        usage = bool(self.stream_options and self.stream_options.include_usage)
        return Include(
            usage=usage,
            continuous_usage=usage and bool(self.stream_options and self.stream_options.continuous_usage_stats),
            timings=bool(self.timings),
            service_tier=self.service_tier is not None,
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.prompt_logprobs,
        )

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, self.known())
        if self.structured_outputs is not None or self.cache_salt is not None:  # few have one
            super().check(fields)
        if (options := self.stream_options) is not None:
            if options.model_fields_set and not self.stream:
                raise InvalidRequest("stream_options needs stream=true", param="stream_options")
            fields.check(options.model_extra or {}, _STREAM_OPTIONS, "stream_options.")
        if self.response_format is not None:
            self.response_format.check(fields)
        if self.prompt_logprobs is not None:
            check_logprobs("prompt_logprobs", self.prompt_logprobs)
            if self.stream:
                raise InvalidRequest("prompt_logprobs needs stream=false: leave one out", param="prompt_logprobs")

    @property
    def format_grammar(self) -> Grammar | None:
        grammar = None if self.response_format is None else self.response_format.grammar()
        return None if grammar is None else replace(grammar, field="response_format")


class CompletionBody(_RequestBody):
    """Body of POST /v1/completions."""

    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def check(self, fields: FieldCheck) -> None:
        super().check(fields)
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of is not supported beyond n: leave it out", param="best_of")
        if self.logprobs is not None:
            check_logprobs("logprobs", self.logprobs)

    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if self.prompt and isinstance(self.prompt[0], int):
            return (_token_ids(self.prompt),)
        return [entry if isinstance(entry, str) else _token_ids(entry) for entry in self.prompt]

    def call(self) -> ParsedRequest:
        """Parsed request. Raises InvalidRequest."""
        fields = FieldCheck()
        self.check(fields)
        return ParsedRequest(self._spec(), self.include, bool(self.stream), bool(self.echo), fields.unknown)

    def _spec(self) -> GenerationSpec:
        echoed = self.logprobs if self.echo else None
        asked = [num for num in (echoed, self.prompt_logprobs) if num is not None]
        return GenerationSpec(
            prompts=self.prompts(),
            sampling=self.sampling(self.logprobs, max(asked, default=None)),
            prompt_only=bool(self.echo) and self.max_tokens == 0,
            n=1 if self.n is None else self.n,
            stop=self.stops(),
            seed=self.seed,
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
            level=AskedLevel(self.service_tier),
        )


class ChatBody(_RequestBody):
    """Body of POST /v1/chat/completions."""

    messages: Many[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Many[FunctionDefinition] | None = None  # this and the next: older names of tools and tool_choice
    function_call: str | NamedTool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None  # vLLM's: false leaves thoughts out
    separate_reasoning: bool | None = None  # SGLang's: false leaves thoughts in the content

    def check(self, fields: FieldCheck) -> None:
        super().check(fields)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        check_logprobs("top_logprobs", self.top_logprobs or 0)
        if self.tools and self.functions:
            raise InvalidRequest("functions is an older name of tools: leave one out", param="functions")

    def call(self) -> ParsedRequest:
        """Parsed request. Raises InvalidRequest."""
        fields = FieldCheck()
        self.check(fields)
        include = replace(self.include, reasoning=self.include_reasoning is not False)
        return ParsedRequest(self._spec(fields), include, bool(self.stream), echo=False, unknown=fields.unknown)

    def _spec(self, fields: FieldCheck) -> GenerationSpec:
        messages = [message.plain(f"messages[{i}]", fields) for i, message in enumerate(self.messages)]
        tools = self._tools(fields)
        options = template_options(self.chat_template_kwargs, self.reasoning_effort)
        is_parsed = self.separate_reasoning is not False or tools.use.is_parsed
        return GenerationSpec(
            prompts=(ChatPrompt(messages, options, tools.shown),),
            tools=tools.use if is_parsed else None,
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None, self.prompt_logprobs),
            n=1 if self.n is None else self.n,
            stop=self.stops(),
            seed=self.seed,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
            level=AskedLevel(self.service_tier),
        )

    def _tools(self, fields: FieldCheck) -> GivenTools:
        if self.functions:
            return read_functions(self.functions, self.function_call, fields)
        return read_tools(self.tools or (), self.tool_choice, self.parallel_tool_calls, fields)


def template_options(given: Mapping[str, Any] | None, effort: Effort | None) -> Mapping[str, Any]:
    """Options of a chat template: those that are `given`, and the effort of reasoning."""
    options = given or {}
    if effort is None:
        return options
    # Some templates read the effort, others only whether to think.
    return {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}


_STREAM_OPTIONS = Known(tuple(StreamOptions.model_fields), {"include_obfuscation": (False,)})
_KNOWN: Mapping[type[_RequestBody], Known] = {
    CompletionBody: Known(tuple(CompletionBody.model_fields), {**NOT_SERVED, "add_special_tokens": (True,)}, NO_EFFECT),
    ChatBody: Known(
        tuple(ChatBody.model_fields), {**NOT_SERVED, "add_special_tokens": (False,), "echo": (False,)}, NO_EFFECT
    ),
}

Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: bytes) -> Body:
    """Request body of that kind. Raises InvalidRequest."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise _invalid(e, _EXPECTED if issubclass(kind, SamplingBody) else {}) from e


def _invalid(error: ValidationError, expected: Mapping[str, str]) -> InvalidRequest:
    """`expected`: values of fields that are unions."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    loc, kind = problem["loc"], problem["type"]
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    if not loc:
        return InvalidRequest("the body must be a JSON object")
    param = str(loc[0])
    if kind == "missing" and len(loc) == 1:
        return InvalidRequest(f"{param} is missing", param=param)
    if param in expected:
        return InvalidRequest(f"{param} must be {expected[param]}", param=param)
    if param in _NESTED:
        # As messages[2].role. What follows one of these names a member of a union.
        end = next((i + 1 for i, part in enumerate(loc) if part in ("content", "arguments")), len(loc))
        param += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:end])
    return InvalidRequest(f"{param}: {problem['msg']}", param=param)


def check_logprobs(name: str, num: int) -> None:
    if not 0 <= num <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be in [0, {MAX_LOGPROBS}], got {num}", param=name)


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    wrong = [key for key, value in given.items() if not _is_bias(key, value)]
    if wrong:
        raise InvalidRequest(
            f"logit_bias must be {_EXPECTED['logit_bias']}, but is not at {name_some(wrong)}", param="logit_bias"
        )
    if not all(-100 <= value <= 100 for value in given.values()):
        raise InvalidRequest("a logit_bias must be in [-100, 100]", param="logit_bias")
    return {int(key): float(value) for key, value in given.items()}


def _is_bias(key: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return key.isascii() and key.isdecimal() and len(key) <= 10 and is_number


def _token_ids(entry: object) -> tuple[int, ...]:
    assert isinstance(entry, list)
    return tuple(entry)
