"""Loads of a simulation: requests with times, lengths and the names of the KV blocks that they share. Pure, seeded.

Requests of which none can share a block carry no names, and workers keep no prefix caches for them: nothing could be
found there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import exp
from pathlib import Path

import numpy as np

from ...workers.common.errors import ConfigError
from ...workers.core.prefix_cache import HASH_BYTES
from ..bench.traces import TraceLimits
from ..bench.workloads import Lengths, arrivals, stretched
from ..traces.records import BLOCK_TOKENS, read_trace

NUMBER_BYTES = 4  # of a block's number in its name
MAX_SIGMA = 5.0


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Request of a simulation. `ids`: of the parts of its prompt, `id_tokens` tokens each; none: it shares nothing.
    `next_turn`: follows `think_s` after its answer, with all of this in its prompt."""

    number: int
    at_s: float
    num_input: int
    num_output: int
    ids: Sequence[int] = ()
    id_tokens: int = 0
    next_turn: "SimulatedRequest | None" = None
    think_s: float = 0.0

    def block_names(self, block_size: int) -> list[bytes]:
        """Names of the KV blocks of prompt and answer: two of a place are equal where all tokens up to there are."""
        if not self.ids:
            return []
        chain: list[bytes] = []
        digest = b""
        for part in self.ids:
            digest = _link(digest, part)
            chain.append(digest)
        num_input, size = self.num_input, self.id_tokens
        own = _link(b"answer", self.number)
        names: list[bytes] = []
        for i in range((num_input + self.num_output) // block_size):
            last = (i + 1) * block_size - 1
            head = chain[min(last // size, len(chain) - 1)] if last < num_input or self.next_turn else own
            names.append(head + i.to_bytes(NUMBER_BYTES, "little"))
        return names


@lru_cache(maxsize=1 << 16)
def _link(before: bytes, part: int) -> bytes:
    return blake2b(before + part.to_bytes(8, "little"), digest_size=HASH_BYTES - NUMBER_BYTES).digest()


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution of lengths in tokens, at least one."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> int:
        return max(1, round(self.median * exp(self.sigma * float(rng.standard_normal()))))


def parse_lengths(text: str, flag: str) -> Lengths | LogNormal:
    """ "128", "64-256", or "lognormal:1000:0.8" (median and sigma). Raises ConfigError."""
    kind, _, numbers = text.partition(":")
    if kind != "lognormal":
        return Lengths.parse(text, flag)
    median, _, sigma = numbers.partition(":")
    try:
        found = LogNormal(float(median), float(sigma))
    except ValueError:
        found = LogNormal(0.0, 0.0)
    if not (1 <= found.median <= 1e7 and 0 < found.sigma <= MAX_SIGMA):
        raise ConfigError(f"{flag} must be lognormal:MEDIAN:SIGMA, sigma at most {MAX_SIGMA:g}, got {text!r}")
    return found


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Sessions that begin at random times, `rate` a second on average. `turns`: 1 for requests alone."""

    num: int
    rate: float
    inputs: Lengths | LogNormal
    outputs: Lengths | LogNormal
    turns: int = 1
    think_s: float = 0.0


def synthetic_load(of: Synthetic, seed: int) -> list[SimulatedRequest]:
    """First turns of the sessions; the arrivals are a Poisson process."""
    rng = np.random.default_rng(seed)
    times = arrivals(of.num, of.rate, 1.0, rng)
    number = 0
    first_turns: list[SimulatedRequest] = []
    for session, at_s in enumerate(times):
        turns: list[SimulatedRequest] = []
        num_before = 0
        for _ in range(of.turns):
            num_input, num_output = num_before + of.inputs.draw(rng), of.outputs.draw(rng)
            ids = (session,) if of.turns > 1 else ()
            turns.append(SimulatedRequest(number, at_s, num_input, num_output, ids, num_input + num_output))
            num_before = num_input + num_output
            number += 1
        chained: SimulatedRequest | None = None
        for turn in reversed(turns):
            chained = replace(turn, next_turn=chained, think_s=of.think_s)
        assert chained is not None
        first_turns.append(chained)
    return first_turns


def trace_load(name: str, path: Path, limits: TraceLimits, rate: float | None) -> list[SimulatedRequest]:
    """Requests of a trace, their gaps scaled to a mean `rate` where one is given. Raises WorkloadError, ConfigError."""
    found = read_trace(name, path, limits.num)
    # A scaled trace keeps its shared prefixes: blocks are scaled like prompts.
    id_tokens = BLOCK_TOKENS.get(name, 0)
    scaled = max(1, round(id_tokens * limits.length_scale)) if id_tokens else 0
    load: list[SimulatedRequest] = []
    for number, request in enumerate(found):
        num_input = limits.input(request.num_input)
        if scaled:
            num_input = max(1, round(request.num_input * scaled / id_tokens))
            num_input = min(num_input, limits.max_input) if limits.max_input else num_input
        num_output = limits.output(request.num_output)
        at_s = request.at_s * limits.time_scale
        load.append(SimulatedRequest(number, at_s, num_input, num_output, request.block_ids, scaled))
    return load if rate is None else at_rate(load, rate)


def at_rate(load: Sequence[SimulatedRequest], rate: float) -> list[SimulatedRequest]:
    """A load with its gaps scaled to a mean `rate` of requests, or sessions, per second. Raises ConfigError."""
    times = [request.at_s for request in load]
    if len(times) < 2 or times[-1] == times[0]:
        raise ConfigError("--rate cannot scale a trace without gaps: leave it out")
    return [replace(request, at_s=at_s) for request, at_s in zip(load, stretched(times, rate), strict=True)]
