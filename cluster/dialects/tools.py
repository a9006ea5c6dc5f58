"""Tools that a call offers, and what it says of their use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...workers.common.request import Grammar, GrammarKind

INPUT = "input"  # argument of a custom tool


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    parameters: Mapping[str, Any]  # schema of the arguments
    strict: bool = False
    lenient: bool = False  # though it is strict, keywords that cannot be enforced are ignored
    custom: bool = False  # its argument is a text
    grammar: Grammar | None = None  # of a custom tool's text


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: tuple[ToolSpec, ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    names: tuple[str, ...] | None = None  # of the tools that may be called; None: all
    parallel: bool = True
    legacy: bool = False  # OpenAI's `functions`: an answer has one function_call

    @property
    def is_parsed(self) -> bool:
        """Return whether calls are looked for in the answer."""
        return bool(self.tools) and self.choice != "none"

    @property
    def callable(self) -> tuple[ToolSpec, ...]:
        return tuple(tool for tool in self.tools if self.names is None or tool.name in self.names)

    @property
    def is_constrained(self) -> bool:
        """Return whether calls follow a grammar."""
        return (
            self.choice == "required"
            or self.names is not None
            or not self.parallel
            or any(tool.strict or tool.grammar is not None for tool in self.callable)
        )


NO_TOOLS = ToolUse()


def custom_tool(name: str, grammar: Grammar | None) -> ToolSpec:
    """Tool whose only argument is a text. A regular expression is a part of the schema."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None and grammar.kind is GrammarKind.REGEX:
        text["pattern"] = f"^(?:{grammar.text})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return ToolSpec(name, schema, strict=grammar is not None, custom=True, grammar=grammar)
