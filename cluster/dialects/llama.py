"""Llama 3's calls: an answer that is `{"name": ..., "parameters": {...}}`, or several of them between semicolons."""

from collections.abc import Collection

from .json_calls import read_json_call
from .reader import Reader, Steps

PYTHON_TAG = "<|python_tag|>"


def llama_json(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Read an answer. `names`: of the tools; an object with another name is text."""
    reader.begin()
    yield from reader.skip_spaces()
    yield from reader.accept(PYTHON_TAG)
    yield from reader.skip_spaces()
    while (yield from read_json_call(reader, names)):
        reader.begin()
        yield from reader.skip_spaces()
        if (yield from reader.accept(";")) or (yield from reader.accept(",")):
            yield from reader.skip_spaces()
        if (yield from reader.next_char()) != "{":
            break
    reader.give_back()
    yield from reader.rest(reader.text)
