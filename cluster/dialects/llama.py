"""Llama 3's calls: `{"name": ..., "parameters": {...}}`, or several of them between semicolons, alone or after text."""

from collections.abc import Collection

from .json_calls import read_json_call
from .reader import Reader, Steps

PYTHON_TAG = "<|python_tag|>"
STARTS = (PYTHON_TAG, '{"name"')  # of calls after text


def llama_json(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Read an answer. `names`: of the tools; an object with another name is text."""
    reader.begin()
    yield from reader.skip_spaces()
    yield from reader.accept(PYTHON_TAG)
    yield from reader.skip_spaces()
    yield from _calls(reader, names)
    reader.give_back()
    while mark := (yield from reader.until(STARTS, reader.text)):
        if mark == PYTHON_TAG:
            yield from reader.skip_spaces()
        else:
            reader.unread(mark)
        if (yield from _calls(reader, names)):
            reader.give_back()
        else:
            reader.refuse()


def _calls(reader: Reader, names: Collection[str]) -> Steps[bool]:
    """Read calls until one is wrong. Returns whether there was one: then what was read after the last one can be given
    back."""
    has_call = False
    while (yield from read_json_call(reader, names)):
        has_call = True
        reader.begin()
        yield from reader.skip_spaces()
        if (yield from reader.accept(";")) or (yield from reader.accept(",")):
            yield from reader.skip_spaces()
        if (yield from reader.next_char()) != "{":
            break
    return has_call
