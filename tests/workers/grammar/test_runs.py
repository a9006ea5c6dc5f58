"""Runs: the tokens that a grammar forces are what its masks would allow, one after the other."""

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from diptych.workers.common.request import Grammar, GrammarKind, ThoughtBudget
from diptych.workers.grammar import matcher as matcher_file
from diptych.workers.grammar.compiler import GrammarCompiler
from diptych.workers.grammar.matcher import MAX_RUN, Matcher

from ...support.grammars import compiled, regex, text_of

TINY = Path(__file__).parents[3] / "examples" / "tiny"
VOCAB_SIZE = 2048
SCHEMA = {
    "type": "object",
    "properties": {"identification": {"enum": ["first", "second"]}, "occupation": {"type": "boolean"}},
    "required": ["identification", "occupation"],
    "additionalProperties": False,
}


def of(pattern: str, budget: ThoughtBudget | None = None) -> Matcher:
    def failed(error: Exception) -> None:
        raise error

    return compiled(regex(pattern)).matcher(failed, budget)


def run_of(matcher: Matcher, token_id: int) -> str:
    matcher.find_run()
    return text_of(matcher.take_run(token_id))


def code(letter: str) -> int:
    return ord(letter) + 1


def test_each_token_of_a_run_is_all_that_the_mask_before_it_allows() -> None:
    compiler = GrammarCompiler.of_folder(TINY, VOCAB_SIZE, (3, 2))
    grammar = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    rng, bits, num_runs = np.random.default_rng(1), allocate_token_bitmask(1, VOCAB_SIZE), 0

    def allowed(matcher: Matcher) -> list[int]:
        assert matcher.state is not None
        fill_next_token_bitmask(matcher.state, bits, 0)
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=VOCAB_SIZE)).tolist()

    for _ in range(20):
        matcher = grammar.matcher(lambda _: None)
        assert matcher.state is not None
        for _ in range(200):
            matcher.find_run()
            token_id = int(rng.choice(allowed(matcher)))
            run = matcher.take_run(token_id)
            matcher.consume([token_id])
            num_runs += len(run) > 1
            for forced in run:
                assert allowed(matcher) == [forced]
                matcher.consume([forced])
            if matcher.state.is_stopped():
                break
    assert num_runs > 20


def test_a_run_follows_the_token_that_it_begins_with_and_is_taken_once() -> None:
    matcher = of("identification[0-9]")
    assert run_of(matcher, code("i")) == "dentification"
    assert matcher.take_run(code("i")) == []
    assert run_of(matcher, code("x")) == ""
    matcher.find_run()
    matcher.consume([code("i"), code("d")])
    assert matcher.take_run(code("e")) == [], "what was found before a token is over with it"
    assert run_of(matcher, code("e")) == "ntification"


@pytest.mark.parametrize("pattern", ["[ab]identification", "i", "i[0-9]", "(identification)?"])
def test_what_has_a_choice_has_no_run(pattern: str) -> None:
    assert run_of(of(pattern), code("i")) == ""


def test_a_run_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = of(":" * 200)
    monkeypatch.setattr(matcher_file, "MAX_RUN_S", float("inf"))  # however busy the machine is
    assert run_of(matcher, code(":")) == ":" * (MAX_RUN - 1)
    monkeypatch.setattr(matcher_file, "MAX_RUN_S", -1.0)
    assert run_of(of(":" * 200), code(":")) == ""


def test_there_is_no_run_before_a_thought_is_over() -> None:
    matcher = of("aa!identification[0-9]", ThoughtBudget(9, begin_id=1, end_id=code("!"), is_open=True))
    assert run_of(matcher, code("a")) == ""
    matcher.consume([code("a"), code("a"), code("!")])
    assert run_of(matcher, code("i")) == "dentification"
