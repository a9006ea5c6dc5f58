"""Makes synthetic workloads: sessions with prompts of given lengths, and the times to send them. Pure and seeded: the
same settings give the same prompts in the same order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...workers.common.errors import ConfigError
from .text import TextSource
from .types import Session, Text, Turn

MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform distribution of lengths in tokens, from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> "Lengths":
        """ "128" or "64-256". Raises ConfigError."""
        low, dash, high = text.partition("-")
        if not (low.isdecimal() and (high.isdecimal() or not dash)):
            raise ConfigError(f"{flag} must be a number of tokens or a range, for example 128 or 64-256, got {text!r}")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high <= MAX_TOKENS:
            raise ConfigError(f"{flag} must be between 1 and {MAX_TOKENS}, and a range must be ascending, got {text!r}")
        return lengths

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


def random_sessions(
    num: int, inputs: Lengths, outputs: Lengths, source: TextSource, rng: np.random.Generator
) -> list[Session]:
    """Sessions with prompts that share no prefix."""
    return [Session((_turn(inputs, outputs, source, rng),)) for _ in range(num)]


def shared_prefix_sessions(
    sessions: list[Session], num_prefixes: int, prefix_tokens: int, source: TextSource, rng: np.random.Generator
) -> list[Session]:
    """Sessions that begin with one of `num_prefixes` common texts, equally many with each, in random order."""
    prefixes = [source.make(prefix_tokens, rng) for _ in range(num_prefixes)]
    order = rng.permutation(len(sessions))
    return [
        Session((_prefixed(session.turns[0], prefixes[i % num_prefixes], prefix_tokens, source), *session.turns[1:]))
        for i, session in zip(order.tolist(), sessions, strict=True)
    ]


def multi_turn_sessions(
    num: int, num_turns: Lengths, lengths: tuple[Lengths, Lengths], source: TextSource, rng: np.random.Generator
) -> list[Session]:
    """Sessions of several turns. `lengths`: of the client's messages and of the answers."""
    inputs, outputs = lengths
    return [Session(tuple(_turn(inputs, outputs, source, rng) for _ in range(num_turns.draw(rng)))) for _ in range(num)]


def arrivals(num: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Start times in seconds, the first 0. Gaps have a gamma distribution with mean 1 / rate and shape `burstiness`:
    1 is a Poisson process, less comes in bursts, more is steadier."""
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), max(num - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:num]


def stretched(times_s: Sequence[float], rate: float) -> list[float]:
    """Times of a trace, all gaps multiplied by one number, so that they have that rate on average; the first is 0.
    Where all are one time, the gaps are equal."""
    first_s = min(times_s)
    span_s = max(times_s) - first_s
    if span_s == 0:
        return [i / rate for i in range(len(times_s))]
    scale = (len(times_s) - 1) / (rate * span_s)
    return [(at_s - first_s) * scale for at_s in times_s]


def _turn(inputs: Lengths, outputs: Lengths, source: TextSource, rng: np.random.Generator) -> Turn:
    num_tokens = inputs.draw(rng)
    return Turn(source.make(num_tokens, rng), num_tokens, outputs.draw(rng))


def _prefixed(turn: Turn, prefix: Text, prefix_tokens: int, source: TextSource) -> Turn:
    return Turn(source.join([prefix, turn.text]), turn.num_tokens + prefix_tokens, turn.max_tokens)
