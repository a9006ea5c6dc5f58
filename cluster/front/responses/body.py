"""Reads the body of POST /v1/responses: JSON -> ResponseCall.

A ResponseCall holds most of its parts as JSON: the router puts them together, keeps and sends them, and reads none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import Grammar
from ...dialects.tools import ToolSpec, ToolUse
from ..front_door import GenerationSpec
from ..levels import AskedLevel
from ..openai.fields import NO_EFFECT, NOT_SERVED, FieldCheck, Known, Values, shorten
from ..openai.format import Include
from ..openai.messages import Many
from ..openai.structured import JsonSchemaFormat, ResponseFormat
from ..openai.tokens import Json
from ..openai.tools import (
    CustomDefinition,
    CustomFormat,
    CustomGrammar,
    FunctionDefinition,
    Tool,
    ToolChoice,
    read_tools,
)
from ..openai.types import Effort, ParsedRequest, SamplingBody, check_logprobs, template_options
from .items import Conversation

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # thoughts are sent as they are
MAX_ECHO_BYTES = 1 << 20  # of the fields that the answer repeats
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
_MODEL = ConfigDict(extra="allow", strict=True, frozen=True)
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """Call, checked. Texts that are JSON are ASCII."""

    parsed: ParsedRequest  # without its prompt
    system: str  # message with the instructions; may be empty
    messages: str  # of the input: JSON objects between commas
    template: str  # members of the ChatPrompt other than its messages
    items: tuple[tuple[str, str], ...]  # id and JSON of each item of the input
    echo: str  # members of the Response that repeat the call's
    previous: str | None  # id of the response that this one follows
    store: bool
    in_background: bool = False  # it runs without its client


class UsualFunction(FunctionDefinition):
    """Function whose `strict` is not given: it is, as far as its schema can be enforced."""

    def spec(self) -> ToolSpec:
        return replace(super().spec(), strict=True, lenient=True)


class ResponseTool(BaseModel):
    """Function, or custom tool."""

    model_config = _MODEL

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    def as_in_chats(self, where: str, fields: FieldCheck) -> Tool:
        """Tool as the body of a chat has it. Raises InvalidRequest."""
        if self.type not in ("function", "custom"):
            raise InvalidRequest(
                f"{where}.type {shorten(self.type)} is not supported: this server runs no tools of its own. Send tools "
                "of the types function and custom",
                param="tools",
            )
        if self.name is None:
            raise InvalidRequest(f"{where}.name is missing", param="tools")
        fields.check(self.model_extra or {}, _TOOL, f"{where}.")
        if self.type == "custom":
            custom = CustomDefinition(name=self.name, description=self.description, format=self._format(where))
            return Tool(type="custom", custom=custom)
        kind = UsualFunction if self.strict is None else FunctionDefinition
        function = kind(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)
        return Tool(function=function)

    def echo(self) -> Json:
        own: Json = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == "custom":
            return own | {"format": self.format or {"type": "text"}}
        return own | {"parameters": self.parameters, "strict": self.strict is not False}

    def _format(self, where: str) -> CustomFormat | None:
        """Format of a custom tool's text: flat here, nested in chats."""
        given = self.format
        if given is None or given.get("type") == "text":
            return None
        try:
            grammar = CustomGrammar.model_validate({k: v for k, v in given.items() if k != "type"})
            return CustomFormat.model_validate({"type": given.get("type"), "grammar": grammar})
        except ValidationError as e:
            raise InvalidRequest(
                f'{where}.format must be {{"type": "text"}} or {{"type": "grammar", "syntax": "lark" or "regex", '
                '"definition": ...}',
                param="tools",
            ) from e


class TextFormat(BaseModel):
    """Format of the text: flat here, nested in chats."""

    model_config = _MODEL

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def grammar(self) -> Grammar | None:
        """Raises InvalidRequest."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type).grammar()
        if self.schema_ is None:
            raise InvalidRequest("text.format.schema is missing: send the schema there", param="text.format.schema")
        schema = JsonSchemaFormat(schema=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema).grammar()


class TextConfig(BaseModel):
    model_config = _MODEL

    format: TextFormat | None = None

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, _TEXT, "text.")
        if self.format is not None:
            fields.check(self.format.model_extra or {}, _FORMAT, "text.format.")

    def echo(self) -> Json:
        given = {} if self.format is None else self.format.model_dump(by_alias=True, exclude_none=True)
        return {"format": {"type": "text"} | given, "verbosity": "medium"}


class Reasoning(BaseModel):
    model_config = _MODEL

    effort: Effort | None = None

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, _REASONING, "reasoning.")


class ResponseStreamOptions(BaseModel):
    model_config = _MODEL

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, _STREAM_OPTIONS, "stream_options.")


class ResponsesBody(SamplingBody):
    """Body of POST /v1/responses. None: not given."""

    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Many[ResponseTool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: Many[str] | None = None
    top_logprobs: int | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @classmethod
    def known(cls) -> Known:
        return _KNOWN

    def check(self, fields: FieldCheck) -> None:
        fields.check(self.model_extra or {}, self.known())
        super().check(fields)
        for part in (self.text, self.reasoning, self.stream_options):
            if part is not None:
                part.check(fields)
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise InvalidRequest(
                    f"include {shorten(name)} is not supported: send {' or '.join(INCLUDABLE)}", param="include"
                )
        check_logprobs("top_logprobs", self.top_logprobs or 0)
        if self.top_logprobs and not self._wants_logprobs:
            raise InvalidRequest(f'top_logprobs needs include=["{LOGPROBS}"]', param="top_logprobs")
        _check_metadata(self.metadata or {})
        if self.background and self.store is False:
            raise InvalidRequest(
                "background can only be used when `store` is true: the answer is read where it is kept",
                param="background",
            )

    @property
    def format_grammar(self) -> Grammar | None:
        given = None if self.text is None else self.text.format
        grammar = None if given is None else given.grammar()
        return None if grammar is None else replace(grammar, field="text.format")

    @property
    def _wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def call(self) -> ResponseCall:
        """Raises InvalidRequest."""
        fields = FieldCheck()
        self.check(fields)
        conversation = Conversation(fields)
        if isinstance(self.input, str):
            conversation.add_text(self.input)
        else:
            for i, item in enumerate(self.input):
                conversation.add(item, f"input[{i}]")
        chat_tools = [tool.as_in_chats(f"tools[{i}]", fields) for i, tool in enumerate(self.tools or ())]
        tools = read_tools(chat_tools, self.tool_choice, self.parallel_tool_calls, fields)
        if len(_to_json(self.chat_template_kwargs)) > MAX_ECHO_BYTES:
            raise InvalidRequest(
                f"chat_template_kwargs has more than {MAX_ECHO_BYTES} bytes: send less", param="chat_template_kwargs"
            )
        options = template_options(self.chat_template_kwargs, self.reasoning and self.reasoning.effort)
        spec = self._spec(tools.use)
        include = Include(service_tier=self.service_tier is not None)
        min_room = spec.num_reserved if self.truncation == "auto" else 0
        return ResponseCall(
            parsed=ParsedRequest(spec, include, bool(self.stream), echo=False, unknown=fields.unknown),
            system=_to_json({"role": "system", "content": self.instructions}) if self.instructions else "",
            messages=_to_json(conversation.messages)[1:-1],
            template=_to_json({"template_options": options, "tools": tools.shown, "min_room": min_room})[1:-1],
            items=tuple((item["id"], _to_json(item)) for item in conversation.items),
            echo=self._echo(spec),
            previous=self.previous_response_id,
            store=self.store is not False,
            in_background=bool(self.background),
        )

    def _spec(self, tools: ToolUse) -> GenerationSpec:
        return GenerationSpec(
            prompts=(),
            tools=tools,
            sampling=self.sampling((self.top_logprobs or 0) if self._wants_logprobs else None),
            stop=self.stops(),
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            timeout_s=self.timeout_s,
            model=self.model,
            cache_salt=self.cache_salt or "",
            level=AskedLevel(self.service_tier),
        )

    def _echo(self, spec: GenerationSpec) -> str:
        choice = self.tool_choice
        echo: Json = {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "store": self.store is not False,
            "max_output_tokens": self.max_output_tokens,
            "temperature": spec.sampling.temperature,
            "top_p": spec.sampling.top_p,
            "presence_penalty": spec.sampling.presence_penalty,
            "frequency_penalty": spec.sampling.frequency_penalty,
            "text": (self.text or TextConfig()).echo(),
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "tools": [tool.echo() for tool in self.tools or ()],
            "tool_choice": choice.model_dump(exclude_unset=True)
            if isinstance(choice, ToolChoice)
            else choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "top_logprobs": self.top_logprobs or 0,
            "metadata": self.metadata or {},
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
            "truncation": self.truncation or "disabled",
            "background": bool(self.background),
            "conversation": None,
            "max_tool_calls": None,
            "prompt": None,
        }
        found = _to_json(echo)[1:-1]
        if len(found) > MAX_ECHO_BYTES:
            raise InvalidRequest(
                f"instructions, tools and the other fields that the answer repeats have {len(found)} bytes; at most "
                f"{MAX_ECHO_BYTES} are allowed: send less",
                param="instructions" if len(self.instructions or "") > MAX_ECHO_BYTES // 2 else "tools",
            )
        return found


def _to_json(value: object) -> str:
    """Raises InvalidRequest."""
    try:
        return _encode(value)
    except ValueError as e:
        raise InvalidRequest("the body has NaN or Infinity, which JSON does not have: leave them out") from e


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata has {len(metadata)} keys; at most {MAX_METADATA}", param="metadata")
    if not all(len(key) <= MAX_KEY_CHARS and len(value) <= MAX_VALUE_CHARS for key, value in metadata.items()):
        raise InvalidRequest(
            f"a key of metadata has at most {MAX_KEY_CHARS} characters, a value {MAX_VALUE_CHARS}", param="metadata"
        )


# With the values without effect.
_NOT_SERVED: Mapping[str, Values] = {
    **NOT_SERVED,
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "personality": (),  # of input_tokens
    "prompt": (),
    "previous_input_messages": ([],),  # vLLM's, and the next
    "enable_response_messages": (False,),
    "include_stop_str_in_output": (False,),
}
_KNOWN = Known(
    tuple(ResponsesBody.model_fields),
    _NOT_SERVED,
    NO_EFFECT | {"max_tool_calls", "truncation_side"},  # only tools of the server are counted, and it has none
)
_TOOL = Known(
    tuple(ResponseTool.model_fields),
    {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,), "output_schema": ()},
)
_TEXT = Known(tuple(TextConfig.model_fields), {"verbosity": ("medium",)})
_FORMAT = Known(("type", "name", "description", "schema", "strict"), {})
# Summaries are asked for where there may be some: `auto` has none.
_REASONING = Known(
    tuple(Reasoning.model_fields),
    {"summary": ("auto", "none"), "generate_summary": ("auto",), "context": ("auto",), "mode": ()},
)
_STREAM_OPTIONS = Known((), {"include_obfuscation": (False,)})
