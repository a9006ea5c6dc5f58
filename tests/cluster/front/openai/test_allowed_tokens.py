"""Answers of some tokens alone (vLLM's `allowed_token_ids`), by the engine with the FakeRunner, whose token 0 ends."""

from typing import Any

import pytest

from diptych.cluster.dialects.dialect import FORMATS, Dialect
from diptych.cluster.dialects.grammar import answer_grammar
from diptych.cluster.dialects.thoughts import THINK, ThoughtState
from diptych.cluster.dialects.tools import ToolUse
from diptych.cluster.front.openai.structured import MAX_ALLOWED, allowed_tokens
from diptych.workers.common.errors import InvalidGrammar, InvalidRequest
from diptych.workers.common.request import Grammar, Request, SamplingParams
from diptych.workers.grammar.check import GrammarCheck

from ....support.engines import make, run, tokens
from ....support.grammars import compiled, text_of

NUM = 40


def answer(grammar: Grammar, **sampling: Any) -> list[int]:
    GrammarCheck().check(grammar)
    engine = make()
    given = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM, grammar=grammar, **sampling)
    request = Request("request", (3, 1, 4), given, timeout_s=60.0)
    engine.submit("0/1", request, [], grammar=compiled(grammar))
    return [event.token_id for event in tokens(run(engine), "0/1")]


def test_an_answer_has_these_tokens_alone_and_does_not_end_with_another() -> None:
    found = answer(allowed_tokens([300, 5, 9, 9]))
    assert len(found) == NUM and set(found) == {5, 9, 300}


def test_it_ends_with_a_token_that_is_allowed_to() -> None:
    found = answer(allowed_tokens([0, 5]))
    assert found[-1] == 0 and set(found[:-1]) <= {5} and len(found) < NUM


def test_a_thought_comes_before_it() -> None:
    family = Dialect(FORMATS["hermes"], THINK)
    grammar = answer_grammar(family, ThoughtState.OPEN, ToolUse(), allowed_tokens([98, 99]), lambda _: None)
    assert grammar is not None
    GrammarCheck().check(grammar)
    state = compiled(grammar).matcher(lambda _: None).state
    assert state is not None
    assert state.consume_tokens([byte + 1 for byte in b"free words</think>"]) and state.consume_tokens([98, 99, 98])
    assert not state.validate_tokens([97]) and text_of([98, 99]) == "ab"


@pytest.mark.parametrize("token_ids", [[], [5, 5], [-1, 5], range(MAX_ALLOWED + 1)])
def test_few_tokens_and_too_many_are_refused(token_ids: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        allowed_tokens(token_ids)
    assert caught.value.param == "allowed_token_ids"


def test_a_token_that_the_model_has_not_is_named() -> None:
    with pytest.raises(InvalidGrammar, match="999999") as caught:
        compiled(allowed_tokens([5, 999999]))
    assert caught.value.param == "allowed_token_ids"
