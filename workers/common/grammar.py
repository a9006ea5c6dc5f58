"""Grammar that an answer must follow, as its request gives it. Compiled by workers/grammar/compiler.py."""

import enum
from dataclasses import dataclass

from .errors import InvalidGrammar

MAX_GRAMMAR_BYTES = 256 << 10  # of its text
PARAM = "structured_outputs"


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"  # JSON Schema, as JSON
    REGEX = "regex"  # of the whole answer
    CHOICE = "choice"  # JSON array of strings: one of them is the answer
    GRAMMAR = "grammar"  # Lark, or GBNF
    STRUCTURAL_TAG = "structural_tag"  # JSON object: text, with parts that follow schemas


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    text: str

    def validate(self) -> None:
        """Raise InvalidGrammar for a text that is empty or too long to be compiled."""
        if not self.text:
            raise InvalidGrammar(f"the {self.kind.value} is empty: send one, or leave it out", param=PARAM)
        # A character has at least one byte: long texts are not encoded.
        if len(self.text) > MAX_GRAMMAR_BYTES or len(self.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"the {self.kind.value} has more than {MAX_GRAMMAR_BYTES} bytes", param=PARAM)


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
