"""Arguments that a model writes as plain text become JSON of the types that their schema allows."""

from typing import Any

import pytest

from diptych.cluster.dialects.schemas import to_json, types


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "integer"}, "5", "5"),
        ({"type": "number"}, " 5 ", "5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}, "[1]", "[1]"),
        ({"enum": ["a", 5]}, "5", "5"),
        ({"const": "5"}, "5", '"5"'),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "array"}, "[1", '"[1"'),
        ({}, '{"a": 1}', '{"a": 1}'),
        ({}, "plain", '"plain"'),
        (True, "5", "5"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["integer", "null"]}, "None", "null"),
        ({"type": "object"}, "{'a': [1, None, 'é']}", '{"a": [1, null, "é"]}'),
        ({"type": "integer"}, "'5'", "\"'5'\""),
        ({"type": "integer"}, "open('x')", "\"open('x')\""),
        ({"type": ["string", "boolean"]}, "True", '"True"'),
        ({}, "None", '"None"'),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"type": "array"}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
)
def test_a_text_becomes_what_its_schema_allows(schema: Any, text: str, wanted: str) -> None:
    root = {"$defs": {"a": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert to_json(text, types(schema, root)) == wanted
