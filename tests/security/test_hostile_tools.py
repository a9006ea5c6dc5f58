"""Denial of service by tools: their schemas are turned into a grammar on the router's event loop, so in linear time."""

from typing import Any

import pytest

from diptych.cluster.dialects.dialect import FORMATS, Dialect
from diptych.cluster.dialects.grammar import answer_grammar
from diptych.cluster.dialects.schemas import ANY, types
from diptych.cluster.dialects.thoughts import ThoughtState
from diptych.cluster.dialects.tools import ToolSpec, ToolUse
from diptych.workers.common.errors import InvalidGrammar
from diptych.workers.common.request import MAX_GRAMMAR_BYTES

SELF: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a"}] * 50}
LARGE = {f"d{i}": {"type": "string", "description": "x" * 1000} for i in range(200)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "alternatives of themselves": {"properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": SELF}},
    "a reference to itself": {"properties": {"p": {"$ref": "#/properties/p"}}},
    "one large part in 5,000 arguments": {
        "properties": {f"p{i}": {"type": "integer"} for i in range(5000)},
        "$defs": LARGE,
    },
    "20,000 optional arguments": {"properties": {f"p{i}": {} for i in range(20_000)}},
    "a property that is no schema": {"properties": {"p": 5}, "required": 5},
    "properties that are none": {"properties": [], "required": ["p", 5]},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_hostile_schema_ends_in_a_small_grammar_or_an_error(name: str, schema: dict[str, Any]) -> None:
    """Without the bounds, the first and the third take hours and 1 GB."""
    use = ToolUse((ToolSpec("f", schema),), "required")
    try:
        grammar = answer_grammar(Dialect(FORMATS[name]), ThoughtState.FREE, use, None, lambda _: None)
    except InvalidGrammar as e:
        assert e.param == "tools"
    else:
        assert grammar is not None and len(grammar.text) <= MAX_GRAMMAR_BYTES + 100


def test_types_of_alternatives_of_themselves_are_any() -> None:
    assert types({"$ref": "#/$defs/a"}, {"$defs": {"a": SELF}}) == ANY
