"""Writes large answers as JSON in parts, between which the event loop runs."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

SLICE = 128  # items of a list that are written at once
DEPTH = 5  # levels down to the lists of log-probabilities: choices, choice, logprobs, list
MAX_PART_CHARS = 65_536  # that are written at once


@dataclass(frozen=True, slots=True)
class Written:
    """List of an answer that is JSON text already: a million objects would slow down Python's garbage collection."""

    parts: tuple[str, ...]  # without brackets, none of them empty

    @classmethod
    def of(cls, items: Iterable[Any]) -> "Written":
        rest = iter(items)
        return cls(tuple(_dumps(part)[1:-1] for part in iter(lambda: list(islice(rest, SLICE)), [])))

    def __add__(self, other: "Written") -> "Written":
        return Written(self.parts + other.parts)


async def to_json(value: dict[str, Any]) -> bytes:
    """JSON of `value`. The event loop runs between its parts."""
    parts: list[str] = []
    size = 0
    for part in _parts(value, DEPTH):
        parts.append(part)
        size += len(part)
        if size >= MAX_PART_CHARS:
            size = 0
            await asyncio.sleep(0)
    return "".join(parts).encode()


def to_small_json(value: dict[str, Any]) -> bytes:
    """JSON of a small value, at once. It holds nothing Written."""
    return _dumps(value).encode()


def to_text(value: dict[str, Any]) -> str:
    """JSON of `value`, at once. It may hold parts that are Written."""
    return "".join(_parts(value, DEPTH))


def _parts(value: Any, depth: int) -> Iterator[str]:
    """Parts of the JSON of `value`, which is cut where it is long in its upper `depth` levels."""
    if isinstance(value, Written):
        yield "["
        for i, part in enumerate(value.parts):
            yield f",{part}" if i else part
        yield "]"
    elif not (depth and value and isinstance(value, dict | list)):
        yield _dumps(value)
    elif isinstance(value, dict):
        for i, (name, item) in enumerate(value.items()):
            yield ("," if i else "{") + _dumps(name) + ":"
            yield from _parts(item, depth - 1)
        yield "}"
    elif isinstance(value[0], dict) and len(value) <= SLICE:
        for i, item in enumerate(value):
            yield "," if i else "["
            yield from _parts(item, depth - 1)
        yield "]"
    else:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + _dumps(value[start : start + SLICE])[1:-1]
        yield "]"


_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
