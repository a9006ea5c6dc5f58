"""Speculation of some workers in half of the worlds: drafts that know the answer, and often err. In a quarter of these
worlds a model drafts, whose KV is in the same blocks.
"""

import random
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from diptych.workers.common.request import Request
from diptych.workers.core.drafting import Reserve
from diptych.workers.core.sequence import Sequence

from ..checks.sampling import VOCAB_SIZE, expected_output

if TYPE_CHECKING:
    from ..machines.memory import SimProposer

SHARE = 0.5  # of the worlds
MODEL_SHARE = 0.25  # of these
MAX_TOKENS = 6


def speculates(seed: int) -> bool:
    return random.Random(f"drafts {seed}").random() < SHARE


def has_draft_models(seed: int) -> bool:
    return speculates(seed) and random.Random(f"layer drafts {seed}").random() < MODEL_SHARE


def draft_of(seed: int, host: str) -> str:
    """Name of the model that drafts on a host; empty: it has none."""
    if not has_draft_models(seed):
        return ""
    return random.Random(f"draft model {seed} {host}").choice(("draft", "draft", "draft", "other", ""))


class SimDrafter:
    """A Drafter. What it drafts is a function of the world's seed, the request and the position."""

    method = "sim"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._answers: dict[tuple[str, int], list[int]] = {}

    def rests(self) -> bool:
        """Return that it drafts in every step."""
        return False

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        drafts: list[list[int]] = []
        for sequence in sequences:
            drafts.append(self._draft(sequence)[:room])
            room -= len(drafts[-1])
        return drafts

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: it does not learn."""

    def measured(self, num_rows: int, seconds: float) -> None:
        """Do nothing: it does not learn."""

    def ended(self, sequence: Sequence) -> None:
        """Do nothing: it keeps nothing."""

    def _draft(self, sequence: Sequence) -> list[int]:
        start = sequence.num_output
        rng = random.Random(f"{self._seed} {sequence.request_id} {start}")
        draft = self._answer(sequence.request)[start : start + rng.randint(0, MAX_TOKENS)]
        # It may also go on after the end of the answer.
        draft += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 0, 2)))]
        return [rng.randrange(VOCAB_SIZE) if rng.random() < 0.2 else token_id for token_id in draft]

    def _answer(self, request: Request) -> list[int]:
        key = request.request_id, request.sampling.max_tokens
        if key not in self._answers:
            self._answers[key] = expected_output(request)
        return self._answers[key]


class SimModelDrafter(SimDrafter):
    """A SimDrafter whose drafts a model computes."""

    def __init__(self, seed: int, proposer: "SimProposer") -> None:
        super().__init__(seed)
        self._proposer = proposer

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        drafts = super().draft(sequences, num_rows, room, reserve)
        for i, sequence in enumerate(sequences):
            if drafts[i]:
                drafts[i] = drafts[i][: reserve(sequence, len(drafts[i]))]
            if drafts[i]:
                self._proposer.draft(sequence, drafts[i])
        return drafts

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._proposer.verified(sequence, num_accepted)

    def ended(self, sequence: Sequence) -> None:
        self._proposer.ended(sequence)
