"""Draft: tokens that are expected to follow those of a sequence; Proposer: whoever expects them.

A draft costs rows of a step, and never changes an answer: the step samples the target's own token at each row, and a
drafted token is accepted while it equals that (Leviathan et al. 2023, with drafts that are deterministic).
"""

from dataclasses import dataclass
from typing import Protocol

from ..core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """`token_ids`, in order; `chances`: of each, the estimated probability that it is accepted if all before it are."""

    token_ids: list[int]
    chances: list[float]

    def __bool__(self) -> bool:
        return bool(self.token_ids)


NO_DRAFT = Draft([], [])


class Proposer(Protocol):
    """Keeps what it needs of each sequence by `Sequence.key`, and builds it from whatever tokens it sees first: a
    sequence may come from another worker. Tokens of a sequence are only ever added."""

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        """Draft of at most `max_tokens` (>= 1) tokens; empty where nothing is expected."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has left this worker; one that was never seen, too."""
        ...
