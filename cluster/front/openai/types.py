"""Parses OpenAI's request bodies: JSON -> ParsedRequest.

Fields that are not read here follow the rule of fields.py. vLLM's extra sampling parameters are read too.
Every error is an InvalidRequest whose `param` names the field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import MAX_LOGPROBS, Grammar
from ...tokens.prompt_encoding import ChatPrompt, Prompt, Truncation
from ..answer_plan import AskedBudget
from ..beams.source import AskedBeams
from ..embedding_run import EmbeddingForm
from ..front_door import GenerationSpec
from ..levels import AskedLevel
from .fields import NO_EFFECT, NOT_SERVED, FieldCheck, Known, UnknownField
from .format import Include
from .messages import ChatMessage, Many, continued_text, end_of_prompt
from .predicted import Prediction
from .sampling import EXPECTED_BIAS, SamplingBody
from .structured import ResponseFormat
from .tools import FunctionDefinition, GivenTools, NamedTool, Tool, ToolChoice, read_functions, read_tools

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions

# Errors of a union name its members, which is no remedy for a client.
_EXPECTED = {
    "prompt": "a string, an array of strings, an array of token ids, or an array of arrays of token ids",
    "stop": "a string or an array of strings",
    "logit_bias": EXPECTED_BIAS,
    "input": "a string or an array of items",
    "tool_choice": "a string or an object",
    "function_call": "a string or an object",
    "guided_json": "a JSON Schema, or a string that holds one",
    "json_schema": "a JSON Schema, or a string that holds one",
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
        "prediction",
        "reasoning",
        "metadata",
        "custom_params",
    }
)

NumKept = Annotated[int, Field(ge=-1)]  # tokens of a prompt that is cut; -1: as many as the context has room for
Side = Literal["left", "right"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Request, checked, as the front door takes it."""

    spec: GenerationSpec
    include: Include
    stream: bool
    echo: bool
    unknown: tuple[UnknownField, ...]
    embedding: EmbeddingForm | None = None  # of a call for embeddings of its prompts
    names: Mapping[str, str] = field(default_factory=dict[str, str])  # that it has for fields of other names, by those


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CustomParams(BaseModel):
    """SGLang's parameters of a processor of logits: that of thoughts is built in."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    thinking_budget: int | None = None


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
    truncate_prompt_tokens: NumKept | None = None
    truncation_side: Side | None = None  # at which tokens are cut off; None: left
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None  # n is the number of beams, and of answers
    length_penalty: float | None = None  # of beams
    # Diptych's
    timings: bool | None = None  # add timings to the answer
    token_origins: bool | None = None  # say in each chunk of a stream which workers made its tokens, and when they came
    speculation: bool | None = None  # false: no drafts are verified for it
    sparse_attention: bool | None = None  # long contexts may be decoded in part; None: as workers are set

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
            origins=bool(self.token_origins),
        )

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, self.known())
        if self.structured_outputs is not None or self.cache_salt is not None:  # few have one
            super().check(fields)
        if (options := self.stream_options) is not None:
            if options.model_fields_set and not self.stream:
                raise InvalidRequest("stream_options needs stream=true", param="stream_options")
            fields.check(options.model_extra or {}, _STREAM_OPTIONS, "stream_options.")
        if self.token_origins and not self.stream:
            raise InvalidRequest("token_origins needs stream=true", param="token_origins")
        if self.use_beam_search and self.stream:
            raise InvalidRequest("use_beam_search needs stream=false: its answers come whole", param="stream")
        if self.length_penalty not in (None, 1.0) and not self.use_beam_search:
            raise InvalidRequest("length_penalty needs use_beam_search=true: leave it out", param="length_penalty")
        if self.response_format is not None:
            self.response_format.check(fields)
        if self.prompt_logprobs is not None:
            check_logprobs("prompt_logprobs", self.prompt_logprobs)
            if self.stream:
                raise InvalidRequest("prompt_logprobs needs stream=false: leave one out", param="prompt_logprobs")

    def beams(self) -> AskedBeams:
        return AskedBeams() if self.length_penalty is None else AskedBeams(self.length_penalty)

    @property
    def format_grammar(self) -> Grammar | None:
        grammar = None if self.response_format is None else self.response_format.grammar()
        return None if grammar is None else replace(grammar, field="response_format")


class CompletionBody(_RequestBody):
    """Body of POST /v1/completions."""

    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    add_special_tokens: bool | None = None  # vLLM's: false leaves out those of the tokenizer's post-processor
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def check(self, fields: FieldCheck) -> None:
        super().check(fields)
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of is not supported beyond n: leave it out", param="best_of")
        if self.logprobs is not None:
            check_logprobs("logprobs", self.logprobs)
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo repeats whole prompts: leave truncate_prompt_tokens out", param="echo")

    def call(self) -> ParsedRequest:
        """Parsed request. Raises InvalidRequest."""
        fields = FieldCheck()
        self.check(fields)
        return ParsedRequest(self._spec(), self.include, bool(self.stream), bool(self.echo), fields.unknown)

    def _spec(self) -> GenerationSpec:
        echoed = self.logprobs if self.echo else None
        asked = [num for num in (echoed, self.prompt_logprobs) if num is not None]
        kept = self.truncate_prompt_tokens
        return GenerationSpec(
            prompts=prompts_of(self.prompt),
            special=self.add_special_tokens is not False,
            sampling=self.sampling(self.logprobs, max(asked, default=None)),
            prompt_only=bool(self.echo) and self.max_tokens == 0,
            n=1 if self.n is None else self.n,
            beams=self.beams() if self.use_beam_search else None,
            stop=self.stops(),
            shows_stop=bool(self.include_stop_str_in_output),
            shows_special=self.skip_special_tokens is False,
            truncation=truncation(kept, self.truncation_side or "left") if kept is not None else None,
            seed=self.seed,
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
            level=AskedLevel(self.service_tier),
            speculates=self.speculation is not False,
            sparse_attention=self.sparse_attention,
        )


class ChatBody(_RequestBody):
    """Body of POST /v1/chat/completions."""

    messages: Many[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # vLLM's, and the next three; true adds those of the post-processor
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # the answer repeats the message that it continues
    documents: Many[dict[str, Any]] | None = None  # vLLM's: the template shows them to the model
    tools: Many[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Many[FunctionDefinition] | None = None  # this and the next: older names of tools and tool_choice
    function_call: str | NamedTool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None  # vLLM's: false leaves thoughts out
    separate_reasoning: bool | None = None  # SGLang's: false leaves thoughts in the content
    thinking_token_budget: int | None = None  # vLLM's; -1: none
    thinking_budget: int | None = None  # Qwen's name of it
    custom_params: CustomParams | None = None
    prediction: Prediction | None = None  # what the answer is expected to be like

    def check(self, fields: FieldCheck) -> None:
        super().check(fields)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        check_logprobs("top_logprobs", self.top_logprobs or 0)
        if self.custom_params is not None:
            fields.check(self.custom_params.model_extra or {}, _CUSTOM_PARAMS, "custom_params.")
        if self.tools and self.functions:
            raise InvalidRequest("functions is an older name of tools: leave one out", param="functions")
        if self.echo and not self.continue_final_message:
            raise InvalidRequest(
                "echo repeats the message that an answer continues: send continue_final_message, or leave echo out",
                param="echo",
            )

    def call(self) -> ParsedRequest:
        """Parsed request. Raises InvalidRequest."""
        fields = FieldCheck()
        self.check(fields)
        include = replace(self.include, reasoning=self.include_reasoning is not False)
        echo = bool(self.echo)
        names = {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return ParsedRequest(self._spec(fields), include, bool(self.stream), echo, fields.unknown, names=names)

    def _spec(self, fields: FieldCheck) -> GenerationSpec:
        messages = [message.plain(f"messages[{i}]", fields) for i, message in enumerate(self.messages)]
        tools = self._tools(fields)
        options = template_options(self.chat_template_kwargs, self.reasoning_effort)
        end = end_of_prompt(messages, adds_header=self.add_generation_prompt, continues=self.continue_final_message)
        kept = self.truncate_prompt_tokens
        is_parsed = self.separate_reasoning is not False or tools.use.is_parsed
        return GenerationSpec(
            prompts=(
                ChatPrompt(messages, options, tools.shown, end, bool(self.add_special_tokens), self.documents or ()),
            ),
            continues=continued_text(messages, end),
            tools=tools.use if is_parsed else None,
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None, self.prompt_logprobs),
            n=1 if self.n is None else self.n,
            beams=self.beams() if self.use_beam_search else None,
            stop=self.stops(),
            shows_stop=bool(self.include_stop_str_in_output),
            shows_special=self.skip_special_tokens is False,
            truncation=truncation(kept, self.truncation_side or "left") if kept is not None else None,
            seed=self.seed,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
            level=AskedLevel(self.service_tier),
            thought=self._thought(),
            speculates=self.speculation is not False,
            sparse_attention=self.sparse_attention,
            prediction=None if self.prediction is None else self.prediction.text(fields),
        )

    def _thought(self) -> AskedBudget | None:
        """Budget of the thought. Raises InvalidRequest where it is given under several names."""
        given = {"thinking_token_budget": self.thinking_token_budget, "thinking_budget": self.thinking_budget}
        if self.custom_params is not None:
            given["custom_params.thinking_budget"] = self.custom_params.thinking_budget
        asked = [AskedBudget(num, name) for name, num in given.items() if num is not None and num != -1]
        if len(asked) > 1:
            names = asked[0].param, asked[1].param
            raise InvalidRequest(f"{names[0]} and {names[1]} mean the same: leave one out", param=names[1])
        return asked[0] if asked else None

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


_CUSTOM_PARAMS = Known(tuple(CustomParams.model_fields), {})
_STREAM_OPTIONS = Known(tuple(StreamOptions.model_fields), {"include_obfuscation": (False,)})
_NONE_KNOWN = Known((), {})
_KNOWN: Mapping[type[_RequestBody], Known] = {
    CompletionBody: Known(tuple(CompletionBody.model_fields), NOT_SERVED, NO_EFFECT),
    ChatBody: Known(tuple(ChatBody.model_fields), NOT_SERVED, NO_EFFECT),
}

Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: bytes) -> Body:
    """Request body of that kind. Raises InvalidRequest."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        expected = getattr(kind, "expected", _EXPECTED if issubclass(kind, SamplingBody) else {})
        raise _invalid(e, expected, getattr(kind, "known", lambda: _NONE_KNOWN)(), body) from e


def _invalid(error: ValidationError, expected: Mapping[str, str], known: Known, body: bytes) -> InvalidRequest:
    """`expected`: values of fields that are unions."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    loc, kind = problem["loc"], problem["type"]
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    if not loc:
        return InvalidRequest("the body must be a JSON object")
    param = str(loc[0])
    if kind == "missing" and len(loc) == 1:
        FieldCheck().check(from_json(body), known)  # what stands in its place may be a field that is not served
        return InvalidRequest(f"{param} is missing", param=param)
    if param in expected:
        return InvalidRequest(f"{param} must be {expected[param]}", param=param)
    if param in _NESTED:
        # As messages[2].role. What follows one of these names a member of a union.
        end = next((i + 1 for i, part in enumerate(loc) if part in ("content", "arguments")), len(loc))
        param += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:end])
    return InvalidRequest(f"{param}: {problem['msg']}", param=param)


def truncation(num_kept: int, side: Side) -> Truncation:
    """Cut of prompts of which `num_kept` tokens are kept. Raises InvalidRequest."""
    if num_kept < 1 and num_kept != -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, got {num_kept}", param="truncate_prompt_tokens"
        )
    return Truncation(None if num_kept == -1 else num_kept, keeps_end=side == "left")


def check_logprobs(name: str, num: int) -> None:
    if not 0 <= num <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be in [0, {MAX_LOGPROBS}], got {num}", param=name)


def prompts_of(given: str | Sequence[object]) -> Sequence[Prompt]:
    """Prompts of a field that is a text, several, token ids, or several lists of those."""
    if isinstance(given, str):
        return (given,)
    if given and isinstance(given[0], int):
        return (_token_ids(given),)
    return [entry if isinstance(entry, str) else _token_ids(entry) for entry in given]


def _token_ids(entry: object) -> tuple[int, ...]:
    assert isinstance(entry, list)
    return tuple(entry)
