"""Large answers as JSON, written in parts between which the event loop runs."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

SLICE = 128  # items of a list that are written in one go
DEPTH = 5  # of an answer, to the lists of its log-probabilities: choices, choice, logprobs, list
MAX_PART_CHARS = 65_536  # that are written in one go


@dataclass(frozen=True, slots=True)
class Written:
    """A list of an answer, as JSON already: a million objects would hold up the loop when Python looks for garbage."""

    parts: tuple[str, ...]  # without brackets, none of them empty

    @classmethod
    def of(cls, items: Iterable[Any]) -> "Written":
        rest = iter(items)
        return cls(tuple(_dumps(part)[1:-1] for part in iter(lambda: list(islice(rest, SLICE)), [])))

    def __add__(self, other: "Written") -> "Written":
        return Written(self.parts + other.parts)


async def to_json(value: dict[str, Any]) -> bytes:
    """Others run meanwhile."""
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
    """The same of a small value, in one go. It holds nothing Written."""
    return _dumps(value).encode()


def to_text(value: dict[str, Any]) -> str:
    """The JSON of `value` in one go: for what is Written already."""
    return "".join(_parts(value, DEPTH))


def _parts(value: Any, depth: int) -> Iterator[str]:
    """The JSON of `value`, cut where it is long in its upper `depth` levels."""
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
