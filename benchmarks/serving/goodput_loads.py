"""Loads of goodput.py: sessions with the times to send them, at a rate, for a time. Pure and seeded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from diptych.cluster.bench.text import TokenText
from diptych.cluster.bench.traces import TraceLimits, trace_sessions
from diptych.cluster.bench.types import Session, Turn
from diptych.cluster.bench.workloads import Lengths, arrivals, stretched

SWING_S = 30.0  # from prompt-heavy to answer-heavy and back
DOCUMENT_S = 10.0  # between two documents
AZURE_SCALE, MOONCAKE_SCALE = 0.15, 0.05  # of lengths
MOST_INPUT = 2000  # tokens of a prompt of the Mooncake trace


@dataclass(frozen=True)
class Kind:
    """Lengths of one kind of request, in tokens."""

    inputs: Lengths
    outputs: Lengths


PROMPT_HEAVY = Kind(Lengths(400, 800), Lengths(4, 12))
ANSWER_HEAVY = Kind(Lengths(16, 48), Lengths(128, 256))
CHAT = Kind(Lengths(64, 256), Lengths(32, 96))
DOCUMENT = Kind(Lengths(3000, 3000), Lengths(32, 64))


@dataclass(frozen=True)
class Asked:
    """Settings of a load. `rate`: requests per second on average; `vocab_size`: ids of prompts are below it."""

    rate: float
    seconds: float
    seed: int
    vocab_size: int
    azure: Path | None
    mooncake: Path | None

    @property
    def num(self) -> int:
        return max(2, round(self.rate * self.seconds))

    @property
    def source(self) -> TokenText:
        return TokenText(self.vocab_size)


def azure(asked: Asked) -> list[Session]:
    """The trace's first requests, with its gaps stretched to the rate."""
    assert asked.azure is not None
    limits = TraceLimits(asked.num, length_scale=AZURE_SCALE)
    return _at_rate(trace_sessions("azure", asked.azure, limits, asked.source, asked.seed), asked.rate)


def mooncake(asked: Asked) -> list[Session]:
    """The trace's first requests, with its gaps stretched to the rate; prompts share what they share there."""
    assert asked.mooncake is not None
    limits = TraceLimits(asked.num, length_scale=MOONCAKE_SCALE, max_input=MOST_INPUT)
    return _at_rate(trace_sessions("mooncake", asked.mooncake, limits, asked.source, asked.seed), asked.rate)


def swing(asked: Asked) -> list[Session]:
    """Prompt-heavy requests for SWING_S seconds, then answer-heavy ones, in turn."""
    rng = _rng(asked)
    return [
        _session((PROMPT_HEAVY, ANSWER_HEAVY)[int(at_s // SWING_S) % 2], at_s, asked, rng)
        for at_s in _poisson(asked, rng)
    ]


def document(asked: Asked) -> list[Session]:
    """Chats, and a long document every DOCUMENT_S seconds, which is in the rate too."""
    rng = _rng(asked)
    documents = np.arange(DOCUMENT_S / 2, asked.seconds, DOCUMENT_S).tolist()
    chats = _poisson(asked, rng, num_others=len(documents))
    sessions = [_session(CHAT, at_s, asked, rng) for at_s in chats]
    sessions += [_session(DOCUMENT, at_s, asked, rng) for at_s in documents]
    return sorted(sessions, key=lambda session: session.at_s or 0.0)


LOADS: Mapping[str, Callable[[Asked], list[Session]]] = {
    "azure": azure,
    "mooncake": mooncake,
    "swing": swing,
    "document": document,
}


def _session(kind: Kind, at_s: float, asked: Asked, rng: np.random.Generator) -> Session:
    num_tokens = kind.inputs.draw(rng)
    return Session((Turn(asked.source.make(num_tokens, rng), num_tokens, kind.outputs.draw(rng)),), at_s)


def _poisson(asked: Asked, rng: np.random.Generator, num_others: int = 0) -> list[float]:
    """Times within `seconds` of a Poisson process that leaves room in the rate for `num_others`."""
    rate = max(asked.rate - num_others / asked.seconds, 1 / asked.seconds)
    times_s = arrivals(4 * asked.num + 10, rate, 1.0, rng)
    return list(takewhile(lambda at_s: at_s < asked.seconds, times_s))


def _at_rate(sessions: list[Session], rate: float) -> list[Session]:
    times_s = stretched([session.at_s or 0.0 for session in sessions], rate)
    return [Session(session.turns, at_s) for session, at_s in zip(sessions, times_s, strict=True)]


def _rng(asked: Asked) -> np.random.Generator:
    return np.random.default_rng(asked.seed)
