"""Acceptance: what share of one proposer's drafts is accepted, learnt from those that were verified. Pure.

A proposer says how sure it is of each token. Two corrections make a probability of that:

    chance = rate(what it said) · (1 + accepted) / (1 + expected)

`rate` is the measured share of accepted tokens among all that it was about as sure of, of every sequence, so a new
sequence starts from what is usual (at first `PRIOR_TRIALS` tokens count that were accepted as it said). The factor
compares one sequence with that. Older tokens count less in all four sums. A token counts as tried when all before it
were accepted, so each of these is a conditional probability, whatever the lengths of drafts.

A sequence whose chance is too small for a draft is tried again after some tokens (`is_due`): twice as many after each
failure, few after a success.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

NUM_CLASSES = 16  # of what a proposer says
PRIOR_TRIALS = 8.0
FADE = 1 - 1 / 256  # of the sums of all sequences, a tried token
SEQUENCE_FADE = 1 - 1 / 24  # of one sequence's
MAX_CHANCE = 0.98
SHORTEST_WAIT, LONGEST_WAIT = 4, 256  # tokens until a sequence is tried again


@dataclass(slots=True)
class _Record:
    """One sequence: faded sums over its tried tokens."""

    accepted: float = 0.0
    expected: float = 0.0
    factor: float = 1.0
    wait: int = SHORTEST_WAIT  # tokens
    due: int = 0  # number of its tokens at which it is tried again

    def add(self, expected: float, *, accepted: bool) -> None:
        self.accepted = self.accepted * SEQUENCE_FADE + accepted
        self.expected = self.expected * SEQUENCE_FADE + expected
        self.factor = (1 + self.accepted) / (1 + self.expected)


class Acceptance:
    def __init__(self) -> None:
        self._rates = [_prior(i) for i in range(NUM_CLASSES)]
        self._trials = [PRIOR_TRIALS] * NUM_CLASSES
        self._accepted = [PRIOR_TRIALS * rate for rate in self._rates]
        self._seen: set[int] = set()  # classes
        self._best_rate = _prior(NUM_CLASSES - 1)
        self._records: dict[str, _Record] = {}

    def best_chance(self, key: str) -> float:
        """The most that any token drafted for this sequence can be expected to be accepted with."""
        record = self._records.get(key)
        return min(MAX_CHANCE, self._best_rate * record.factor) if record else self._best_rate

    def chances(self, key: str, said: SequenceOf[float]) -> list[float]:
        """Probabilities that tokens are accepted, each if those before it are, of what their proposer said."""
        record = self._records.get(key)
        factor = record.factor if record else 1.0
        rates = self._rates
        found = [rates[int(each * NUM_CLASSES) if each < 1 else -1] * factor for each in said]
        return [each if each < MAX_CHANCE else MAX_CHANCE for each in found]

    def is_due(self, key: str, num_tokens: int) -> bool:
        """Return whether a sequence that has so many tokens by now may be tried again."""
        record = self._records.get(key)
        return record is None or num_tokens >= record.due

    def add(self, key: str, num_tokens: int, said: SequenceOf[float], num_accepted: int) -> None:
        """Add a verified draft. num_tokens: of the sequence, by now; said: of each drafted token."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record()
        for i, each in enumerate(said[: num_accepted + 1]):
            kind = int(each * NUM_CLASSES) if each < 1 else NUM_CLASSES - 1
            record.add(self._rates[kind], accepted=i < num_accepted)
            self._add(kind, accepted=i < num_accepted)
        self._best_rate = max(self._rates[kind] for kind in self._seen)
        record.wait = SHORTEST_WAIT if num_accepted else min(2 * record.wait, LONGEST_WAIT)
        record.due = num_tokens + record.wait

    def ended(self, key: str) -> None:
        self._records.pop(key, None)

    def _add(self, kind: int, *, accepted: bool) -> None:
        self._trials[kind] = self._trials[kind] * FADE + 1
        self._accepted[kind] = self._accepted[kind] * FADE + accepted
        self._rates[kind] = self._accepted[kind] / self._trials[kind]
        self._seen.add(kind)


def _prior(kind: int) -> float:
    """Chance that its proposer gives a token of this class: the middle."""
    return (kind + 0.5) / NUM_CLASSES
