"""Calls between marks, with one JSON object each: Hermes and Qwen, DeepSeek, Kimi."""

from collections.abc import Collection

from .json_calls import read_json_call
from .reader import Reader, Steps

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"


def hermes(reader: Reader) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of Hermes and Qwen."""
    while (yield from reader.until((TOOL_CALL,), reader.text)):
        yield from reader.skip_spaces()
        if (yield from read_json_call(reader)):
            yield from reader.skip_spaces()
            yield from reader.accept(END_TOOL_CALL)
        else:
            reader.refuse()


class DeepSeek:
    """Marks of DeepSeek V3 and V3.1."""

    calls, end_calls = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, separator, end_call = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    all = (calls, end_calls, call, separator, end_call)


def deepseek(reader: Reader) -> Steps[None]:
    """V3 writes `function`, the separator, a name and its arguments as a block of code; V3.1 a name, the separator and
    its arguments."""
    marks = (DeepSeek.call, DeepSeek.calls, DeepSeek.end_calls)
    while mark := (yield from reader.until(marks, reader.text)):
        if mark != DeepSeek.call:
            reader.text_may_not_begin_with_spaces()
        elif not (yield from _deepseek_call(reader)):
            reader.refuse()


def _deepseek_call(reader: Reader) -> Steps[bool]:
    found = yield from reader.name((DeepSeek.separator,))
    if found is None:
        return False
    is_block = (yield from reader.next_char()) != "{"
    if is_block:
        found = yield from reader.name(("\n",))
        if found is None or not (yield from reader.accept("```json")):
            return False
        yield from reader.skip_spaces()
    if not (yield from _object_of(reader, found[0])):
        return False
    yield from reader.skip_spaces()
    if is_block:
        yield from reader.accept("```")
        yield from reader.skip_spaces()
    yield from reader.accept(DeepSeek.end_call)
    return True


class Kimi:
    """Marks of Kimi K2."""

    calls, end_calls = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, arguments, end_call = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    all = (calls, end_calls, call, arguments, end_call)


def kimi(reader: Reader, names: Collection[str]) -> Steps[None]:
    """A call begins with its id, `functions.NAME:NUMBER`. An id that is only a number, which a model may write after
    other ids than its own, is of the only tool. `names`: of the tools."""
    marks = (Kimi.call, Kimi.calls, Kimi.end_calls)
    while mark := (yield from reader.until(marks, reader.text)):
        if mark != Kimi.call:
            reader.text_may_not_begin_with_spaces()
            continue
        found = yield from reader.name((Kimi.arguments,))
        if found is None:
            reader.refuse()
            continue
        call_id = found[0]
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
        if name.isdigit() and name not in names and len(names) == 1:
            name = next(iter(names))
        yield from reader.skip_spaces()
        is_named = name in names or not name.isdigit()
        if is_named and (yield from _object_of(reader, name, call_id)):
            yield from reader.skip_spaces()
            yield from reader.accept(Kimi.end_call)
        else:
            reader.refuse()


def _object_of(reader: Reader, name: str, call_id: str | None = None) -> Steps[bool]:
    """Read the arguments of a call. Returns False, where nothing was passed on: there is no object."""
    if (yield from reader.next_char()) != "{":
        return False
    reader.begin_call(name, call_id)
    yield from reader.json_nested(reader.arguments)
    reader.end_call()
    return True
