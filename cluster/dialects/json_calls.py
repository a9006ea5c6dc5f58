"""Calls that a model writes as one JSON object: {"name": ..., "arguments": {...}}."""

import json
from collections.abc import Collection

from .reader import MAX_HELD_CHARS, MAX_NAME_CHARS, Reader, Steps, without_surrogates


class _PartialCall:
    """Call of which some members have been read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.call_id: str | None = None
        self.arguments: str | None = None  # read before the name
        self.has_begun = False


def read_json_call(reader: Reader, names: Collection[str] | None = None) -> Steps[bool]:
    """Read one call. Returns False, where nothing was passed on: it is none, or its name is not among `names`."""
    call = _PartialCall()
    if not (yield from reader.accept("{")):
        return False
    while True:
        yield from reader.skip_spaces()
        is_right = yield from _read_member(reader, call, names)
        if call.has_begun and not is_right:
            break
        if not is_right:
            return False
        yield from reader.skip_spaces()
        if (yield from reader.accept(",")):
            continue
        if (yield from reader.accept("}")) or call.has_begun:
            break
        return False
    if not call.has_begun:
        if call.name is None:
            return False
        reader.begin_call(call.name, call.call_id)
        reader.arguments(call.arguments or "{}")
    reader.end_call()
    return True


def _read_member(reader: Reader, call: _PartialCall, names: Collection[str] | None) -> Steps[bool]:
    key = yield from reader.json_string()
    yield from reader.skip_spaces()
    if key is None or not (yield from reader.accept(":")):
        return False
    yield from reader.skip_spaces()
    match _decoded(key):
        case "name" if call.name is None:
            call.name = _decoded((yield from reader.json_string()))
            return bool(call.name) and len(call.name) <= MAX_NAME_CHARS and (names is None or call.name in names)
        case "id" if not call.has_begun and (yield from reader.next_char()) == '"':
            call.call_id = _decoded((yield from reader.json_string()))
            return call.call_id is not None and len(call.call_id) <= MAX_NAME_CHARS
        case "arguments" | "parameters" if not call.has_begun and call.arguments is None:
            return (yield from _read_arguments(reader, call))
        case _:
            return (yield from _read_value(reader)) is not None


def _read_arguments(reader: Reader, call: _PartialCall) -> Steps[bool]:
    if call.name is not None and (yield from reader.next_char()) == "{":
        reader.begin_call(call.name, call.call_id)
        call.has_begun = True
        return (yield from reader.json_nested(reader.arguments))
    text = yield from _read_value(reader)
    if text is not None and text.startswith('"'):
        text = _decoded(text)  # some models write the object as a string
    if text == "null":
        text = "{}"
    if text is None or not text.startswith("{"):
        return False
    call.arguments = text
    return True


def _read_value(reader: Reader) -> Steps[str | None]:
    """Read any JSON value; None where there is none, or a long one."""
    found: list[str] = []
    match (yield from reader.next_char()):
        case '"':
            return (yield from reader.json_string())
        case "{" | "[":
            is_whole = yield from reader.json_nested(found.append)
            return "".join(found) if is_whole and sum(map(len, found)) <= MAX_HELD_CHARS else None
        case _:
            while (char := (yield from reader.next_char())) and char in "-+.0123456789aeflnrstuE":
                yield from reader.accept(char)
                found.append(char)
                if len(found) > MAX_NAME_CHARS:
                    return None
            return "".join(found) or None


def _decoded(text: str | None) -> str | None:
    try:
        return None if text is None else without_surrogates(json.loads(text))
    except ValueError:
        return None
