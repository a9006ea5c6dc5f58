"""Tokens of a call, and what all calls of a key have used."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0  # drafts that became tokens of the answer, wherever they came from
    rejected_prediction_tokens: int = 0  # those that did not
    stored_tokens: int = 0  # of the prompts, that were computed and added to a prefix cache


@dataclass(slots=True)
class Totals:
    """Sums over the calls of a key that have ended, and its refusals by reason."""

    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_refused: Counter[str] = field(default_factory=Counter[str])

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens
