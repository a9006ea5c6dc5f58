"""Types of `diptych bench`: requests, their order, and their replies. No I/O.

A Session is one client's conversation: turns in order, each sent with all earlier ones. Most workloads have sessions of
one turn.
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
_OF_LOAD = ("429", "503", "rate_limit", "deadline_exceeded")  # in the kind of a failure that a high rate may bring


@dataclass(frozen=True, slots=True)
class Turn:
    """Message of a client: a text or token ids. `num_tokens`: its length; `max_tokens`: of the answer."""

    text: Text
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Conversation of one client. `at_s`: seconds from the start to its first turn, where the workload has times."""

    turns: tuple[Turn, ...]
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Request of a benchmark. `num_tokens`: length of its prompt, as far as known; the server's count replaces it."""

    prompt: Prompt
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Failure of a request. `kind`: failures are counted by it, as "HTTP 429 rate_limit_exceeded". `is_refused`: for
    what the request asks; it would fail again."""

    kind: str
    message: str
    is_refused: bool = False

    @property
    def may_be_load(self) -> bool:
        """Return whether a lower rate may have no such failure."""
        return self.kind == "timeout" or any(word in self.kind for word in _OF_LOAD)


@dataclass(slots=True)
class Reply:
    """Reply to one request. Times are seconds on one monotonic clock."""

    sent_at: float
    token_at: list[float] = field(default_factory=list[float])  # time of each event with tokens
    ended_at: float = 0.0  # time of the last token or of the failure
    num_input: int = 0
    num_cached: int = 0  # input tokens that the server did not compute again
    num_output: int = 0
    failure: RequestFailure | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])  # empty where the server sends none

    @property
    def ttft_s(self) -> float:
        """Time to first token; to the end, of an answer without a token."""
        return (self.token_at[0] if self.token_at else self.ended_at) - self.sent_at

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last token."""
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (e2e - ttft) / (n - 1); None for fewer than two tokens."""
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between events with tokens."""
        return [b - a for a, b in pairwise(self.token_at)]
