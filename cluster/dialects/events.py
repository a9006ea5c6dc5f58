"""Parts of a model's answer, in the order in which the model writes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Start of a call of a tool. Its arguments follow, then a CallEnd."""

    name: str
    call_id: str | None = None  # where the model itself writes one


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    text: str  # of the JSON of the arguments


@dataclass(frozen=True, slots=True)
class CallEnd:
    pass


Part = TextPart | ThoughtPart | CallBegin | ArgumentsPart | CallEnd
