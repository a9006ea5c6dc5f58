"""Calls whose arguments stand between tags of their own: Qwen3-Coder, GLM 4.5."""

import json

from .reader import Reader, Steps
from .schemas import ANY, STRING, Schemas, properties, to_json, types
from .tagged import END_TOOL_CALL, TOOL_CALL

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
ALL_OF_GLM = (KEY, END_KEY, VALUE, END_VALUE)
AFTER_VALUE = ("\n" + PARAMETER, "\n" + END_FUNCTION)  # end a value whose own end a model left out


def qwen_xml(reader: Reader, schemas: Schemas) -> Steps[None]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` within `<tool_call>`, of Qwen3-Coder."""
    while mark := (yield from reader.until((TOOL_CALL, FUNCTION), reader.text)):
        yield from reader.skip_spaces()
        is_call = mark == FUNCTION or (yield from reader.accept(FUNCTION))
        found = (yield from reader.name((">",))) if is_call else None
        if found is None:
            reader.refuse()
            continue
        arguments = _Arguments(reader, found[0], schemas)
        while True:
            yield from reader.skip_spaces()
            if not (yield from reader.accept(PARAMETER)):
                break
            key = yield from reader.upto((">",))
            if key is None:
                break
            yield from reader.accept("\n")
            mark = yield from arguments.read(key[0], ("\n" + END_PARAMETER, END_PARAMETER, *AFTER_VALUE))
            if mark in AFTER_VALUE:
                reader.unread(mark)
        arguments.end(is_closed=(yield from reader.accept(END_FUNCTION)))
        yield from reader.skip_spaces()
        yield from reader.accept(END_TOOL_CALL)


def glm(reader: Reader, schemas: Schemas) -> Steps[None]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, of GLM 4.5."""
    while (yield from reader.until((TOOL_CALL,), reader.text)):
        yield from reader.skip_spaces()
        found = yield from reader.name(("\n", KEY, END_TOOL_CALL))
        if found is None:
            reader.refuse()
            continue
        arguments = _Arguments(reader, found[0], schemas)
        mark = found[1]
        while mark != END_TOOL_CALL:
            yield from reader.skip_spaces()
            if mark != KEY and not (yield from reader.accept(KEY)):
                break
            mark = ""
            key = yield from reader.upto((END_KEY,))
            yield from reader.skip_spaces()
            if key is None or not (yield from reader.accept(VALUE)):
                break
            yield from arguments.read(key[0].strip(), (END_VALUE,))
        is_closed = mark == END_TOOL_CALL or (yield from reader.accept(END_TOOL_CALL))
        arguments.end(is_closed=is_closed)


class _Arguments:
    """JSON of a call's arguments, made as they come."""

    def __init__(self, reader: Reader, name: str, schemas: Schemas) -> None:
        self._reader = reader
        self._schema = schemas.get(name, {})
        self._is_first = True
        self._was_cut = False
        reader.begin_call(name)
        reader.arguments("{")

    def read(self, key: str, ends: tuple[str, ...]) -> Steps[str]:
        """Read a value and the mark that ends it. A string is passed on as it comes. Returns the mark; "" where none
        came."""
        own = properties(self._schema).get(key)
        wanted = ANY if own is None else types(own, self._schema)
        self._reader.arguments(("" if self._is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._is_first = False
        if wanted == STRING:
            mark = yield from self._read_string(ends)
        else:
            held: list[str] = []
            mark = yield from self._reader.until(ends, held.append)
            self._reader.arguments(to_json("".join(held), wanted))
        self._was_cut = not mark
        return mark

    def _read_string(self, ends: tuple[str, ...]) -> Steps[str]:
        self._reader.arguments('"')
        mark = yield from self._reader.until(
            ends, lambda text: self._reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        if mark:
            self._reader.arguments('"')
        return mark

    def end(self, *, is_closed: bool) -> None:
        """End the call. An object that the answer's end cut is not closed."""
        if is_closed or not (self._was_cut or self._reader.is_at_end):
            self._reader.arguments("}")
        self._reader.end_call()
