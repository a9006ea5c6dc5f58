"""Translates grammars into the one language that llguidance compiles. Pure; input from clients: see limits.py."""

import json
import re
from collections.abc import Callable, Mapping
from typing import cast

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from ..common.errors import InvalidGrammar
from ..common.request import Grammar, GrammarKind

# A space, or a new line and its indentation: with more, a model that repeats itself fills its answer with blanks.
_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
MAX_CHOICES = 4096
MAX_TAGS = 128


# What a Lark grammar consists of, as far as `<name>` is a token in it only where it stands alone.
_PARTS = re.compile(
    r"""
    //[^\n]*                         # a comment
    | "(?:\\.|[^"\\])*"              # a string
    | /(?:\\.|[^/\\\n])+/             # a regular expression
    | <(?P<name>[^<>\[\]"\s]+)>       # a token by its text
    """,
    re.VERBOSE,
)

TokenOf = Callable[[str], int | None]


def to_llguidance(grammar: Grammar, token_of: TokenOf) -> str:
    """Grammar that LLMatcher takes. token_of: the id of a token that a Lark grammar names by its text, `<tool_call>`;
    None: LLMatcher knows it, or nobody does. Raises InvalidGrammar; what LLMatcher says of the result is not known
    yet."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return _json_schema(json.loads(grammar.text))
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.CHOICE:
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, _choices(grammar.text))))
            case GrammarKind.GRAMMAR:
                return LLMatcher.grammar_from_lark(_by_ids(any_to_lark(grammar.text), token_of))
            case GrammarKind.STRUCTURAL_TAG:
                return _structural_tag(_object(json.loads(grammar.text), "it"))
    except InvalidGrammar:
        raise
    except RecursionError as e:
        raise invalid(grammar, "it is nested too deeply") from e
    except Exception as e:  # the library's converters raise no narrower class
        raise invalid(grammar, str(e)) from e


def _by_ids(lark: str, token_of: TokenOf) -> str:
    def by_id(part: re.Match[str]) -> str:
        token_id = token_of(part[0]) if part["name"] else None
        return part[0] if token_id is None else f"<[{token_id}]>"

    return _PARTS.sub(by_id, lark)


def invalid(grammar: Grammar, why: str) -> InvalidGrammar:
    """Make the error of a grammar that cannot be compiled. `why`: the compiler's words."""
    return InvalidGrammar(f"the {grammar.kind.value} cannot be compiled: {why.strip()[:1000]}", param=grammar.field)


def _json_schema(schema: object) -> str:
    """Grammar of a schema. Its member x-guidance may set other whitespace."""
    schema = {} if schema is True else _object(schema, "a schema")
    options = schema.get("x-guidance", {})
    if "whitespace_flexible" in _object(options, "x-guidance"):
        return LLMatcher.grammar_from_json_schema(dict(schema))
    return LLMatcher.grammar_from_json_schema(dict(schema), defaults={"whitespace_pattern": _WHITESPACE})


def _choices(text: str) -> list[str]:
    choices: object = json.loads(text)
    if not isinstance(choices, list):
        raise ValueError("it must be an array of strings")
    strings = [choice for choice in cast("list[object]", choices) if isinstance(choice, str) and choice]
    if not strings or len(strings) != len(cast("list[object]", choices)) or len(strings) > MAX_CHOICES:
        raise ValueError(f"it must have 1 to {MAX_CHOICES} strings, none of them empty")
    return strings


def _literal(text: str) -> str:
    return json.dumps(text)


def _structural_tag(tag: Mapping[str, object]) -> str:
    """Lark grammar of vLLM's structural tag: text, in which each `begin` is followed by what its schema allows, and
    its `end`."""
    structures, triggers = _array(tag.get("structures"), "structures"), _array(tag.get("triggers"), "triggers")
    if not 0 < len(structures) <= MAX_TAGS:
        raise ValueError(f"structures must have 1 to {MAX_TAGS} entries")
    return StructTag.to_grammar(
        [_tag(_object(each, "a structure"), triggers) for each in structures], assume_special=False
    )


def _tag(structure: Mapping[str, object], triggers: list[object]) -> StructTag:
    begin, end = structure.get("begin"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("begin and end of a structure must be strings")
    trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
    if trigger is None:
        raise ValueError(f"no trigger is the beginning of {begin[:100]!r}")
    schema = structure.get("schema", structure.get("structural_tag", {}))
    return StructTag(trigger=trigger, begin=begin, grammar=dict(_object(schema, "schema")), end=end)


def _object(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return cast("dict[str, object]", value)


def _array(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be an array")
    return cast("list[object]", value)
