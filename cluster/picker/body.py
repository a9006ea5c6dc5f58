"""Reads and changes bodies by their bytes, without parsing them: before a router has checked a key, a body may cost the
picker neither much memory nor much time on the event loop. Pure.

    ReferenceFinder   chunks, as they come -> the call that made the response which the body continues
    inflated          a gzip body -> its bytes
    renamed           a body, and what becomes of a model's name -> the body with another name, else as it was
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator

from ...workers.common.errors import BodyTooLarge, InvalidRequest

PLAIN, GZIP = frozenset({"", "identity"}), frozenset({"gzip", "x-gzip"})
STEP_BYTES = 256 << 10  # inflated at a time
MAX_STRINGS = 30_000  # of a body, that are looked at one by one: some 40 ms of processor time
MAX_NAME_BYTES = 4096
_GZIP_BITS = 16 + zlib.MAX_WBITS
# In JSON, quotes within a string have a backslash before them: only a field, of whatever object, matches.
_REFERENCE = re.compile(rb'"previous_response_id"\s{0,64}:\s{0,64}"(?:resp_)?([0-9A-Za-z_-]{1,128})"')
_OF_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # up to its last quote, or half an escape
_LEVEL = frozenset({b":", b",", b": ", b", "})  # most of what is between strings: it opens and closes nothing
_OVERLAP_BYTES = 512  # longer than any match


class ReferenceFinder:
    """Finds the field `previous_response_id` of a body's outermost object in its chunks. It says where a request goes,
    no more: the router reads the body, and says what is wrong. `max_bytes`: of a gzip body that are inflated."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self._inflater = zlib.decompressobj(_GZIP_BITS) if encoding in GZIP else None
        self._left = max_bytes
        self._nesting = Nesting()
        self._tail = b""  # has been searched, but not given to `_nesting`

    def find(self, chunk: bytes) -> str:
        """Return the id, without its prefix, once it has come whole; empty: not yet."""
        if self._inflater is None:
            return self._search(chunk)
        try:
            while chunk and self._left > 0:
                piece = self._inflater.decompress(chunk, STEP_BYTES)
                self._left -= len(piece)
                if found := self._search(piece):
                    return found
                chunk = self._inflater.unconsumed_tail
        except zlib.error:
            self._left = 0
        return ""

    def _search(self, piece: bytes) -> str:
        text, done = self._tail + piece, 0
        for found in _REFERENCE.finditer(text):
            self._nesting.read(text[done : found.start()])
            done = found.start()
            if self._nesting.may_be_outermost:
                return found[1].decode()
        kept = max(done, len(text) - _OVERLAP_BYTES)
        self._nesting.read(text[done:kept])
        self._tail = text[kept:]
        return ""


class Nesting:
    """Counts how many objects and lists are open at a place of a body, of which it reads MAX_STRINGS strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self._num_left = MAX_STRINGS

    @property
    def may_be_outermost(self) -> bool:
        """Return whether what comes next is in the outermost object, outside of strings, as far as is known."""
        return self._num_left < 0 or (self._depth == 1 and not self._is_in_string)

    def read(self, text: bytes) -> None:
        """Go on by the body's next bytes."""
        at = 0
        while at < len(text) and self._num_left >= 0:
            at = self._in_string(text, at) if self._is_in_string else self._between(text, at)

    def _between(self, text: bytes, at: int) -> int:
        """Read to the next string; return where its first character is."""
        quote = text.find(b'"', at)
        end = quote if quote >= 0 else len(text)
        self._depth += opened(text[at:end])
        if quote >= 0:
            self._is_in_string = True
            self._num_left -= 1
        return end + 1

    def _in_string(self, text: bytes, at: int) -> int:
        """Read to the end of a string, or of the bytes; return what follows."""
        found = _OF_STRING.match(text, at + self._is_escaped)
        end = found.end() if found else len(text)
        self._is_escaped = text[end : end + 1] == b"\\"
        self._is_in_string = text[end : end + 1] != b'"'
        return end + 1


def opened(between: bytes) -> int:
    """Number of objects and lists that bytes between two strings open, less those that they close."""
    if between in _LEVEL:
        return 0
    return between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")


def inflated(body: bytes, max_bytes: int) -> bytes:
    """Bytes of a gzip body; empty: it is none, or not whole. Raises BodyTooLarge."""
    inflater = zlib.decompressobj(_GZIP_BITS)
    try:
        found = inflater.decompress(body, max_bytes + 1)
    except zlib.error:
        return b""
    if len(found) > max_bytes:
        raise BodyTooLarge(f"the body inflates to more than {max_bytes} bytes: send less")
    return found if inflater.eof and not inflater.unused_data else b""


def renamed(body: bytes, rename: Callable[[str], str]) -> bytes:
    """The body with other values of its field `model`, of the outermost object, and all else byte by byte as it was.
    `rename`: name -> the one in its place. Raises BodyTooLarge where it has more than MAX_STRINGS strings."""
    parts: list[bytes] = []
    done = 0
    for begin, end in _names(body):
        name = _name(body[begin:end])
        if name is not None and (wanted := rename(name)) != name:
            parts += [body[done:begin], json.dumps(wanted).encode()]
            done = end
    return b"".join([*parts, body[done:]])


def with_model(body: bytes, name: str) -> bytes:
    """The body with that model's name, which it need not have had. Raises BodyTooLarge, InvalidRequest."""
    start = body.find(b"{") + 1
    if not start or body[: start - 1].strip():
        raise InvalidRequest("another model's name is asked for in the body, which is no JSON object: send one")
    if any(_names(body)):
        return renamed(body, lambda _: name)
    rest = body[start:]
    comma = b"" if rest.lstrip().startswith(b"}") else b","
    return body[:start] + b'"model":' + json.dumps(name).encode() + comma + rest


def _name(literal: bytes) -> str | None:
    try:
        found = json.loads(literal) if len(literal) <= MAX_NAME_BYTES else None
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _names(body: bytes) -> Iterator[tuple[int, int]]:
    """Ranges of the strings that are a field `model` of the outermost object. Raises BodyTooLarge."""
    if b'"model"' not in body or not body.lstrip().startswith(b"{"):
        return
    depth = done = 0
    is_key = False
    for begin, end in _strings(body):
        between = body[done:begin]
        if is_key and between.strip() == b":":
            yield begin, end
        depth += opened(between)
        is_key = depth == 1 and body[begin:end] == b'"model"'
        done = end


def _strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Ranges of the strings, their quotes included. Raises BodyTooLarge beyond MAX_STRINGS."""
    begin = -1  # of the string that is open
    after = 0  # the last quote
    for _ in range(2 * MAX_STRINGS + 1):
        quote = body.find(b'"', after)
        if quote < 0:
            return
        before = body[after:quote]
        if begin < 0:
            begin = quote
        elif (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            yield begin, quote + 1
            begin = -1
        after = quote + 1
    raise BodyTooLarge(
        f"a model's name is changed in bodies of at most {MAX_STRINGS} strings: send fewer, or the name that is served"
    )
