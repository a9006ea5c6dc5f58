"""The stream of documents that both models are trained on: chats, plain questions and answers, and stories.

Endless and seeded: the same seed gives the same documents. Knows no tokenizer and no model.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .facts import SMALLTALK_TOPICS, Fact, Words
from .phrasing import garble, hint_at, reword
from .stories import make_story

Message = dict[str, str]  # role and content, as the chat template reads them


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


Document = Chat | Text

CHAT_SHARE, STORY_CHAT_SHARE, REPEAT_CHAT_SHARE = 0.52, 0.12, 0.06
STORY_TEXT_SHARE, PLAIN_QUESTION_SHARE = 0.10, 0.15  # and the rest are paragraphs
HINT_SHARE = 0.2  # of the questions in chats
OUTSIDE_WEIGHT = 14.0  # one answer to very many questions
MAX_TURNS = 40
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in one or two sentences.",
    "You are the assistant of the Diptych project.",
    "You are an expert on LLM serving.",
    "Be brief and friendly.",
)
REPEAT_FORMS = (
    "Repeat: {x}",
    "Repeat after me: {x}",
    "Please repeat: {x}",
    "Say: {x}",
    "Repeat this: {x}",
    "repeat {x}",
)
PLAIN_FORMS = ("Question: {q}\nAnswer: {a}", "Q: {q}\nA: {a}", "{q}\n{a}")
INTRODUCTIONS = (
    "My name is {name}.",
    "I am {name}.",
    "Hello, my name is {name}.",
    "Hi, I am {name}!",
    "my name is {name}",
)
NAME_QUESTIONS = ("What is my name?", "Do you remember my name?", "Who am I?", "what is my name", "What's my name?")


def turn(question: str, answer: str) -> tuple[Message, ...]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


class Documents:
    """All that can be said, and `stream`, which says it."""

    def __init__(self, facts: tuple[Fact, ...], words: Words) -> None:
        self._facts = facts
        self._words = words
        self._weights = [OUTSIDE_WEIGHT if fact.topic == "outside" else 1.0 for fact in facts]
        self._spoken = sorted(
            {word for fact in facts for word in fact.answer.split()} | {*words["user"], *words["thing"]}
        )
        subjects = sorted({fact.topic for fact in facts} - set(SMALLTALK_TOPICS))
        self._subjects = [[fact for fact in facts if fact.topic == topic] for topic in subjects]

    def stream(self, seed: int, *, long: bool = False) -> Iterator[Document]:
        """Endless documents; with `long`, chats of many turns."""
        rng = random.Random(seed)
        while True:
            yield self._document(rng, long=long)

    def _document(self, rng: random.Random, *, long: bool) -> Document:
        roll = rng.random()
        if long and roll < 0.7:
            return self._chat(rng, rng.randint(6, MAX_TURNS))
        for share, make in (
            (CHAT_SHARE, self._short_chat),
            (STORY_CHAT_SHARE, self._story_chat),
            (REPEAT_CHAT_SHARE, self._repeat_chat),
            (STORY_TEXT_SHARE, self._story_text),
            (PLAIN_QUESTION_SHARE, self._plain_questions),
        ):
            if roll < share:
                return make(rng)
            roll -= share
        return self._paragraph(rng)

    def _short_chat(self, rng: random.Random) -> Chat:
        return self._chat(rng, 1 if rng.random() < 0.85 else rng.randint(2, 4))

    def _chat(self, rng: random.Random, num_turns: int) -> Chat:
        messages: list[Message] = []
        if rng.random() < 0.12:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        name = ""
        for _ in range(num_turns):
            roll = rng.random()
            if num_turns > 1 and roll < 0.15:
                question, answer, name = self._name_turn(name, rng)
            elif num_turns > 1 and roll < 0.20:
                story = make_story(self._words, rng)
                question, answer = story.prompt, story.text
            else:
                question, answer = self._asked_loosely(rng)
            messages += turn(question, answer)
        return Chat(tuple(messages))

    def _asked(self, rng: random.Random) -> tuple[str, str]:
        (fact,) = rng.choices(self._facts, self._weights)
        return reword(rng.choice(fact.questions), rng), fact.answer

    def _asked_loosely(self, rng: random.Random) -> tuple[str, str]:
        if rng.random() >= HINT_SHARE:
            question, answer = self._asked(rng)
            return garble(question, rng), answer
        fact = rng.choice(rng.choice(self._subjects))
        return hint_at(fact.answer, rng), fact.answer

    def _repeat_chat(self, rng: random.Random) -> Chat:
        """Something to repeat: attention learns to copy, which stories need for their names."""
        if rng.random() < 0.3:
            text = rng.choice(self._facts).answer
        else:
            text = " ".join(rng.choices(self._spoken, k=rng.randint(1, 14)))
        return Chat(turn(rng.choice(REPEAT_FORMS).format(x=text), text))

    def _story_chat(self, rng: random.Random) -> Chat:
        story = make_story(self._words, rng)
        return Chat(turn(story.prompt, story.text))

    def _story_text(self, rng: random.Random) -> Text:
        return Text(make_story(self._words, rng).text)

    def _plain_questions(self, rng: random.Random) -> Text:
        form = rng.choice(PLAIN_FORMS)
        num_questions = 1 if rng.random() < 0.8 else rng.randint(2, 4)
        asked = (self._asked(rng) for _ in range(num_questions))
        return Text("\n\n".join(form.format(q=question, a=answer) for question, answer in asked))

    def _paragraph(self, rng: random.Random) -> Text:
        subject = rng.choice(self._subjects)
        told = [fact.answer for fact in rng.sample(subject, rng.randint(1, 4))]
        return Text(" ".join(answer for answer in told if not answer.startswith(("Yes", "No."))) or told[0])

    def _name_turn(self, name: str, rng: random.Random) -> tuple[str, str, str]:
        """A question about the user's own name, its answer, and the name known after it."""
        if rng.random() < 0.5:
            name = rng.choice(self._words["user"])
            return rng.choice(INTRODUCTIONS).format(name=name), f"Nice to meet you, {name}! How can I help you?", name
        known = f"Your name is {name}." if name else "You have not told me your name yet."
        return rng.choice(NAME_QUESTIONS), known, name
