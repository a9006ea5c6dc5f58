"""JSON schemas of the kinds that public collections have, made by a seed. Every one has answers of bounded length."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "title", "city", "status", "kind", "color", "owner", "label", "region", "unit", "level", "code")


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS) + (f"_{rng.randrange(9)}" if rng.random() < 0.3 else "")


def _string(rng: random.Random) -> Schema:
    low = rng.randrange(3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 12)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-10, 10)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 50)}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, "\u00fcber", 'a "quoted" one', ""], rng.randint(1, 6))}


def _boolean(_rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _leaf(rng: random.Random) -> Schema:
    return rng.choice((_string, _integer, _enum, _boolean))(rng)


def _object(rng: random.Random, member: Callable[[random.Random], Schema] = _leaf, most: int = 4) -> Schema:
    names = list(dict.fromkeys(_word(rng) for _ in range(rng.randint(1, most))))
    required = rng.sample(names, rng.randint(0, len(names)))
    return {
        "type": "object",
        "properties": {name: member(rng) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _function_call(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": _word(rng)}, "arguments": _object(rng)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _nested(rng: random.Random) -> Schema:
    return _object(rng, lambda inner: _object(inner, most=2), most=3)


def _array(rng: random.Random) -> Schema:
    low = rng.randrange(3)
    return {"type": "array", "items": _leaf(rng), "minItems": low, "maxItems": low + rng.randint(0, 3)}


def _records(rng: random.Random) -> Schema:
    return {"type": "array", "items": _object(rng, most=2), "minItems": 1, "maxItems": 3}


def _any_of(rng: random.Random) -> Schema:
    return {"anyOf": [_leaf(rng), _object(rng, most=2), _array(rng)]}


def _tagged(rng: random.Random) -> Schema:
    """Union of objects that a constant tells apart."""
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": _leaf(rng)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("circle", "square", "line")[: rng.randint(2, 3)]
        ]
    }


def _definitions(rng: random.Random) -> Schema:
    schema = _object(rng, lambda _rng: {"$ref": "#/$defs/part"}, most=3)
    return {**schema, "$defs": {"part": _object(rng, most=2)}}


def _pattern(rng: random.Random) -> Schema:
    patterns = (r"^[A-Z]{2}-[0-9]{3}$", r"^(foo|ba[rz])+x$", r"^\d{1,3}(\.\d{1,3}){3}$", r"^[a-z][a-z0-9_]{0,9}$")
    return {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": rng.choice(patterns), "maxLength": 24}},
        "required": ["id"],
        "additionalProperties": False,
    }


def _format(rng: random.Random) -> Schema:
    names = rng.sample(("date", "time", "date-time", "uuid", "ipv4"), 2)
    return {
        "type": "object",
        "properties": {name: {"type": "string", "format": name} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _nullable(rng: random.Random) -> Schema:
    return _object(rng, lambda inner: {**_integer(inner), "type": ["integer", "null"]})


def _tuple(rng: random.Random) -> Schema:
    parts = [_leaf(rng) for _ in range(rng.randint(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _all_of(rng: random.Random) -> Schema:
    first = {"type": "object", "properties": {"a": _leaf(rng)}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": _leaf(rng)}, "required": ["b"]}
    return {"allOf": [first, second], "additionalProperties": False, "properties": {"a": {}, "b": {}}}


def _map(rng: random.Random) -> Schema:
    keys = {"^[a-c]{1,3}$": _leaf(rng)}
    return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": 3}


def _numbers(rng: random.Random) -> Schema:
    return {"type": "array", "items": _integer(rng), "minItems": 1, "maxItems": 6}


def _tree(rng: random.Random) -> Schema:
    """Recursive: a model ends it by closing."""
    node = {
        "type": "object",
        "properties": {
            "label": {"enum": rng.sample(WORDS, 3)},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["label"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _manifest(rng: random.Random) -> Schema:
    """Schema of the kind that describes deployments."""
    return {
        "type": "object",
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": ["Pod", "Service"]},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "spec": _object(rng, _array, most=2),
        },
        "required": ["apiVersion", "kind", "metadata"],
        "additionalProperties": False,
    }


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "object": _object,
    "function call": _function_call,
    "nested": _nested,
    "array": _array,
    "records": _records,
    "enum": _enum,
    "any of": _any_of,
    "tagged": _tagged,
    "definitions": _definitions,
    "pattern": _pattern,
    "format": _format,
    "nullable": _nullable,
    "tuple": _tuple,
    "all of": _all_of,
    "map": _map,
    "numbers": _numbers,
    "number": _number,
    "string": _string,
    "tree": _tree,
    "manifest": _manifest,
}


def schemas(num_of_each: int) -> list[tuple[str, Schema]]:
    """Name and schema of so many of each kind; the first of more are those of fewer."""
    return [
        (f"{kind} {i}", make(random.Random(f"{kind} {i}"))) for i in range(num_of_each) for kind, make in KINDS.items()
    ]
