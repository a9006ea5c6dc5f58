"""Answers in which some texts do not occur (vLLM's `bad_words`), by the engine with the FakeRunner."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.dialects.dialect import FORMATS, Dialect
from diptych.cluster.dialects.grammar import answer_grammar
from diptych.cluster.dialects.thoughts import THINK, ThoughtState
from diptych.cluster.dialects.tools import ToolUse
from diptych.cluster.front.openai.structured import MAX_BAD_WORDS, text_without
from diptych.cluster.front.openai.types import ChatBody, parse
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import Grammar, Request, SamplingParams
from diptych.workers.grammar.check import GrammarCheck

from ....support.engines import make, run, tokens
from ....support.grammars import compiled, text_of


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether an answer may be `text`, token by token, and end after it."""
    state = compiled(grammar).matcher(lambda _: None).state
    assert state is not None
    ids = [byte + 1 for byte in text.encode()]
    return state.validate_tokens(ids) == len(ids) and state.consume_tokens(ids) and state.is_accepting()


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_a_text_is_accepted_unless_it_has_one_of_them(words: list[str], data: st.DataObject) -> None:
    grammar = text_without(words)
    GrammarCheck().check(grammar)
    part = st.one_of(st.text(max_size=3), st.sampled_from(words))
    text = "".join(data.draw(st.lists(part, max_size=5)))
    assert accepts(grammar, text) == (not any(word in text for word in words))


def test_answers_that_are_drawn_have_none() -> None:
    engine, words = make(), ["a", "e", "the", " ", "\n"]
    grammar = text_without(words)
    for seed in range(8):
        given = SamplingParams(temperature=1.0, seed=seed, max_tokens=50, grammar=grammar)
        request = Request(str(seed), (3, 1, 4), given, timeout_s=60.0)
        engine.submit(f"0/{seed}", request, [], grammar=compiled(grammar))
    events = run(engine)
    texts = [text_of([event.token_id for event in tokens(events, f"0/{seed}")]) for seed in range(8)]
    assert sum(map(len, texts)) > 100 and not any(word in text for word in words for text in texts)


def test_a_thought_may_have_them() -> None:
    family = Dialect(FORMATS["hermes"], THINK)
    grammar = answer_grammar(family, ThoughtState.OPEN, ToolUse(), text_without(["fox"]), lambda _: None)
    assert grammar is not None
    GrammarCheck().check(grammar)
    assert accepts(grammar, "a fox</think>a dog") and not accepts(grammar, "a dog</think>a fox")


def test_as_many_as_are_allowed_are_compiled_and_more_are_refused() -> None:
    rng = random.Random(5)
    words = ["".join(rng.choices(string.ascii_lowercase, k=12)) for _ in range(MAX_BAD_WORDS)]
    GrammarCheck().check(text_without(words))
    for bad in ([*words, "one more"], ["a", ""]):
        with pytest.raises(InvalidRequest) as caught:
            text_without(bad)
        assert caught.value.param == "bad_words"


def test_a_call_has_them_or_another_grammar() -> None:
    head = b'{"messages": [{"role": "user", "content": "a"}], "bad_words": '
    assert parse(ChatBody, head + b"[]}").call().spec.sampling.grammar is None
    assert parse(ChatBody, head + b'["a"]}').call().spec.sampling.grammar == text_without(["a"])
    with pytest.raises(InvalidRequest, match="both say"):
        parse(ChatBody, head + b'["a"], "response_format": {"type": "json_object"}}').call()
