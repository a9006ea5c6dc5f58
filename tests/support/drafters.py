"""Drafters for tests: they know the answer, and err where a seed says so."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from diptych.workers.core.draft import ModelProposer
from diptych.workers.core.drafting import Reserve
from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation.model_speculator import ModelSpeculator
from diptych.workers.testing.fake_runner import fake_next

Answer = Callable[[Sequence, int], list[int]]  # the next tokens of a sequence, at most so many


def of_fake_runner(sequence: Sequence, num_tokens: int) -> list[int]:
    ids = list(sequence.token_ids)
    for _ in range(num_tokens):
        ids.append(fake_next(ids, 1000))
    return ids[sequence.num_tokens :]


def of_outputs(outputs: Mapping[str, SequenceOf[int]]) -> Answer:
    """Answers that were made before, by the sequences' keys."""

    def answer(sequence: Sequence, num_tokens: int) -> list[int]:
        start = sequence.num_output
        return list(outputs[sequence.key][start : start + num_tokens])

    return answer


def of_cases(cases: Iterable[tuple[SequenceOf[int], SequenceOf[int]]]) -> Answer:
    """Answers that are known, by prompt."""
    answers = {tuple(prompt): list(tokens) for prompt, tokens in cases}

    def answer(sequence: Sequence, num_tokens: int) -> list[int]:
        start = sequence.num_output
        return answers[sequence.request.prompt_token_ids][start : start + num_tokens]

    return answer


@dataclass
class KnowingDrafter:
    """Drafts `num_tokens` tokens, each of which is right with the probability `chance`. A Drafter."""

    chance: float = 1.0
    num_tokens: int = 4
    answer: Answer = of_fake_runner
    method: str = "knowing"
    counts: Counter[str] = field(default_factory=Counter[str])
    measured_rows: list[int] = field(default_factory=list[int])
    gone: list[Sequence] = field(default_factory=list[Sequence])

    def rests(self) -> bool:
        return False

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        assert num_rows >= len(sequences) and room > 0
        drafts: list[list[int]] = []
        for sequence in sequences:
            assert sequence.num_uncomputed == 1
            drafts.append(self._draft(sequence, min(self.num_tokens, room)))
            room -= len(drafts[-1])
        return drafts

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        self.counts["drafted"] += num_drafted
        self.counts["accepted"] += num_accepted

    def measured(self, num_rows: int, seconds: float) -> None:
        self.measured_rows.append(num_rows)

    def ended(self, sequence: Sequence) -> None:
        self.gone.append(sequence)

    def _draft(self, sequence: Sequence, num_tokens: int) -> list[int]:
        draft: list[int] = []
        for i, right in enumerate(self.answer(sequence, num_tokens)):
            is_right = random.Random(f"{sequence.key} {sequence.num_tokens + i}").random() < self.chance
            draft.append(right if is_right else (right + 1) % 7)
        return draft


class FreeRows(ModelSpeculator):
    """Drafter that takes all steps to be equally slow, and passes to be free, so that drafts of a model pay, also on a
    machine that has other work."""

    def measured(self, num_rows: int, seconds: float) -> None:
        super().measured(num_rows, 1.0)

    def _pass_s(self, most: int, step_s: float) -> list[float]:
        return [0.0] * (most + 1)


@dataclass
class EveryDraft:
    """Drafts `depth` tokens of every sequence in every step, by a model, whatever that costs and yields: what is
    drafted depends on nothing but the texts. A Drafter."""

    method: str
    proposer: ModelProposer
    depth: int = 4

    def rests(self) -> bool:
        return False

    def draft(self, sequences: SequenceOf[Sequence], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        wanted: dict[int, int] = {}
        for i, sequence in enumerate(sequences):
            depth = min(self.depth, room - sum(wanted.values()))
            if depth > 0 and self.proposer.may_draft(sequence) and (fitting := reserve(sequence, depth)) > 0:
                wanted[i] = fitting
        if wanted:
            made = self.proposer.propose([(sequences[i], depth) for i, depth in wanted.items()])
            for i, draft in zip(wanted, made.drafts, strict=True):
                drafts[i] = draft.token_ids
        return drafts

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.proposer.verified(sequence, num_accepted)

    def measured(self, num_rows: int, seconds: float) -> None:
        return

    def ended(self, sequence: Sequence) -> None:
        self.proposer.ended(sequence)
