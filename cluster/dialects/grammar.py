"""Grammars of answers that call tools, or that think before they answer: Lark, as llguidance reads it.

    start: thought (calls | answer)

A mark that is a special token is written by its id, any other as text: also one that is a token of its own.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ...workers.common.errors import InvalidGrammar, InvalidRequest
from ...workers.common.request import Grammar, GrammarKind
from . import harmony
from .arguments import ArgumentRules
from .dialect import Dialect, ToolFormat
from .lark import TEXT, Lark, is_lark, json_of, literal, nested, regex
from .shapes import FIRST_OF_TEXT, NAME, NUMBER, SHAPES, Shape
from .thoughts import ThoughtState
from .tools import ToolSpec, ToolUse

_SMALL_NUMBER = "/[0-9]{1,3}/"


def answer_grammar(
    dialect: Dialect, state: ThoughtState, use: ToolUse, answer: Grammar | None, id_of: Callable[[str], int | None]
) -> Grammar | None:
    """Grammar of an answer; None: it is not constrained. `answer`: of its text, as the client gave it; `id_of`: of a
    token that a grammar names by its id, None for other texts. Raises InvalidRequest, InvalidGrammar."""
    calls = use.is_parsed and use.is_constrained
    may_think = dialect.has_channels or (dialect.thoughts is not None and state is not ThoughtState.DONE)
    if not calls and (answer is None or not (may_think or use.is_parsed)):
        return answer
    lark = Lark(dialect.marks, id_of)
    thought = _thought(lark, dialect, state, _starts(dialect) if calls else ())
    text = "" if use.is_parsed and use.choice == "required" else _answer(lark, dialect, answer, use)
    called = _calls(lark, dialect.tools, use, has_text=bool(text), is_text_free=answer is None) if use.is_parsed else ""
    lark.add("start", f"{thought} ({' | '.join(filter(None, (called, text)))})")
    field = answer.field if answer is not None else "tools"
    return Grammar(GrammarKind.GRAMMAR, lark.text(), field)


def _starts(dialect: Dialect) -> Sequence[str]:
    return () if dialect.tools is None else dialect.tools.starts


def _thought(lark: Lark, dialect: Dialect, state: ThoughtState, without: Sequence[str]) -> str:
    """Rule of the thought. `without`: texts that are not in it."""
    if dialect.has_channels:
        begin = lark.sequence(f"{harmony.CHANNEL}{harmony.ANALYSIS}{harmony.MESSAGE}")
        after = lark.sequence(f"{harmony.START}assistant")
        lark.add("thought", f"{begin} {lark.text_until(harmony.END, without)} {after}")
        return "thought*"
    if dialect.thoughts is None or state is ThoughtState.DONE:
        return ""
    rest = f"{lark.text_until(dialect.thoughts.end, without)} /[ \\n]{{0,2}}/"
    if state is ThoughtState.OPEN:
        lark.add("thought", rest)
        return "thought"
    lark.add("thought", f"{lark.sequence(dialect.thoughts.begin)} {rest}")
    return "thought?"


def _answer(lark: Lark, dialect: Dialect, answer: Grammar | None, use: ToolUse) -> str:
    """Rule of an answer without calls."""
    if answer is not None:
        lark.add("answer", _body(answer))
    elif use.is_parsed and dialect.tools is not None:
        first = FIRST_OF_TEXT.get(dialect.tools.name, "")
        text = lark.text_without(_starts(dialect), first)
        lark.add("answer", f"({text})?" if first else text)
    else:
        lark.add("answer", TEXT)
    if dialect.has_channels:
        begin = lark.sequence(f"{harmony.CHANNEL}{harmony.FINAL}{harmony.MESSAGE}")
        lark.add("final", f"{begin} answer")
        return "final"
    return "answer"


def _calls(lark: Lark, form: ToolFormat | None, use: ToolUse, *, has_text: bool, is_text_free: bool) -> str:
    """Rule of calls, after text if the answer may have any."""
    assert form is not None
    shape, names = SHAPES[form.name], [f"call_{i}" for i in range(len(use.callable))]
    if form.has_channels and has_text:
        begin = lark.sequence(f"{harmony.CHANNEL}{harmony.COMMENTARY}{harmony.MESSAGE}")
        after = lark.sequence(f"{harmony.START}assistant")
        lark.add("preamble", f"{begin} {lark.text_until(harmony.END, form.starts)} {after}")
    arguments = ArgumentRules(lark, shape.arguments)
    for name, tool in zip(names, use.callable, strict=True):
        lark.add(name, _call(lark, shape, tool, arguments.rule(f"{name}_arguments", tool)))
    lark.add("call", " | ".join(names))
    more = ""
    if use.parallel and not use.legacy and shape.between is not None:
        more = f"({lark.sequence(shape.between)} call)*"
    begin = lark.sequence(shape.opening)
    if has_text and is_text_free and shape.trigger:
        begin = (
            f"{lark.text_until(shape.trigger, form.starts)} {lark.sequence(shape.opening.removeprefix(shape.trigger))}"
        )
    elif has_text and form.has_channels:
        begin = f"preamble? {begin}"
    lark.add("calls", f"{begin} call {more} {lark.sequence(shape.closing)}")
    return "calls"


def _call(lark: Lark, shape: Shape, tool: ToolSpec, arguments: str) -> str:
    before = shape.before.replace(NAME, tool.name)
    head, number, tail = before.partition(NUMBER)
    begin = f"{lark.sequence(head)} {_SMALL_NUMBER} {lark.sequence(tail)}" if number else lark.sequence(before)
    return f"{begin} {arguments} {lark.sequence(shape.after)}"


def _body(grammar: Grammar) -> str:
    """Body of a rule that is the client's grammar. Raises InvalidRequest, InvalidGrammar."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema: Any = json.loads(grammar.text)
                schema = {} if schema is True else schema
                if not isinstance(schema, dict):
                    raise ValueError("a schema must be an object")
                return json_of(schema)
            case GrammarKind.CHOICE:
                return " | ".join(literal(choice) for choice in _strings(grammar.text))
            case GrammarKind.REGEX:
                return regex(grammar.text)
            case GrammarKind.GRAMMAR if is_lark(grammar.text):
                return nested(grammar.text)
            case GrammarKind.GRAMMAR | GrammarKind.STRUCTURAL_TAG:
                raise InvalidRequest(
                    f"a {grammar.kind.value} cannot be followed after a thought or beside calls of tools unless it is "
                    "written as Lark: send a Lark grammar with the rule `start`, or turn thinking and tools off",
                    param=grammar.field,
                )
    except (ValueError, RecursionError) as e:
        raise InvalidGrammar(f"the {grammar.kind.value} cannot be compiled: {str(e)[:200]}", param=grammar.field) from e


def _strings(text: str) -> Sequence[str]:
    found: Any = json.loads(text)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise ValueError("it must be an array of strings, none of them empty")
    return found
