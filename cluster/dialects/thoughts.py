"""Thoughts before an answer, between two marks: of DeepSeek R1, Qwen3, GLM, Kimi, Magistral and others.

Some models call a tool in the midst of a thought and end the answer there, or end the thought after the call and say no
more. What looks like a call in a thought that goes on, or that an answer follows, is a draft.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .reader import MAX_HELD_CHARS, MAX_REFUSED_CHARS, Reader, Steps

_FEW_CHARS = 512  # that show whether a call begins: where none does, the rest of a thought is not held back


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    begin: str
    end: str


THINK = ThoughtMarks("<think>", "</think>")
MAGISTRAL = ThoughtMarks("[THINK]", "[/THINK]")
ALL = (THINK, MAGISTRAL)


@dataclass(frozen=True, slots=True)
class CallsInThought:
    """Calls that a thought may hold. `begins`: whether a text that begins with one of `starts` begins with a call."""

    starts: tuple[str, ...]
    begins: Callable[[str], bool]


class ThoughtState(enum.Enum):
    """Thought of an answer, as its prompt begins it."""

    FREE = "free"  # the model may begin one
    OPEN = "open"  # the prompt has begun one
    DONE = "done"  # the prompt has an empty one: none follows


def state_after(prompt: str, marks: ThoughtMarks) -> ThoughtState:
    """State after a prompt. `prompt`: its last characters."""
    end = prompt.rstrip()
    if end.endswith(marks.begin):
        return ThoughtState.OPEN
    return ThoughtState.DONE if end.endswith(marks.end) else ThoughtState.FREE


def state_within(message: str, marks: ThoughtMarks) -> ThoughtState | None:
    """State after the beginning of an answer; None: it has no marks, nor other text after which no thought begins."""
    begin, end = message.rfind(marks.begin), message.rfind(marks.end)
    if begin == end:
        return ThoughtState.DONE if message.strip() else None
    return ThoughtState.OPEN if begin > end else ThoughtState.DONE


def thought(reader: Reader, marks: ThoughtMarks, state: ThoughtState, calls: CallsInThought) -> Steps[None]:
    """Read the thought, if there is one, up to a call that ends it."""
    if state is ThoughtState.FREE:
        reader.begin()
        yield from reader.skip_spaces()
        if not (yield from reader.accept(marks.begin)):
            reader.give_back()
            return
    elif state is ThoughtState.OPEN:
        # Some models repeat what the prompt ends with.
        yield from reader.skip_spaces()
        yield from reader.accept(marks.begin)
    else:
        return
    num_checked, is_over = 0, False
    while not is_over:
        starts = calls.starts if num_checked <= MAX_REFUSED_CHARS else ()
        mark = yield from reader.until((marks.end, *starts), reader.thought)
        if mark in ("", marks.end):
            break
        is_over, num_chars = yield from _is_over(reader, mark, marks.end, calls)
        num_checked += num_chars
    reader.end_thought()


def _is_over(reader: Reader, mark: str, end: str, calls: CallsInThought) -> Steps[tuple[bool, int]]:
    """Return whether the thought is over, after `mark`, which may begin a call, and the number of characters that were
    looked at. They are a part of the thought unless a call begins there and nothing follows it, but maybe `end`: then
    it will be read next."""
    num_chars = 0
    for most in (_FEW_CHARS, MAX_HELD_CHARS):
        found = yield from reader.upto((end,), most)
        text = mark + (reader.peek(most) if found is None else found[0])
        num_chars += len(text)
        if found is not None:
            yield from reader.skip_spaces()
            if (yield from reader.next_char()) or reader.was_cut:
                reader.thought(text)
                return True, num_chars
            if calls.begins(text):
                reader.unread(text)
                return True, num_chars
            reader.unread(found[0] + end)
            break
        if reader.was_cut or not calls.begins(text):
            break
        if reader.has_ended:
            reader.unread(mark)
            return True, num_chars
    reader.thought(mark)
    return False, num_chars
