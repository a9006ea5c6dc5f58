"""Calls written in Python, of Llama 4 and Olmo: `[weather(city="Paris", days=3), time()]`."""

import ast
import json
import math
import re
import warnings
from collections.abc import Collection, Iterator

from ...workers.common.garbage import collector_paused
from .reader import MAX_HELD_CHARS, MAX_NAME_CHARS, Reader, Steps, read_json, without_surrogates

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
CALLS, END_CALLS = "<function_calls>", "</function_calls>"
ALL = (PYTHON_START, PYTHON_END, CALLS, END_CALLS)
MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_KEYWORD = re.compile(r"[^\s'\"()\[\]{}=,*#]+")  # of a schema: Python's own words too, and others than identifiers
_IN_QUOTES = {  # characters that matter outside strings, and in those of each kind
    "": re.compile(r"['\"()\[\]{}]"),
    "'": re.compile(r"['\\]"),
    '"': re.compile(r'["\\]'),
}
_IN_PIECES = _IN_QUOTES | {"": re.compile(r"['\"()\[\]{},]")}
_WORDS = {"true": True, "false": False, "null": None}  # some models mix the two languages


def pythonic(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Read an answer. `names`: of the tools; a list of other calls is text, unless marks enclose it."""
    reader.begin()
    yield from reader.skip_spaces()
    if (yield from reader.accept("[")) and (yield from _calls(reader, names)):
        reader.begin()
    reader.give_back()
    while mark := (yield from reader.until((PYTHON_START, CALLS, PYTHON_END), reader.text)):
        yield from reader.skip_spaces()
        if mark != PYTHON_END:
            yield from reader.accept("[")
            if not (yield from _calls(reader, None)):
                reader.refuse()
                continue
        yield from reader.skip_spaces()
        yield from reader.accept(END_CALLS)


def _calls(reader: Reader, names: Collection[str] | None) -> Steps[bool]:
    """Read calls until one is wrong. Returns whether there was one."""
    num = 0
    while True:
        yield from reader.skip_spaces()
        call = yield from _call(reader, names)
        if call is None:
            return num > 0
        num += 1
        reader.begin_call(call[0])
        reader.arguments(call[1])
        reader.end_call()
        yield from reader.skip_spaces()
        if (yield from reader.accept("]")):
            return True
        yield from reader.accept(",")


def _call(reader: Reader, names: Collection[str] | None) -> Steps[tuple[str, str] | None]:
    """Name and arguments of a call, which is read as a whole; None, with nothing read, where there is none."""
    name = yield from reader.upto(("(",), MAX_NAME_CHARS)
    if name is None or not (_NAME.fullmatch(name[0]) if names is None else name[0] in names):
        return None
    found: list[str] = []
    nesting, quote, num_chars = 1, "", 0
    while nesting:
        found.append((yield from reader.through(_IN_QUOTES[quote])))
        num_chars += len(found[-1])
        char = found[-1][-1:]
        if not char or num_chars > MAX_HELD_CHARS or nesting > MAX_DEPTH:
            return None
        if char == "\\":
            found.append((yield from reader.one()))
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            nesting += (char in "([{") - (char in ")]}")
    arguments = _arguments("".join(found)[:-1])
    return None if arguments is None else (name[0], arguments)


def _arguments(text: str) -> str | None:
    """JSON of the arguments of a call, from what stands between its parentheses; None where they are not constants by
    name."""
    try:
        return _to_json({name: _written_value(value) for name, value in _keywords(text)})
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _keywords(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each argument, as written. Raises ValueError for arguments without names."""
    pieces = list(_between_commas(text))
    if not pieces[-1].strip():  # a comma may end the arguments
        pieces.pop()
    for piece in pieces:
        name, equals, value = piece.partition("=")
        if not equals or not _KEYWORD.fullmatch(name.strip()):
            raise ValueError("an argument has no name")
        yield name.strip(), value


def _between_commas(text: str) -> Iterator[str]:
    """Parts of a text between its commas, without those in strings and brackets. Every bracket is closed."""
    start, nesting, quote = 0, 0, ""
    at = 0
    while (found := _IN_PIECES[quote].search(text, at)) is not None:
        char, at = found.group(), found.end()
        if char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == ",":
            if not nesting:
                yield text[start : at - 1]
                start = at
        else:
            nesting += 1 if char in "([{" else -1
    yield text[start:]


def _written_value(text: str) -> object:
    """Value of a constant. Raises ValueError, SyntaxError for anything else."""
    if not text.strip():
        raise ValueError("an argument has no value")
    try:
        return read_json(text)  # a string of JSON may have escapes that Python reads otherwise
    except ValueError:
        return _value(_parsed(f"({text}\n)"))


def constant_json(text: str) -> str | None:
    """JSON of a constant that is written in Python; None where it is none, or too long."""
    try:
        return _to_json(_value(_parsed(text.strip()))) if len(text) <= MAX_HELD_CHARS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parsed(source: str) -> ast.expr:
    with warnings.catch_warnings(), collector_paused():
        warnings.simplefilter("ignore")  # of unknown escapes in a string
        return ast.parse(source, mode="eval").body


def _to_json(value: object) -> str:
    return without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _value(node: ast.expr) -> object:
    """Value of a constant. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | bool() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise ValueError("it is no constant")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is no string")
