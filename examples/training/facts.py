"""Facts: the questions and answers in data/facts, and the many ways to ask one. Knows no tokenizer and no model.

A data file is a list of facts, separated by blank lines. In each, a line says one thing:

    is: the KV cache         a term; every phrasing of PHRASINGS asks for it ("are:" for a plural)
    Q: What does KV mean?    one more question that has this answer
    H: What is KV used for?  a question kept out of training, to check what was learned
    A: The KV cache ...      the answer; indented lines go on with it
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

DATA = Path(__file__).parent / "data"
Words = Mapping[str, tuple[str, ...]]
SMALLTALK_TOPICS = ("smalltalk", "outside")

PHRASINGS = (
    "What is {x}?",
    "What's {x}?",
    "What exactly is {x}?",
    "Explain {x}.",
    "Can you explain {x}?",
    "Can you explain what {x} is?",
    "Please explain {x} to me.",
    "Tell me about {x}.",
    "Tell me what {x} is.",
    "What do you know about {x}?",
    "Describe {x}.",
    "Define {x}.",
    "What does {x} mean?",
    "What is meant by {x}?",
    "Do you know what {x} is?",
    "I want to know what {x} is.",
    "{x}?",
)
ARTICLE = re.compile(r"^(the|a|an) ")
ARTICLE_INSIDE = re.compile(r" (the|a|an) ")
CLAUSE = re.compile(r"\bwhat (.+?) is\b")
QUESTION_WORD = re.compile(r"^(What|Why|How|Who|Where|When|Which) ")
INDIRECT = ("Can you tell me {q}", "Tell me {q}", "I want to know {q}", "Do you know {q}", "Please tell me {q}")
OPENERS = (
    "Hi! ",
    "Hello, ",
    "Hey, ",
    "Please: ",
    "I have a question. ",
    "Quick question: ",
    "One more thing: ",
    "So, ",
)
CLOSERS = (" Please.", " Thanks!", " Thank you.", " Please explain.", " I am new to this.")


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
    """Of each kind, the words that can stand for {kind} in a question or a story."""
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


def ask_for(term: str, phrasing: str, *, plural: bool = False) -> str:
    """The phrasing with the term filled in: 'What is {x}?' and 'stop strings' give 'What are stop strings?'."""
    if phrasing.startswith("{x}"):
        term = ARTICLE.sub("", term)
        term = term[0].upper() + term[1:]
    question = phrasing.format(x=term)
    if plural:
        question = question.replace("What is meant", "What do you mean")
        question = CLAUSE.sub(r"what \1 are", question)
        question = question.replace("What is ", "What are ").replace("What's ", "What are ")
        question = question.replace("exactly is ", "exactly are ").replace("What does ", "What do ")
    return question


def reword(question: str, rng: random.Random) -> str:
    """The question as somebody might type it: indirect, greeted, in lower case, without its mark, with a slip."""
    if QUESTION_WORD.match(question) and rng.random() < 0.12:
        question = rng.choice(INDIRECT).format(q=question[0].lower() + question[1:])
    if rng.random() < 0.07:
        question = rng.choice(OPENERS) + question
    if rng.random() < 0.05:
        question += rng.choice(CLOSERS)
    if rng.random() < 0.10:
        question = ARTICLE_INSIDE.sub(" ", question, count=1)
    if rng.random() < 0.15:
        question = question.lower()
    if rng.random() < 0.18:
        question = question.rstrip("?.!")
    if rng.random() < 0.05:
        question = _slip(question, rng)
    return question


def _slip(text: str, rng: random.Random) -> str:
    """One letter left out or swapped with the next."""
    if len(text) < 8:
        return text
    at = rng.randrange(1, len(text) - 2)
    swapped = text[at + 1] + text[at] if rng.random() < 0.5 else text[at + 1]
    return text[:at] + swapped + text[at + 2 :]
