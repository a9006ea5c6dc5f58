"""SyntheticProposer: drafts the token that will be accepted, with a set probability. For benchmarks and simulation.

Whether the token at a position is drafted rightly depends on (seed, position, the request's seed) alone, so that a run
can be repeated and each position is an independent trial.
"""

from collections.abc import Callable
from hashlib import blake2b

from ..core.draft import Draft
from ..core.sequence import Sequence


class SyntheticProposer:
    """`target` gives the true next tokens of a sequence, at most so many; `chance`, what drafts say of themselves
    (None: the truth, `acceptance`)."""

    def __init__(
        self,
        target: Callable[[Sequence, int], list[int]],
        acceptance: float,
        seed: int = 0,
        chance: float | None = None,
    ) -> None:
        assert 0.0 <= acceptance <= 1.0
        self._target = target
        self._acceptance = acceptance
        self._seed = seed
        self._chance = acceptance if chance is None else chance

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        draft: list[int] = []
        for position, token_id in enumerate(self._target(sequence, max_tokens), sequence.num_tokens):
            is_right = uniform(self._seed, position, sequence.request.sampling.seed) < self._acceptance
            draft.append(token_id if is_right else another(token_id))
        return Draft(draft, [self._chance] * len(draft))

    def ended(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""


def another(token_id: int) -> int:
    """Return a token that is not this one, of any vocabulary of two or more."""
    return token_id - 1 if token_id else 1


def uniform(seed: int, position: int, request_seed: int) -> float:
    """Make a number in [0, 1) of the three."""
    digest = blake2b(b"%d/%d/%d" % (seed, position, request_seed), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
