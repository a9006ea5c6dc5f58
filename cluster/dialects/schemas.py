"""JSON Schemas of tools' arguments, as far as dialects need them that write arguments one by one."""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from .pythonic import constant_json
from .reader import read_json

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]  # of arguments, by the tool's name

ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
_MAX_REFERENCES = 8
_MAX_ALTERNATIVES = 64
_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: STRING,
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
}


def properties(schema: Schema) -> Mapping[str, Any]:
    """Schema of each argument. `schema`: of all."""
    found = schema.get("properties")
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def resolved(part: object, root: Schema) -> Schema:
    """`part`, with a reference into `root` replaced by what it names; {} for what is no object."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(part, dict):
            return {}
        reference = cast("dict[str, Any]", part).get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return cast("dict[str, Any]", part)
        part = root
        for name in reference[2:].split("/"):
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return {}


def types(part: object, root: Schema) -> frozenset[str]:
    """JSON types that a value of this schema may have; ANY for a schema with many alternatives."""
    found: set[str] = set()
    waiting, num_seen = [part], 0
    while waiting:
        schema = resolved(waiting.pop(), root)
        num_seen += 1
        own = _own_types(schema)
        options = next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), None)
        if own is not None:
            found |= own
        elif options and num_seen + len(waiting) + len(options) <= _MAX_ALTERNATIVES:
            waiting += options
        else:
            return ANY
    return frozenset(found)


def _own_types(schema: Schema) -> frozenset[str] | None:
    """Types that a schema names itself."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in cast("list[object]", given) if isinstance(each, str)) or ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset().union(*map(_types_of, cast("list[object]", values)))
    return None


def to_json(text: str, wanted: frozenset[str]) -> str:
    """JSON of an argument that a model wrote as plain text. `wanted`: its types. A text that is JSON of another type
    than string, and may be, is that. So is a constant in Python (`True`, `{'a': None}`) where no string is wanted.
    Other texts are strings."""
    if wanted - STRING and _is_json_of(text, wanted):
        return text.strip()
    if "string" not in wanted:
        written = constant_json(text)
        if written is not None and _is_json_of(written, wanted):
            return written
    return json.dumps(text, ensure_ascii=False)


def _is_json_of(text: str, wanted: frozenset[str]) -> bool:
    """Return whether `text` is JSON of one of these types, or of any but a string where no string is wanted. JSON
    without its quotes is no string."""
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    fits = _types_of(value) & (wanted - STRING)
    return bool(fits) or ("string" not in wanted and not isinstance(value, str))


def _types_of(value: object) -> frozenset[str]:
    if isinstance(value, float) and value.is_integer():
        return frozenset({"integer", "number"})
    return _TYPES.get(type(value), frozenset({"object"}))
