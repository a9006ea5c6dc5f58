"""Tools of a chat's body: OpenAI's `tools` and `tool_choice`, and the older `functions` and `function_call`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import Grammar, GrammarKind
from ...dialects.tools import INPUT, ToolSpec, ToolUse, custom_tool
from .fields import FieldCheck, Known, shorten
from .messages import Many

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")
_MODEL = ConfigDict(extra="allow", strict=True, frozen=True)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_SYNTAX = {"lark": GrammarKind.GRAMMAR, "regex": GrammarKind.REGEX}


class FunctionDefinition(BaseModel):
    model_config = _MODEL

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def spec(self) -> ToolSpec:
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return ToolSpec(self.name, parameters, strict=bool(self.strict))


class CustomGrammar(BaseModel):
    model_config = _MODEL

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(BaseModel):
    model_config = _MODEL

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomDefinition(BaseModel):
    model_config = _MODEL

    name: str
    description: str | None = None
    format: CustomFormat | None = None

    def spec(self, where: str) -> ToolSpec:
        if self.format is None or self.format.type == "text":
            return custom_tool(self.name, None)
        given = self.format.grammar
        if given is None:
            raise InvalidRequest(f"{where}.custom.format.grammar is missing: send the grammar there", param="tools")
        return custom_tool(self.name, Grammar(_SYNTAX[given.syntax], given.definition, "tools"))


class Tool(BaseModel):
    model_config = _MODEL

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    def spec(self, where: str, fields: FieldCheck) -> ToolSpec:
        """Tool that answers may call. Raises InvalidRequest."""
        fields.check(self.model_extra or {}, _TOOL, f"{where}.")
        if self.type == "custom" and self.custom is not None:
            fields.check(self.custom.model_extra or {}, _CUSTOM, f"{where}.custom.")
            return self.custom.spec(where)
        if self.type == "function" and self.function is not None:
            fields.check(self.function.model_extra or {}, _FUNCTION, f"{where}.function.")
            return self.function.spec()
        raise InvalidRequest(f"{where}.{self.type}: field required", param=f"{where}.{self.type}")


class _Named(BaseModel):
    """Name of a function or a custom tool."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    name: str


class NamedTool(BaseModel):
    """Tool by its name. OpenAI's APIs nest it differently."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    type: str = "function"
    name: str | None = None
    function: _Named | None = None
    custom: _Named | None = None

    @property
    def tool_name(self) -> str | None:
        nested = self.function or self.custom
        return self.name if nested is None else nested.name


class AllowedTools(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    mode: Literal["auto", "required"] = "auto"
    tools: Many[NamedTool] = Field(default_factory=list[NamedTool])


class ToolChoice(NamedTool):
    """`tool_choice` that is an object."""

    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Many[NamedTool] | None = None


@dataclass(frozen=True, slots=True)
class GivenTools:
    """Tools of one body: as answers use them, and as the chat template shows them."""

    use: ToolUse
    shown: Sequence[Mapping[str, object]]


def read_tools(
    tools: Sequence[Tool], choice: str | ToolChoice | None, parallel: bool | None, fields: FieldCheck
) -> GivenTools:
    """Raises InvalidRequest."""
    specs = [tool.spec(f"tools[{i}]", fields) for i, tool in enumerate(tools)]
    _check_names(specs, "tools")
    use = _chosen(ToolUse(tuple(specs), "auto" if specs else "none", parallel=parallel is not False), choice)
    return GivenTools(use, [_shown(tool, spec) for tool, spec in zip(tools, specs, strict=True)])


def read_functions(
    functions: Sequence[FunctionDefinition], choice: str | NamedTool | None, fields: FieldCheck
) -> GivenTools:
    """Tools of a body with the older fields. Raises InvalidRequest."""
    for i, function in enumerate(functions):
        fields.check(function.model_extra or {}, _FUNCTION, f"functions[{i}].")
    specs = [function.spec() for function in functions]
    _check_names(specs, "functions")
    use = ToolUse(tuple(specs), "auto" if specs else "none", legacy=True)
    if isinstance(choice, NamedTool) and choice.tool_name is None:
        raise InvalidRequest("function_call.name is missing: name a function", param="function_call")
    if isinstance(choice, str) and choice not in ("none", "auto"):
        raise InvalidRequest('function_call must be "none", "auto" or {"name": ...}', param="function_call")
    return GivenTools(
        _chosen(use, choice, "function_call"),
        [
            _as_function(spec.name, function.description, function.parameters)
            for spec, function in zip(specs, functions, strict=True)
        ],
    )


def _chosen(use: ToolUse, choice: str | NamedTool | None, field: str = "tool_choice") -> ToolUse:
    match choice:
        case None:
            return use
        case "none" | "auto" | "required":
            mode, names = choice, None
        case str():
            raise InvalidRequest(
                f'{field} {shorten(choice)} is unknown: send "none", "auto", "required" or a tool', param=field
            )
        case ToolChoice(type="allowed_tools"):
            allowed = choice.allowed_tools or AllowedTools(mode=choice.mode or "auto", tools=choice.tools or [])
            mode, names = allowed.mode, [tool.tool_name for tool in allowed.tools]
            if not names:
                raise InvalidRequest(f"{field}.allowed_tools.tools is empty: name at least one tool", param=field)
        case _:
            mode, names = "required", [choice.tool_name]
            use = replace(use, parallel=False)
    if mode != "none" and not use.tools and choice != "auto":
        raise InvalidRequest(f"{field} needs tools: send tools, or leave it out", param=field)
    known = {tool.name for tool in use.tools}
    for name in names or ():
        if name not in known:
            which = "no tool" if name is None else f"{shorten(name)}, which is not among the tools"
            raise InvalidRequest(f"{field} names {which}: name one of them", param=field)
    if not use.tools:
        return use
    return replace(use, choice=mode, names=None if names is None else tuple(name for name in names if name is not None))


def _check_names(specs: Sequence[ToolSpec], field: str) -> None:
    if len(specs) > MAX_TOOLS:
        raise InvalidRequest(f"{len(specs)} tools; a call has at most {MAX_TOOLS}", param=field)
    known: set[str] = set()
    for i, spec in enumerate(specs):
        if not _NAME.fullmatch(spec.name):
            raise InvalidRequest(
                f"{field}[{i}]: a name has 1 to {MAX_NAME_CHARS} letters, digits and characters of _ . : / -",
                param=field,
            )
        if spec.name in known:
            raise InvalidRequest(
                f"{field}[{i}]: {spec.name} is the name of another tool: names must differ", param=field
            )
        known.add(spec.name)


def _shown(tool: Tool, spec: ToolSpec) -> Mapping[str, object]:
    """Tool as chat templates read it. Templates know functions only."""
    if tool.custom is not None and spec.custom:
        text: dict[str, object] = {"type": "string"}
        if spec.grammar is not None:
            text["description"] = f"follows this {spec.grammar.kind.value}: {spec.grammar.text}"
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        return _as_function(spec.name, tool.custom.description, schema)
    assert tool.function is not None
    return _as_function(spec.name, tool.function.description, tool.function.parameters, tool.function.strict)


def _as_function(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None = None
) -> Mapping[str, object]:
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _known(model: type[BaseModel]) -> Known:
    return Known(tuple(model.model_fields), {"defer_loading": (False,)})


_TOOL, _FUNCTION, _CUSTOM = _known(Tool), _known(FunctionDefinition), _known(CustomDefinition)
