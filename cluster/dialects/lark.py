"""Writes grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ...workers.common.errors import InvalidGrammar
from ...workers.common.request import MAX_GRAMMAR_BYTES

TEXT = "/(?s:.*)/"
# As of other schemas: a space, or a new line and its indentation (workers/grammar/text.py).
_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
_GUIDANCE = "x-guidance"


class Lark:
    """Rules of one grammar, of bounded size. Each method that adds one raises InvalidGrammar."""

    def __init__(self, marks: frozenset[str], id_of: Callable[[str], int | None]) -> None:
        """`marks`: texts that may be tokens named by their ids; `id_of`: the token of one that is."""
        self._rules: list[str] = []
        self._num_chars = 0
        ordered = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if marks else r"(\b\B)")
        self._id_of = id_of
        self._texts: dict[str, str] = {}  # terminals of texts, by what they are

    def add(self, name: str, body: str) -> str:
        """Add a rule. Returns its name."""
        self._rules.append(f"{name}: {body.strip()}\n")
        self._num_chars += len(self._rules[-1])
        if self._num_chars > MAX_GRAMMAR_BYTES:  # before the next is made: many may have large parts in common
            raise InvalidGrammar(
                f"the schemas of the tools need a grammar of more than {MAX_GRAMMAR_BYTES} bytes: send fewer tools, or "
                "simpler ones",
                param="tools",
            )
        return name

    def sequence(self, text: str) -> str:
        """Text, in which marks that are such tokens are written by their ids."""
        found: list[str] = []
        for i, part in enumerate(self._marks.split(text)):
            token_id = self._id_of(part) if i % 2 else None
            if token_id is not None:
                found.append(f"<[{token_id}]>")
            elif part:
                found.append(literal(part))
        return " ".join(found)

    def text_without(self, texts: Sequence[str], first: str = "") -> str:
        """Text that has none of `texts` in it. `first`: regular expression of its beginning."""
        body = f"/{first}(?s:.*)/"
        if not texts:
            return body
        found = "|".join(re.escape(text).replace("\\\n", "\\n") for text in texts)
        body += f" & ~{regex(f'(?s:.*)(?:{found})(?s:.*)')}"
        if body not in self._texts:
            self._texts[body] = self.add(f"TEXT_{len(self._texts)}", body)
        return self._texts[body]

    def text_until(self, end: str, without: Sequence[str] = ()) -> str:
        """Text with `end` after it, and none of `without` in it. Only the beginning of `end` may be such a token."""
        text = self.text_without(without)
        first = self._marks.match(end)
        if first is not None and self._id_of(first.group()) is not None:
            return f"{text} {self.sequence(end)}"
        name = f"until_{len(self._rules)}"
        self.add(f"{name}[lazy]", f"{text} {literal(end)}")
        return name

    def text(self) -> str:
        return "%llguidance {}\n" + "".join(self._rules)


def literal(text: str) -> str:
    return json.dumps(text)


def is_lark(text: str) -> bool:
    """Return whether a grammar is Lark: it has the rule `start`."""
    return re.search(r"(?m)^[ \t]*start[ \t]*:", text) is not None


def nested(text: str) -> str:
    """Body of a rule: another grammar."""
    return "%lark {\n" + re.sub(r"(?m)^[ \t]*%llguidance[^\n]*$", "", text) + "\n}"


def regex(pattern: str) -> str:
    """Write a regular expression."""
    return "/(?:" + re.sub(r"\\.|/|\n", _escaped, pattern, flags=re.DOTALL) + ")/"


def _escaped(found: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(found.group(), found.group())


def json_of(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Body of a rule: JSON by a schema. `lenient`: what cannot be enforced is ignored."""
    own = schema.get(_GUIDANCE)
    options: dict[str, Any] = {"lenient": True} if lenient else {}
    if isinstance(own, dict):
        options |= cast("dict[str, Any]", own)
    if "whitespace_flexible" not in options:
        options.setdefault("whitespace_pattern", _WHITESPACE)
    return "%json " + json.dumps({**schema, _GUIDANCE: options})
