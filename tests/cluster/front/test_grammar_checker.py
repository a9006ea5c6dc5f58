"""Grammars are checked at the door in a process that a hostile one cannot keep: errors, limits, and what is kept."""

import json
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from diptych.cluster.front.grammar_checker import MAX_CACHED_BYTES, GrammarChecker
from diptych.workers.common.errors import InvalidGrammar
from diptych.workers.common.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, field="guided_regex")


@pytest_asyncio.fixture
async def checker() -> AsyncGenerator[GrammarChecker]:
    found = GrammarChecker()
    try:
        yield found
    finally:
        await found.close()


async def test_good_grammars_pass_and_bad_ones_are_refused_in_the_compilers_words(checker: GrammarChecker) -> None:
    await checker.check(regex("a+"))
    for _ in range(2):  # the second time, it is known
        with pytest.raises(InvalidGrammar, match="unclosed group") as caught:
            await checker.check(regex("(a"))
        assert caught.value.param == "guided_regex"
    with pytest.raises(InvalidGrammar, match="more than"):
        await checker.check(regex("a" * (MAX_GRAMMAR_BYTES + 1)))


async def test_a_known_grammar_needs_no_process(checker: GrammarChecker) -> None:
    await checker.check(regex("a+"))
    await checker.close()
    await checker.check(regex("a+"))


async def test_a_process_that_was_ended_is_replaced(checker: GrammarChecker) -> None:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(9_000))  # the compiler's recursion is as deep
    with pytest.raises(InvalidGrammar, match="Send a simpler one"):
        await checker.check(Grammar(GrammarKind.GRAMMAR, f'start: r0\n{rules}\nr9000: "end"'))
    await checker.check(regex("a"))


async def test_what_is_kept_is_bounded(checker: GrammarChecker) -> None:
    num = 40
    for i in range(num):
        schema = {"type": "null", "description": f"{i}" + "a" * (MAX_GRAMMAR_BYTES - 100)}
        await checker.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    kept = sum(4 * len(grammar.text) for grammar in checker._known)
    assert kept <= MAX_CACHED_BYTES and 0 < len(checker._known) < num
