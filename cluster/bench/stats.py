"""Computes figures from replies, by the definitions of `vllm bench serve`. Pure.

    ttft   sending to the first token            tpot   (e2el - ttft) / (output tokens - 1), one for each request
    itl    gaps between streamed events,         e2el   sending to the last token
           of all requests together

Only complete answers count, also for throughputs. Percentiles interpolate linearly.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

import numpy as np

from ...workers.common.errors import ConfigError
from .types import Reply

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
BURST = 0.25  # of a mean answer: requests that all come in that time show a burst, not a rate
_LEVELS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el", "e2e": "e2el"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of one metric, in milliseconds. `percentiles`: in the order of PERCENTILES."""

    mean: float
    std: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, values_s: Sequence[float]) -> "Spread":
        """Distribution of values in seconds; zeros where there are none."""
        if not values_s:
            return cls(0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
        values_ms = np.asarray(values_s) * 1000
        found = np.percentile(values_ms, PERCENTILES).tolist()
        return cls(float(values_ms.mean()), float(values_ms.std()), dict(zip(PERCENTILES, found, strict=True)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a measurement. `good`: number that met the service level; None without one. Rates are per second."""

    duration_s: float
    completed: int
    failures: Mapping[str, int]  # number of each kind, the most frequent first
    num_input: int
    num_cached: int
    num_output: int
    max_concurrent: int
    good: int | None
    spreads: Mapping[str, Spread] = field(default_factory=dict[str, Spread])

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def per_s(self, number: float) -> float:
        return number / self.duration_s if self.duration_s > 0 else 0.0


def parse_levels(texts: Iterable[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> {"ttft": 0.5, "tpot": 0.05}: milliseconds to seconds. Raises ConfigError."""
    levels: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            level_s = float(number) / 1000
        except ValueError:
            level_s = 0.0
        if name not in _LEVELS or not 0 < level_s < float("inf"):
            raise ConfigError(
                f"{text!r} is not a service level: write METRIC:MILLISECONDS, for example ttft:500 or e2el:9000"
            )
        if _LEVELS[name] in levels:
            raise ConfigError(f"--goodput names {name} twice")
        levels[_LEVELS[name]] = level_s
    return levels


def summarise(replies: Sequence[Reply], duration_s: float, levels: Mapping[str, float]) -> Summary:
    done = [reply for reply in replies if reply.failure is None]
    failures = Counter(reply.failure.kind for reply in replies if reply.failure is not None)
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        failures=dict(failures.most_common()),
        num_input=sum(reply.num_input for reply in done),
        num_cached=sum(reply.num_cached for reply in done),
        num_output=sum(reply.num_output for reply in done),
        max_concurrent=max_concurrent(replies),
        good=sum(is_good(reply, levels) for reply in done) if levels else None,
        spreads={name: Spread.of(values_s(done, name)) for name in METRICS},
    )


def values_s(done: Iterable[Reply], metric: str) -> list[float]:
    """All values of a metric, in seconds."""
    if metric == "itl":
        return [gap for reply in done for gap in reply.itl_s]
    found = (_value(reply, metric) for reply in done)
    return [value for value in found if value is not None]


def is_good(reply: Reply, levels: Mapping[str, float]) -> bool:
    """Return whether a reply meets the levels. An answer of one token has no tpot, so it meets any."""
    return all((_value(reply, metric) or 0.0) <= level_s for metric, level_s in levels.items())


def alone(replies: Iterable[Reply]) -> list[Reply]:
    """Replies to requests during which no other one was open."""
    found: list[Reply] = []
    in_order = sorted(replies, key=lambda reply: reply.sent_at)
    ended_at = -inf  # the last of those before
    for reply, following in zip_longest(in_order, in_order[1:]):
        if reply.sent_at >= ended_at and (following is None or following.sent_at >= reply.ended_at):
            found.append(reply)
        ended_at = max(ended_at, reply.ended_at)
    return found


def max_concurrent(replies: Iterable[Reply]) -> int:
    """Largest number of requests that were open at one time."""
    # At the same time, an end counts before a start.
    edges = sorted([(r.sent_at, 1) for r in replies] + [(r.ended_at, -1) for r in replies])
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def _value(reply: Reply, metric: str) -> float | None:
    if metric == "ttft":
        return reply.ttft_s
    return reply.tpot_s if metric == "tpot" else reply.e2e_s
