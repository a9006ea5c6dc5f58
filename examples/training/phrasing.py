"""The many ways to ask for one thing: phrasings of a term, rewordings of a question, hints at an answer. Pure."""

import random
import re

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
HINTS = (
    "{x}?",
    "{x}",
    "What about {x}?",
    "Tell me about {x}.",
    "What is {x}?",
    "Which part {x}?",
    "Which {x}?",
    "How {x}?",
    "How do I {x}?",
    "Why {x}?",
    "Who {x}?",
    "When {x}?",
    "What happens when {x}?",
    "Can {x}?",
    "Does {x}?",
    "Is {x}?",
    "What does Diptych call {x}?",
    "What is {x} used for?",
)
ARTICLE = re.compile(r"^(the|a|an) ")
ARTICLE_INSIDE = re.compile(r" (the|a|an) ")
CLAUSE = re.compile(r"\bwhat (.+?) is\b")
QUESTION_WORD = re.compile(r"^(What|Why|How|Who|Where|When|Which) ")
STOP_WORDS = frozenset(
    [
        *("a", "about", "all", "an", "and", "are", "as", "at", "be", "but", "by", "can", "do", "does", "each", "for"),
        *("from", "has", "have", "how", "i", "in", "is", "it", "its", "me", "my", "no", "not", "of", "on", "one", "or"),
        *("so", "tell", "than", "that", "the", "their", "them", "then", "they", "this", "to", "what", "when", "which"),
        *("who", "why", "will", "with", "you", "your"),
    ]
)


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
    """The question as somebody might type it: indirect, greeted, in lower case, without its mark."""
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
    return question


def garble(question: str, rng: random.Random) -> str:
    """The question with words or letters missing: only what is left can tell which fact is meant."""
    words = question.split()
    roll = rng.random()
    if roll < 0.15:
        words = [word for word in words if rng.random() > 0.2] or words
    elif roll < 0.25:
        words = [word for word in words if not _is_stop_word(word)] or words
    elif roll < 0.30 and len(question) > 8:
        at = rng.randrange(1, len(question) - 2)
        return question[:at] + question[at + 1] + question[at] * rng.randrange(2) + question[at + 2 :]
    return " ".join(words)


def hint_at(answer: str, rng: random.Random) -> str:
    """A question made of words of the answer: a run of them, or a few that matter."""
    words = answer.split()
    if rng.random() < 0.5:
        length = rng.randint(2, 7)
        start = rng.randrange(max(1, len(words) - length + 1))
        chosen = words[start : start + length]
    else:
        matter = [at for at, word in enumerate(words) if not _is_stop_word(word)]
        chosen = [words[at] for at in sorted(rng.sample(matter, min(len(matter), rng.randint(2, 5))))]
    hint = " ".join(chosen).strip(".,:;!?")
    if rng.random() < 0.7:
        hint = hint[:1].lower() + hint[1:]
    return rng.choice(HINTS).format(x=hint)


def _is_stop_word(word: str) -> bool:
    return word.lower().strip(".,:;!?") in STOP_WORDS
