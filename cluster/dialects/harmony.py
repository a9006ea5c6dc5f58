"""Harmony, the format of gpt-oss: an answer is messages, each on a channel.

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS

Text before a call is on the channel commentary, without a recipient.
"""

import re

from .reader import MAX_NAME_CHARS, Reader, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ALL = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
_MAX_HEADER_CHARS = 2 * MAX_NAME_CHARS
_RECIPIENT = re.compile(r"to=([A-Za-z0-9_.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(reader: Reader) -> Steps[None]:
    reader.begin()
    yield from reader.accept("assistant")
    is_header = (yield from reader.accept(" to=")) or (yield from reader.accept("to="))
    reader.give_back()
    if is_header and not (yield from _message(reader, "")):
        reader.give_back()
    while mark := (yield from reader.until((START, CHANNEL, END, CALL, RETURN), reader.text)):
        if mark in (START, CHANNEL) and not (yield from _message(reader, mark)):
            reader.refuse()


def _message(reader: Reader, mark: str) -> Steps[bool]:
    """Read a message after its first mark. Returns False where it has no header."""
    if not mark:
        reader.begin()
    header = yield from reader.upto((MESSAGE,), _MAX_HEADER_CHARS)
    if header is None:
        return False
    channel, recipient = _CHANNEL.search(mark + header[0]), _RECIPIENT.search(header[0])
    ends = (END, CALL, RETURN, START, CHANNEL)
    if recipient is not None:
        reader.begin_call(recipient.group(1).removeprefix("functions."))
        # A string of JSON may hold the text of a mark.
        if (yield from reader.next_char()) == "{":
            yield from reader.json_nested(reader.arguments)
            reader.end_call()
            ended = yield from reader.until(ends, reader.text)
        else:
            ended = yield from reader.until(ends, reader.arguments)
            reader.end_call()
    elif channel is not None and channel.group(1) == ANALYSIS:
        ended = yield from reader.until(ends, reader.thought)
        reader.end_thought()
    else:
        ended = yield from reader.until(ends, reader.text)
    if ended in (START, CHANNEL):
        reader.unread(ended)
    return True
