"""Thoughts before an answer, between two marks: of DeepSeek R1, Qwen3, GLM, Kimi, Magistral and others."""

import enum
from dataclasses import dataclass

from .reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    begin: str
    end: str


THINK = ThoughtMarks("<think>", "</think>")
MAGISTRAL = ThoughtMarks("[THINK]", "[/THINK]")
ALL = (THINK, MAGISTRAL)


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


def thought(reader: Reader, marks: ThoughtMarks, state: ThoughtState) -> Steps[None]:
    """Read the thought, if there is one."""
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
    yield from reader.until((marks.end,), reader.thought)
    reader.end_thought()
