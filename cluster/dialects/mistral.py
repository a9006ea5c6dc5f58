"""Mistral's calls: `[TOOL_CALLS]` and an array of objects, or `[TOOL_CALLS]NAME[ARGS]{...}` for each."""

from .json_calls import read_json_call
from .reader import Reader, Steps

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ALL = (CALLS, CALL_ID, ARGUMENTS)


def mistral(reader: Reader) -> Steps[None]:
    while (yield from reader.until((CALLS,), reader.text)):
        yield from reader.skip_spaces()
        is_array = (yield from reader.next_char()) == "["
        if not (yield from (_array(reader) if is_array else _named(reader))):
            reader.refuse()


def _array(reader: Reader) -> Steps[bool]:
    """Read calls until one is wrong. Returns whether there was one."""
    num = 0
    yield from reader.accept("[")
    while True:
        yield from reader.skip_spaces()
        if not (yield from read_json_call(reader)):
            break
        num += 1
        yield from reader.skip_spaces()
        if not (yield from reader.accept(",")):
            yield from reader.accept("]")
            break
    return num > 0


def _named(reader: Reader) -> Steps[bool]:
    found = yield from reader.name((ARGUMENTS, CALL_ID, "{"))
    if found is None:
        return False
    (name, mark), call_id = found, None
    if mark == CALL_ID:
        given = yield from reader.name((ARGUMENTS,))
        if given is None:
            return False
        call_id, mark = given
    if mark == "{":
        reader.unread(mark)
    elif (yield from reader.next_char()) != "{":
        return False
    reader.begin_call(name, call_id)
    yield from reader.json_nested(reader.arguments)
    reader.end_call()
    return True
