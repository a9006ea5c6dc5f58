"""The words of `diptych bench`: what is asked, in which order, and what came of it. No I/O.

A Session is one client's conversation: turns that follow one another, each asked with all that went before it. Most
workloads are of sessions of one turn.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

Messages = Sequence[Mapping[str, str]]  # "role" and "content"
Prompt = str | Sequence[int] | Messages
Text: TypeAlias = "str | array[int]"  # a text, or token ids
TOKEN_ID = "i"  # array typecode: int32


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client adds: a text, or token ids. `num_tokens`: its length; `max_tokens`: of the answer."""

    text: Text
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """`at_s`: when its first turn is sent, where the workload says so (seconds from the start)."""

    turns: tuple[Turn, ...]
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `num_tokens` of the prompt, as far as known: what the server says counts more."""

    prompt: Prompt
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """`kind` is what failures are counted by: "HTTP 429 rate_limit_exceeded"."""

    kind: str
    message: str


@dataclass(slots=True)
class Reply:
    """What came of one call. Instants: seconds on one monotonic clock."""

    sent_at: float
    token_at: list[float] = field(default_factory=list[float])  # when each event came that held tokens
    ended_at: float = 0.0  # the last token, or the failure
    num_input: int = 0
    num_cached: int = 0  # input tokens that the server did not compute again
    num_output: int = 0
    failure: RequestFailure | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])  # empty where the server tells none

    @property
    def ttft_s(self) -> float:
        """Time to first token; of an answer without a token, to its end."""
        return (self.token_at[0] if self.token_at else self.ended_at) - self.sent_at

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (e2e - ttft) / (n - 1); None of an answer of fewer than two."""
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between events that held tokens."""
        return [b - a for a, b in pairwise(self.token_at)]
