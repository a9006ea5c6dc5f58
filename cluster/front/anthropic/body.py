"""Parses the request bodies of Anthropic's API: JSON -> ParsedRequest, as for chats.

Fields that are not read here follow the rule of openai/fields.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ....workers.common.errors import InvalidRequest, ThreadsNotServed
from ....workers.common.request import Grammar, SamplingParams
from ...tokens.chat_template import PromptEnd
from ...tokens.prompt_encoding import ChatPrompt
from ..answer_plan import AskedBudget
from ..front_door import GenerationSpec
from ..levels import AskedLevel
from ..openai.fields import FieldCheck, Known, shorten
from ..openai.format import Include
from ..openai.messages import Many, continued_text
from ..openai.sampling import check_salt
from ..openai.structured import JsonSchemaFormat, ResponseFormat
from ..openai.tools import FunctionDefinition, GivenTools, Tool, ToolChoice, read_tools
from ..openai.types import ParsedRequest
from .blocks import Block, GivenMessage, plain_messages, system_messages

_MODEL = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # OpenAI's names of Anthropic's
_STANDARD = "standard_only"  # service_tier without a level


class GivenTool(BaseModel):
    model_config = _MODEL

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, where: str, fields: FieldCheck) -> Tool:
        """Raises InvalidRequest."""
        if self.type not in (None, "custom") or self.input_schema is None:
            kind = "no input_schema" if self.type in (None, "custom") else f"the type {shorten(self.type)}"
            raise InvalidRequest(
                f"{where} has {kind}: only tools that the client runs are served, with an input_schema", param=where
            )
        fields.check(self.model_extra or {}, _TOOL, f"{where}.")
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(function=function)


class GivenChoice(BaseModel):
    model_config = _MODEL

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> str | ToolChoice:
        """OpenAI's tool_choice of the same meaning. Raises InvalidRequest."""
        if self.type != "tool":
            return _CHOICES[self.type]
        if self.name is None:
            raise InvalidRequest("tool_choice.name is missing: name a tool", param="tool_choice.name")
        return ToolChoice(name=self.name)


class Thinking(BaseModel):
    model_config = _MODEL

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(BaseModel):
    model_config = _MODEL

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(BaseModel):
    """Body of POST /v1/messages/count_tokens."""

    model_config = _MODEL

    model: str | None = None
    messages: Many[GivenMessage]
    system: str | Many[Block] | None = None
    tools: Many[GivenTool] | None = None
    tool_choice: GivenChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @classmethod
    def known(cls) -> Known:
        return _KNOWN[cls]

    def call(self) -> ParsedRequest:
        """Call whose prompt is counted. Raises InvalidRequest."""
        fields = FieldCheck()
        spec = GenerationSpec(prompts=(self._prompt(fields, self._tools(fields)),), sampling=SamplingParams())
        return self._parsed(replace(spec, model=self.model), fields, stream=False)

    def _parsed(self, spec: GenerationSpec, fields: FieldCheck, *, stream: bool) -> ParsedRequest:
        given = self.model_extra or {}
        if given.get("thread") is not None:
            raise ThreadsNotServed(
                "thread is not supported: no conversation is held here. Leave it out, and send the whole conversation",
                param="thread",
            )
        fields.check(given, self.known())
        return ParsedRequest(spec, self._include(), stream, echo=False, unknown=fields.unknown)

    def _include(self) -> Include:
        """Optional parts of the answer: thoughts, which Anthropic promises only to those who ask for them."""
        thinking = self.thinking
        wanted = thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        return Include(reasoning=wanted)

    def _tools(self, fields: FieldCheck) -> GivenTools:
        tools = [tool.tool(f"tools[{i}]", fields) for i, tool in enumerate(self.tools or ())]
        choice = self.tool_choice
        if choice is None:
            return read_tools(tools, None, None, fields)
        fields.check(choice.model_extra or {}, _CHOICE, "tool_choice.")
        return read_tools(tools, choice.choice(), not choice.disable_parallel_tool_use, fields)

    def _prompt(self, fields: FieldCheck, tools: GivenTools) -> ChatPrompt:
        system = system_messages(self.system, "system", fields) if self.system else []
        messages = system + plain_messages(self.messages, fields)
        goes_on = bool(self.messages) and self.messages[-1].role == "assistant"  # the answer, with that message
        end = PromptEnd.OPEN_MESSAGE if goes_on else PromptEnd.HEADER
        return ChatPrompt(messages, self._template_options(fields), tools.shown, end)

    def _template_options(self, fields: FieldCheck) -> Mapping[str, Any]:
        options: dict[str, Any] = {}
        if self.thinking is not None:
            fields.check(self.thinking.model_extra or {}, _THINKING, "thinking.")
            options["enable_thinking"] = self.thinking.type != "disabled"
        options |= self.chat_template_kwargs or {}
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        return options


class MessagesBody(CountBody):
    """Body of POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None  # vLLM's: requests with the same salt share cached prefixes

    def call(self) -> ParsedRequest:
        """Parsed request. Raises InvalidRequest."""
        fields = FieldCheck()
        check_salt(self.cache_salt)
        tools = self._tools(fields)
        prompt = self._prompt(fields, tools)
        spec = GenerationSpec(
            prompts=(prompt,),
            continues=continued_text(prompt.messages, prompt.end),
            tools=tools.use,
            sampling=self._sampling(fields),
            stop=tuple(self.stop_sequences or ()),
            max_tokens=None if self.max_tokens > 0 else self.max_tokens,  # else it is refused
            default_max_tokens=self.max_tokens,  # or fewer, where the context has no room for so many
            model=self.model,
            cache_salt=self.cache_salt or "",
            thought=self._thought(),
            level=AskedLevel(None if self.service_tier == _STANDARD else self.service_tier),
        )
        return self._parsed(spec, fields, stream=bool(self.stream))

    def _thought(self) -> AskedBudget | None:
        """Budget of the thought, which Anthropic's clients send whatever the model is."""
        given = self.thinking
        if given is None or given.type != "enabled" or given.budget_tokens is None:
            return None
        return AskedBudget(given.budget_tokens, "thinking.budget_tokens", is_hint=True)

    def _sampling(self, fields: FieldCheck) -> SamplingParams:
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(**given, grammar=self._grammar(fields))

    def _grammar(self, fields: FieldCheck) -> Grammar | None:
        config = self.output_config
        if config is None:
            return None
        fields.check(config.model_extra or {}, _OUTPUT, "output_config.")
        if config.format is None:
            return None
        where = "output_config.format"
        schema = config.format.get("schema")
        if config.format.get("type") != "json_schema" or not isinstance(schema, dict):
            raise InvalidRequest(f'{where} must be {{"type": "json_schema", "schema": {{...}}}}', param=where)
        asked = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=schema))
        grammar = asked.grammar()
        return None if grammar is None else replace(grammar, field=where)


_SAMPLING = ("temperature", "top_p", "top_k")
_NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": ({},),
    "ec_transfer_params": ({},),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "kv_transfer_params": ({},),
    "mcp_servers": ([],),
    "mm_payload": (),
    "output_format": (),
    "return_mm_kwargs": (True,),
    "speed": ("standard",),
    "thread": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
_NO_EFFECT = frozenset({"betas", "cache_control", "diagnostics", "metadata", "user_profile_id", "workspace_id"})
_KNOWN: Mapping[type[CountBody], Known] = {
    kind: Known(tuple(kind.model_fields), _NOT_SERVED, _NO_EFFECT) for kind in (CountBody, MessagesBody)
}
_TOOL = Known(
    tuple(GivenTool.model_fields),
    {"defer_loading": (False,)},
    frozenset({"allowed_callers", "cache_control", "eager_input_streaming", "input_examples"}),
)
_CHOICE = Known(tuple(GivenChoice.model_fields), {})
_THINKING = Known(tuple(Thinking.model_fields), {})
_OUTPUT = Known(tuple(OutputConfig.model_fields), {"task_budget": ()})
