"""Facts: the questions and answers in data/facts, and the words that fill their gaps.

A data file is a list of facts, separated by blank lines. In each, a line says one thing:

    is: the KV cache         a term; every one of PHRASINGS asks for it ("are:" for a plural)
    Q: What does KV mean?    one more question that has this answer
    H: What is KV used for?  a question kept out of training, to check what was learned
    A: The KV cache ...      the answer; indented lines go on with it
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from .phrasing import PHRASINGS, ask_for

DATA = Path(__file__).parent / "data"
Words = Mapping[str, tuple[str, ...]]
SMALLTALK_TOPICS = ("smalltalk", "outside")


@dataclass(frozen=True, slots=True)
class Fact:
    topic: str  # the file it stands in
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


def load_facts(words: Words, folder: Path = DATA) -> tuple[Fact, ...]:
    """All facts, in file order. Raises ValueError naming the file for a fact that cannot be read."""
    return tuple(fact for path in sorted((folder / "facts").glob("*.txt")) for fact in _read_facts(path, words))


def load_words(folder: Path = DATA) -> Words:
    """Read the words of each kind, which can stand for {kind} in a question or a story."""
    words: dict[str, tuple[str, ...]] = {}
    for line in (folder / "words.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            kind, _, listed = line.partition(":")
            words[kind] = words.get(kind, ()) + tuple(word.strip() for word in listed.split(","))
    return words


def _read_facts(path: Path, words: Words) -> Iterator[Fact]:
    for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        lines = [line for line in re.sub(r"\n\s+", " ", paragraph).splitlines() if line and not line.startswith("#")]
        fields = [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]
        if not fields:
            continue
        unknown = {key for key, _ in fields} - {"is", "are", "Q", "H", "A"}
        answers = [value for key, value in fields if key == "A"]
        if unknown or len(answers) != 1 or len(fields) < 2:
            raise ValueError(f"{path}: a fact needs questions and one answer, found {lines[0]!r}")
        asked = (q for key, value in fields for q in _questions(key, value, words))
        held_out = tuple(value for key, value in fields if key == "H")
        questions = tuple(q for q in dict.fromkeys(asked) if q not in held_out)
        yield Fact(path.stem, questions, held_out, answers[0])


def _questions(key: str, value: str, words: Words) -> Iterator[str]:
    if key in ("is", "are"):
        for phrasing in PHRASINGS:
            yield ask_for(value, phrasing, plural=key == "are")
    elif key == "Q":
        kinds = re.findall(r"\{(\w+)\}", value)
        for chosen in product(*(words[kind] for kind in kinds)):
            filled = value
            for kind, word in zip(kinds, chosen, strict=True):
                filled = filled.replace(f"{{{kind}}}", word, 1)
            yield filled
