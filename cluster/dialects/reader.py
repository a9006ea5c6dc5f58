"""Incremental reading of an answer's text. Pure.

    feed(text) -> parts ... end() -> parts          AnswerParser, over the steps of a dialect

The steps of a dialect are a generator that yields where it needs more text, so that it reads like a parser of the whole
text. A step decides by the text alone, never by how it was cut.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import TypeVar

from .events import ArgumentsPart, CallBegin, CallEnd, Part, TextPart, ThoughtPart

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_HELD_SPACES = 64  # before a call or at the end of a thought: they are left out
MAX_HELD_CHARS = 65_536  # of what is read as a whole before it is passed on
MAX_REFUSED_CHARS = 1 << 20  # that are read again; what follows is text
MAX_NAME_CHARS = 256
SLICE = 4096  # characters that are read at once: what is left of them is copied at each step
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_SPACES = re.compile(r"\s*")
_IN_JSON = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class _Trimmed:
    """Text without spaces at its beginning, and without those that nothing follows, unless they are kept."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.drops_spaces = False  # at the beginning
        self._spaces = ""

    def add(self, text: str) -> None:
        if self.drops_spaces:
            text = text.lstrip()
            if not text:
                return
            self.drops_spaces = False
        text = self._spaces + text
        cut = max(len(text.rstrip()), len(text) - MAX_HELD_SPACES)
        self._spaces = text[cut:]
        if cut:
            self._emit(text[:cut])

    def end(self, *, keep: bool = False) -> None:
        if keep and self._spaces:
            self._emit(self._spaces)
        self._spaces = ""
        self.drops_spaces = True


class Reader:
    """Text that has come and was not read yet, and the parts that were made of what was read."""

    def __init__(self) -> None:
        self.has_ended = False
        self.was_cut = False  # it ended before the model ended it
        self._left = ""
        self._taken: list[str] | None = None  # since `begin`
        self._parts: list[Part] = []
        self._text = _Trimmed(lambda text: self._parts.append(TextPart(text)))
        self._thought = _Trimmed(lambda text: self._parts.append(ThoughtPart(text)))
        self._thought.drops_spaces = True
        self._is_in_call = False
        self.num_refused = 0  # characters that were read again

    @property
    def is_at_end(self) -> bool:
        return self.has_ended and not self._left

    def add(self, text: str) -> None:
        self._left += text

    def finish(self) -> None:
        """End what is open: no text follows."""
        self.end_call()
        self._text.end(keep=True)

    def take_parts(self) -> list[Part]:
        found, self._parts = self._parts, []
        return found if len(found) < 2 else _merged(found)

    def text(self, text: str) -> None:
        self._text.add(text)

    def thought(self, text: str) -> None:
        self._thought.add(text)

    def end_thought(self) -> None:
        self._thought.end()
        self._text.drops_spaces = True

    def text_may_not_begin_with_spaces(self) -> None:
        """Leave out the spaces that follow: they belong to a mark."""
        self._text.end()

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._taken = None
        self._text.end()
        self._is_in_call = True
        self._parts.append(CallBegin(name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            self._parts.append(ArgumentsPart(text))

    def end_call(self) -> None:
        if self._is_in_call:
            self._is_in_call = False
            self._parts.append(CallEnd())

    def begin(self) -> None:
        """Keep what is read from here on, for `refuse`, until a call begins."""
        self._taken = []

    def refuse(self) -> None:
        """Read as text what was read first since `begin`: a mark. The rest will be read again."""
        taken, self._taken = self._taken or [], None
        if taken:
            self.text(taken[0])
            rest = "".join(taken[1:])
            self.num_refused += len(rest)
            self._left = rest + self._left

    def give_back(self) -> None:
        """Read all again that was read since `begin`."""
        taken, self._taken = self._taken or [], None
        self._left = "".join(taken) + self._left

    def unread(self, text: str) -> None:
        """Read again what was read last."""
        if self._taken:
            self._taken.pop()
        self._left = text + self._left

    def peek(self, most: int) -> str:
        """Text that has come and was not read yet, at most so many characters of it."""
        return self._left[:most]

    def until(self, marks: Sequence[str], emit: Emit) -> Steps[str]:
        """Pass text on until one of the marks, which is read too. Returns it; "" where the text ends before one."""
        self._taken = None
        if self.num_refused > MAX_REFUSED_CHARS:
            marks = ()
        while True:
            found = [(at, mark) for mark in marks if (at := self._left.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                if at:
                    emit(self._read(at))
                self.begin()
                return self._read(len(mark))
            if (cut := len(self._left) if self.has_ended else _before_mark(self._left, marks)) > 0:
                emit(self._read(cut))
            if self.has_ended:
                return ""
            yield

    def upto(self, marks: Sequence[str], most: int = MAX_HELD_CHARS) -> Steps[tuple[str, str] | None]:
        """Read up to one of the marks, and it. Returns the text before it and the mark; None, with nothing read, where
        it does not come within `most` characters."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._left.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                return (self._read(at), self._read(len(mark))) if at <= most else None
            if self.has_ended or len(self._left) > most + max(map(len, marks)):
                return None
            yield

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` where the text goes on with it. Returns whether it does."""
        while not self.has_ended and len(self._left) < len(literal) and literal.startswith(self._left):
            yield
        if self._left.startswith(literal):
            self._read(len(literal))
            return True
        if self.was_cut and self._left and literal.startswith(self._left):  # its end is cut off
            self._read(len(self._left))
            return True
        return False

    def skip_spaces(self) -> Steps[None]:
        while True:
            found = _SPACES.match(self._left)
            assert found is not None
            if found.end():
                self._read(found.end())
            if self._left or self.has_ended:
                return
            yield

    def next_char(self) -> Steps[str]:
        """Next character, which is not read; "" at the end."""
        while not self._left and not self.has_ended:
            yield
        return self._left[:1]

    def name(self, ends: Sequence[str]) -> Steps[tuple[str, str] | None]:
        """Read a tool's name and one of `ends` after it."""
        found = yield from self.upto(ends, MAX_NAME_CHARS)
        if found is None or not _NAME.fullmatch(found[0].strip()):
            return None
        return found[0].strip(), found[1]

    def through(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read up to the next character of `pattern`, and it; all that is left where none comes, or late."""
        found: list[str] = []
        num_chars = 0
        while True:
            hit = pattern.search(self._left)
            found.append(self._read(len(self._left) if hit is None else hit.end()))
            num_chars += len(found[-1])
            if hit is not None or self.has_ended or num_chars > MAX_HELD_CHARS:
                return "".join(found)
            yield

    def one(self) -> Steps[str]:
        """Read one character; "" at the end."""
        yield from self.next_char()
        return self._read(1)

    def json_string(self) -> Steps[str | None]:
        """Read a JSON string with its quotes; None where there is none, or a long one."""
        if not (yield from self.accept('"')):
            return None
        found, num_chars = ['"'], 0
        while True:
            found.append((yield from self.through(_IN_STRING)))
            num_chars += len(found[-1])
            if num_chars > MAX_HELD_CHARS or not found[-1].endswith(('"', "\\")):
                return None
            if found[-1].endswith('"'):
                return "".join(found)
            found.append((yield from self.one()))

    def json_nested(self, emit: Emit) -> Steps[bool]:
        """Pass a JSON object or array on, which the text goes on with. Returns whether it was whole."""
        depth, is_in_string = 0, False
        while True:
            hit = (_IN_STRING if is_in_string else _IN_JSON).search(self._left)
            if hit is None:
                if self._left:
                    emit(self._read(len(self._left)))
                if self.has_ended:
                    return False
                yield
                continue
            char = hit.group()
            if char == "\\":
                while len(self._left) < hit.end() + 1 and not self.has_ended:
                    yield
                emit(self._read(min(hit.end() + 1, len(self._left))))
                continue
            emit(self._read(hit.end()))
            if char == '"':
                is_in_string = not is_in_string
            else:
                depth += 1 if char in "{[" else -1
                if depth == 0:
                    return True

    def rest(self, emit: Emit) -> Steps[None]:
        yield from self.until((), emit)

    def _read(self, num: int) -> str:
        text, self._left = self._left[:num], self._left[num:]
        if self._taken is not None:
            self._taken.append(text)
        return text


class AnswerParser:
    def __init__(self, steps: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = steps(self._reader)
        next(self._steps, None)

    def feed(self, text: str) -> list[Part]:
        """Parts that the answer's next text completes."""
        for start in range(0, len(text), SLICE):
            self._reader.add(text[start : start + SLICE])
            next(self._steps, None)
        return self._reader.take_parts()

    def end(self, *, was_cut: bool = False) -> list[Part]:
        """Last parts: no text follows. `was_cut`: the model would have gone on."""
        self._reader.has_ended, self._reader.was_cut = True, was_cut
        for _ in self._steps:
            pass
        self._reader.finish()
        return self._reader.take_parts()


def _merged(parts: Sequence[Part]) -> list[Part]:
    """`parts`, with neighbours of one kind of text joined."""
    found: list[Part] = []
    for _, neighbours in groupby(parts, type):
        group = list(neighbours)
        match group[0]:
            case CallBegin() | CallEnd():
                found += group
            case first:
                found.append(type(first)("".join(part.text for part in group if isinstance(part, type(first)))))
    return found


def _before_mark(text: str, marks: Sequence[str]) -> int:
    """Number of characters before the end of the text that may be the beginning of a mark."""
    cut = len(text)
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while 0 <= at < cut:
            if text.startswith(mark[: len(text) - at], at):
                cut = at
            at = text.find(mark[0], at + 1)
    return cut


def read_json(text: str) -> object:
    """Value of JSON. Raises ValueError, also for NaN and infinities, which Python reads and JSON has not."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def without_surrogates(text: str) -> str:
    """`text`, which escapes of JSON or Python may have given halves of UTF-16 pairs: UTF-8 has none. Two halves become
    their character, and a lone one U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
