"""Grammars of answers with calls: they allow what models write, and what they allow is parsed to valid calls."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from diptych.cluster.dialects.dialect import FORMATS, Dialect
from diptych.cluster.dialects.grammar import answer_grammar
from diptych.cluster.dialects.thoughts import THINK, ThoughtState
from diptych.cluster.dialects.tools import ToolSpec, ToolUse, custom_tool
from diptych.workers.common.errors import InvalidGrammar
from diptych.workers.common.request import Grammar, GrammarKind
from diptych.workers.grammar.check import GrammarCheck
from diptych.workers.grammar.compiler import GrammarCompiler

from .test_parsers import DS, KIMI, Read, joined

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (ToolSpec("weather", WEATHER, strict=True), ToolSpec("time", NOTHING, strict=True))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
REQUIRED = ToolUse(TOOLS, "required")
ENDS_OF_TEXT = (b"\n</parameter>\n", b"</arg_value>\n", b"<|end|>", b"</think>")  # where they are no tokens


@cache
def marks(name: str) -> tuple[str, ...]:
    return tuple(sorted(Dialect(FORMATS[name], THINK).marks))


class Vocabulary:
    """Tokens 1 to 256 are the bytes, 0 ends, the rest are a dialect's marks, as special tokens or as text."""

    def __init__(self, name: str, *, special: bool) -> None:
        self.eos_token_id, self.bos_token_id = 0, None
        self.tokens = [b"<eos>", *(bytes([i]) for i in range(256)), *(mark.encode() for mark in marks(name))]
        self.special_token_ids = [0, *(range(257, len(self.tokens)) if special else ())]

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]

    def id_of(self, mark: str) -> int | None:
        at = self.tokens.index(mark.encode())
        return at if at in self.special_token_ids else None


def matcher(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    GrammarCheck().check(grammar)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens))
    return GrammarCompiler(lambda: tokenizer).compile(grammar).matcher(lambda error: None).state


def sample(vocabulary: Vocabulary, grammar: Grammar, seed: int) -> str:
    """Answer of a model that likes all tokens, and ends where it may."""
    state, rng, text = matcher(vocabulary, grammar), random.Random(seed), b""
    mask = allocate_token_bitmask(1, len(vocabulary.tokens))
    closings = [vocabulary(end) for end in ENDS_OF_TEXT]
    for step in range(3000):
        fill_next_token_bitmask(state, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(vocabulary.tokens)]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"nothing may follow {text!r}"
        if rng.random() < 0.1 and (whole := [c for c in closings if state.validate_tokens(c) == len(c)]):
            state.consume_tokens(whole[0])
            text += bytes(i - 1 for i in whole[0])
            continue
        # Text, marks and the end are about equally likely.
        ends = [i for i in allowed if i == 0 or i > 256 or i == ord('"') + 1]
        plain = [i for i in allowed if 0x20 < i - 1 < 0x7F and i not in ends] or allowed
        token = rng.choice(ends if ends and rng.random() < 0.2 + step / 1000 else plain)
        if token == 0:
            return text.decode()
        text += vocabulary.tokens[token]
        assert state.consume_token(token)
    raise AssertionError(f"the answer does not end: {text[-200:]!r}")


def parsed(name: str, text: str, state: ThoughtState = ThoughtState.FREE) -> Read:
    family = FORMATS[name]
    parser = Dialect(family, None if family.has_channels else THINK).parser(state, SCHEMAS)
    return joined(parser.feed(text) + parser.end())


def dialect(name: str) -> Dialect:
    return Dialect(FORMATS[name], None if FORMATS[name].has_channels else THINK)


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("state", ThoughtState)
@pytest.mark.parametrize("name", FORMATS)
def test_any_answer_that_must_call_has_valid_calls(name: str, state: ThoughtState, special: bool) -> None:
    vocabulary = Vocabulary(name, special=special)
    grammar = answer_grammar(dialect(name), state, REQUIRED, None, vocabulary.id_of)
    assert grammar is not None
    for seed in range(4):
        text = sample(vocabulary, grammar, seed)
        found = parsed(name, text, state)
        assert found.calls, text
        assert not found.text, text
        for tool, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool])


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_may_be_left_alone_and_is_called_rightly(name: str, special: bool) -> None:
    vocabulary = Vocabulary(name, special=special)
    use = ToolUse(TOOLS, "auto", parallel=False)
    grammar = answer_grammar(dialect(name), ThoughtState.DONE, use, None, vocabulary.id_of)
    assert grammar is not None
    for seed in range(4):
        found = parsed(name, sample(vocabulary, grammar, seed), ThoughtState.DONE)
        assert len(found.calls) <= 1
        for tool, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool])


WRONG = {  # calls that do not follow the schemas
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>',
    "qwen3_xml": "<function=weather>\n<parameter=unit>\nK\n</parameter>\n</function>",
    "glm45": "<tool_call>weather\n<arg_key>unit</arg_key>\n<arg_value>K</arg_value>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": 5}}',
    "pythonic": "<function_calls>\nweather(city=5)\n</function_calls>",
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": 5}}]',
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": 5}',
    "deepseek_v3": f'{DS[1]}function{DS[2]}weather\n```json\n{{"city": 5}}\n```{DS[3]}',
    "deepseek_v31": f'{DS[0]}{DS[1]}weather{DS[2]}{{"city": 5}}{DS[3]}',
    "kimi_k2": f'{KIMI[1]}functions.weather:0{KIMI[2]}{{"city": 5}}{KIMI[3]}',
    "harmony": '<|channel|>commentary to=functions.weather<|message|>{"city": 5}',
}


@pytest.mark.parametrize("thought", ["", "<think>\nHm\n", "<think>\nHm\n</think>\n\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_text_holds_a_call_that_breaks_its_schema(name: str, thought: str) -> None:
    """Marks are plain text here, as in many tokenizers: no token tells a call from what is said of one."""
    vocabulary = Vocabulary(name, special=False)
    use = ToolUse(TOOLS, "auto")
    grammar = answer_grammar(dialect(name), ThoughtState.FREE, use, None, vocabulary.id_of)
    assert grammar is not None
    said = {"harmony": "<|channel|>final<|message|>"}.get(name, thought) + "Hm "
    end = {"": ""}.get(thought, "</think>")
    text = (said + WRONG[name] + (end if end not in said else "")).encode()
    assert parsed(name, text.decode()).calls
    state = matcher(vocabulary, grammar)
    assert state.validate_tokens(vocabulary(text)) < len(text)
    plain = (said + '1 < 2 [a] and {"x": {"name": 1} so on').encode()
    assert state.validate_tokens(vocabulary(plain)) in (len(plain), plain.find(b'{"name"') + len(b'{"name'))


@pytest.mark.parametrize("name", FORMATS)
def test_only_allowed_tools_are_called(name: str) -> None:
    vocabulary = Vocabulary(name, special=True)
    use = ToolUse(TOOLS, "required", names=("time",), parallel=False)
    grammar = answer_grammar(dialect(name), ThoughtState.DONE, use, None, vocabulary.id_of)
    assert grammar is not None
    assert parsed(name, sample(vocabulary, grammar, 1), ThoughtState.DONE).calls == (("time", "{}"),)


ANSWERS = [
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "additionalProperties": false}'),
    Grammar(GrammarKind.REGEX, r"\{\}|a/b"),
    Grammar(GrammarKind.CHOICE, '["{}", "{ }"]'),
    Grammar(GrammarKind.GRAMMAR, '%llguidance {}\nstart: "{" x "}"\nx: " "?'),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind.value)
@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_a_grammar_of_the_text_begins_after_the_thought(name: str, answer: Grammar) -> None:
    vocabulary = Vocabulary(name, special=True)
    for state in ThoughtState:
        for use in (ToolUse(), ToolUse(TOOLS, "auto")):
            grammar = answer_grammar(dialect(name), state, use, answer, vocabulary.id_of)
            assert grammar is not None
            for seed in range(3):
                found = parsed(name, sample(vocabulary, grammar, seed), state)
                assert found.calls or found.text.replace(" ", "") in ("{}", "a/b")
    assert answer_grammar(dialect("hermes"), ThoughtState.DONE, ToolUse(), answer, vocabulary.id_of) == answer


def test_a_custom_tool_has_a_text_of_its_grammar() -> None:
    pattern = custom_tool("sql", Grammar(GrammarKind.REGEX, "SELECT [a-z]{1,4}"))
    lark = custom_tool("sql", Grammar(GrammarKind.GRAMMAR, 'start: "SELECT" " " /[a-z]{1,4}/'))
    for name, tool in (("hermes", pattern), ("qwen3_xml", lark), ("glm45", lark)):
        vocabulary = Vocabulary(name, special=False)
        use = ToolUse((tool,), "required", parallel=False)
        grammar = answer_grammar(Dialect(FORMATS[name]), ThoughtState.FREE, use, None, vocabulary.id_of)
        assert grammar is not None
        parser = Dialect(FORMATS[name]).parser(ThoughtState.FREE, {"sql": tool.parameters})
        [(_, arguments)] = joined(parser.feed(sample(vocabulary, grammar, 3)) + parser.end()).calls
        assert json.loads(arguments)["input"].startswith("SELECT ")
    with pytest.raises(InvalidGrammar, match="syntax: regex"):
        use = ToolUse((lark,), "required")
        answer_grammar(Dialect(FORMATS["hermes"]), ThoughtState.FREE, use, None, lambda _: None)


def test_an_answer_that_needs_no_grammar_has_none() -> None:
    free = (ToolSpec("time", NOTHING),)
    assert answer_grammar(dialect("hermes"), ThoughtState.OPEN, ToolUse(free, "auto"), None, lambda _: None) is None
    assert answer_grammar(dialect("hermes"), ThoughtState.OPEN, ToolUse(), None, lambda _: None) is None
