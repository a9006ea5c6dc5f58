"""Fields that give an answer a grammar: which grammar each means, and contradictions."""

import json
from typing import Any

import pytest

from diptych.cluster.front.openai.types import ChatBody, CompletionBody, parse
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import ANY_JSON_OBJECT, Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


def grammar_of(body: dict[str, Any]) -> Grammar | None:
    """Grammar of a body, which is the same for both endpoints."""
    chat = parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}]} | body).encode()).call()
    text = parse(CompletionBody, json.dumps({"prompt": "x"} | body).encode()).call()
    assert chat.spec.sampling.grammar == text.spec.sampling.grammar
    assert not chat.unknown and not text.unknown
    return chat.spec.sampling.grammar


def json_of(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    ("body", "expected", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ANY_JSON_OBJECT, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            json_of(SCHEMA),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            json_of({**SCHEMA, "x-guidance": {"lenient": True}}),
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)),
            "response_format",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, json_of(SCHEMA), "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_of(SCHEMA), "structured_outputs.json"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "disable_any_whitespace": False}},
            json_of({**SCHEMA, "x-guidance": {"whitespace_pattern": " ?"}}),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "disable_fallback": True}},
            json_of({"type": "object", "x-guidance": {"whitespace_flexible": False}}),
            "structured_outputs.json_object",
        ),
        ({"json_schema": json.dumps(SCHEMA)}, json_of(SCHEMA), "json_schema"),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+"), "regex"),
        ({"ebnf": "root ::= [a-z]"}, Grammar(GrammarKind.GRAMMAR, "root ::= [a-z]"), "ebnf"),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Grammar(GrammarKind.CHOICE, '["a", "b"]'),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= a"}},
            Grammar(GrammarKind.GRAMMAR, "root ::= a"),
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)),
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, json_of(SCHEMA), "guided_json"),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+"), "guided_regex"),
        ({"guided_choice": ["a"]}, Grammar(GrammarKind.CHOICE, '["a"]'), "guided_choice"),
        ({"guided_grammar": "start: a"}, Grammar(GrammarKind.GRAMMAR, "start: a"), "guided_grammar"),
        ({"guided_json_object": True}, json_of({"type": "object"}), "guided_json_object"),
        (
            {"allowed_token_ids": [7, 5, 7]},
            Grammar(GrammarKind.GRAMMAR, f"start: <[5,7]>{{{1 << 30}}}"),
            "allowed_token_ids",
        ),
    ],
)
def test_what_each_field_means(body: dict[str, Any], expected: Grammar, field: str) -> None:
    found = grammar_of(body)
    assert found is not None
    assert json.loads(found.text) == json.loads(expected.text) if found.text[0] in "{[" else found.text == expected.text
    assert (found.kind, found.field) == (expected.kind, field)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_json_object": False},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_fields_that_ask_for_nothing(body: dict[str, Any]) -> None:
    assert grammar_of(body) is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml is unknown"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": 1}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format", "not supported"),
        ({"structured_outputs": []}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "string"),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "not supported",
        ),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.regex", "leave one out"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "leave one out"),
        ({"allowed_token_ids": [5, 6], "guided_regex": "a"}, "allowed_token_ids", "leave one out"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids", "integer"),
        ({"guided_json": 5}, "guided_json", "JSON Schema"),
        ({"guided_choice": "a"}, "guided_choice", "array"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar_of(body)
    assert caught.value.param == param
