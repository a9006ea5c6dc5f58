"""Grammars of a call's arguments, in each way in which models write them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ...workers.common.errors import InvalidGrammar
from ...workers.common.request import GrammarKind
from . import xml
from .lark import Lark, json_of, literal, nested, regex
from .schemas import properties, resolved, types
from .shapes import ArgumentsKind
from .tools import INPUT, ToolSpec

_DEFINITIONS = ("$defs", "definitions")
_ANCHORED = re.compile(r"\^(?:[^\\]|\\.)*\$", re.DOTALL)  # from ^ to $, which is not escaped


class ArgumentRules:
    """Writes the rules of arguments into a grammar."""

    def __init__(self, lark: Lark, kind: ArgumentsKind) -> None:
        self._lark = lark
        self._kind = kind

    def rule(self, name: str, tool: ToolSpec) -> str:
        """Name of the rule of a tool's arguments; "" where there are none. Raises InvalidGrammar."""
        is_tagged = self._kind in (ArgumentsKind.QWEN, ArgumentsKind.GLM)
        if tool.grammar is not None and tool.grammar.kind is GrammarKind.GRAMMAR and not is_tagged:
            raise InvalidGrammar(
                f"the grammar of the custom tool {tool.name} cannot be enforced: this model writes the input as a part "
                "of JSON. Send a regular expression (syntax: regex)",
                param="tools",
            )
        if self._kind is ArgumentsKind.JSON:
            return self._lark.add(name, json_of(_object(tool.parameters), lenient=tool.lenient or not tool.strict))
        keys, required = _keys(tool.parameters)
        parts = [self._part(f"{name}_{i}", key, tool) for i, key in enumerate(keys)]
        if not parts:
            return ""
        if self._kind is ArgumentsKind.PYTHON:
            return self._lark.add(name, self._keywords(name, parts, len(required)))
        texts = [part if key in required else f"{part}?" for part, key in zip(parts, keys, strict=True)]
        return self._lark.add(name, " ".join(texts))

    def _keywords(self, name: str, parts: Sequence[str], num_required: int) -> str:
        """Keywords between commas. Those beyond the required ones may be left out."""
        required, others = parts[:num_required], parts[num_required:]
        if required:
            return ' ", " '.join(required) + "".join(f' (", " {each})?' for each in others)
        starts: list[str] = []
        after = ""  # rule of what may follow
        for i, each in reversed(list(enumerate(others))):
            starts.append(f"{each} {after}")
            after = self._lark.add(f"{name}_after_{i}", f'(", " {each})? {after}')
        return f"({' | '.join(starts)})?"

    def _part(self, name: str, key: str, tool: ToolSpec) -> str:
        """Name of the rule of one argument."""
        root, lark = tool.parameters, self._lark
        own = properties(root).get(key)
        if self._kind is ArgumentsKind.PYTHON:
            value = lark.add(f"{name}_value", _json_part(own, tool))
            return lark.add(name, f"{literal(key + '=')} {value}")
        if self._kind is ArgumentsKind.QWEN:
            before, blank, end, without = f"{xml.PARAMETER}{key}>\n", "\n", xml.END_PARAMETER, xml.AFTER_VALUE
        else:
            before, blank, end, without = f"{xml.KEY}{key}{xml.END_KEY}\n{xml.VALUE}", "", xml.END_VALUE, ()
        value = self._tagged_value(f"{name}_value", own, tool, key)
        rest = lark.text_until(end, without) if value is None else f"{value} {lark.sequence(blank + end)}"
        return lark.add(name, f'{lark.sequence(before)} {rest} "\\n"')

    def _tagged_value(self, name: str, own: object, tool: ToolSpec, key: str) -> str | None:
        """Value of an argument; None: any text. `name`: of a rule that it may add."""
        root = tool.parameters
        if tool.grammar is not None and key == INPUT and tool.grammar.kind is GrammarKind.GRAMMAR:
            return self._lark.add(name, nested(tool.grammar.text))
        schema = resolved(own, root)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list) and choices:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in cast("list[Any]", choices)]
            return f"({' | '.join(map(literal, texts))})"
        if "string" not in types(own, root):
            return self._lark.add(name, _json_part(own, tool))
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and _ANCHORED.fullmatch(pattern):
            return regex(pattern[1:-1])
        return None


def _keys(schema: Mapping[str, Any]) -> tuple[list[str], frozenset[str]]:
    """Names of the arguments, required ones first, and the required ones."""
    given = schema.get("required")
    required = [key for key in cast("list[object]", given) if isinstance(key, str)] if isinstance(given, list) else []
    return list(dict.fromkeys([*required, *properties(schema)])), frozenset(required)


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema}


def _json_part(own: object, tool: ToolSpec) -> str:
    """JSON by a part of a tool's schema."""
    part = cast("dict[str, Any]", own) if isinstance(own, dict) else {}
    shared = {name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters}
    return json_of({**part, **shared}, lenient=tool.lenient or not tool.strict)
