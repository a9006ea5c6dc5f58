"""Denial of service by grammars: each is answered for within the limits, by an error or not, and the router goes on."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from diptych.cluster.front.grammar_checker import GrammarChecker
from diptych.workers.common.errors import InvalidGrammar
from diptych.workers.common.request import Grammar, GrammarKind


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


@pytest_asyncio.fixture
async def checker() -> AsyncGenerator[GrammarChecker]:
    found = GrammarChecker()
    try:
        yield found
    finally:
        await found.close()


def chain(num: int) -> Grammar:
    """Rules that follow each other, so that the compiler's recursion is as deep."""
    rules = "\n".join(f'r{i}: "a{i}" r{i + 1} | "b" r{i + 1}' for i in range(num))
    return Grammar(GrammarKind.GRAMMAR, f'start: r0\n{rules}\nr{num}: "end"')


def doubled(num: int) -> Grammar:
    """Schema of a page that means 2 ** num."""
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(num)}
    schema = {"$defs": {**definitions, f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def flat(num: int) -> Grammar:
    rules = "\n".join(f'r{i}: "a{i}"' for i in range(num))
    return Grammar(GrammarKind.GRAMMAR, f"start: {' | '.join(f'r{i}' for i in range(num))}\n{rules}")


INTERSECTION = "/(.*a.{20})/ & /(.*b.{19})/ & ~/(.*c.{18}d)/"
HOSTILE = {
    "10,000 rules": flat(10_000),
    "a chain of 7,000 rules": chain(7_000),
    "a schema that doubles 60 times": doubled(60),
    "a regex of 10^12 states": regex("((a{1,100}b{1,100}){1,100}c{1,100}){1,1000}"),
    "64 nested alternatives": Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"oneOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(6)]} for i in range(64)]}),
    ),
    "an intersection with a complement": Grammar(GrammarKind.GRAMMAR, f"start: A\nA: {INTERSECTION}"),
    "the same, not at the beginning": Grammar(GrammarKind.GRAMMAR, f'start: "x" A | "y"\nA: {INTERSECTION}'),
    "20,000 nested groups": regex("(" * 20_000 + "a" + ")" * 20_000),
    "GBNF of 20,000 nested groups": Grammar(GrammarKind.GRAMMAR, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_grammar_is_answered_for_in_time_and_the_loop_and_the_next_are_not_kept(
    checker: GrammarChecker, grammar: Grammar
) -> None:
    """The bound on the time is that of the limits, not of this machine's load: processor time, or what is five times
    as long by the clock."""
    await checker.check(regex("warm"))
    began, turns = time.monotonic(), 0
    asking = asyncio.create_task(checker.check(grammar))
    while not asking.done():
        await asyncio.sleep(0)
        turns += 1
    error = asking.exception()
    assert error is None or isinstance(error, InvalidGrammar), error
    assert time.monotonic() - began < 60 and turns > 1
    await checker.check(regex("next"))
