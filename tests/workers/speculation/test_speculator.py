"""Drafts in a closed loop: virtual steps of a known cost, which accept with a set probability."""

import dataclasses
from collections.abc import Callable

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation.methods import make_speculator
from diptych.workers.speculation.speculator import FRUITLESS, Speculator
from diptych.workers.speculation.synthetic import SyntheticProposer

from ...support.sequences import make_sequence

MAX_TOKENS = 8
CURVES: dict[str, Callable[[int], float]] = {
    "reads, then computes": lambda rows: max(1 + 0.01 * rows, 0.2 + rows / 24),
    "a row is half of a step": lambda rows: 1 + 0.5 * rows,
    "rows are nearly free": lambda rows: 1 + 0.002 * rows,
    "eight rows at a time": lambda rows: 1 + 0.3 * ((rows - 1) // 8),
}


def token_at(position: int) -> int:
    return position * 7919 % 50021


def target(sequence: Sequence, num_tokens: int) -> list[int]:
    return [token_at(sequence.num_tokens + i) for i in range(num_tokens)]


def sequences_of(batch: int) -> list[Sequence]:
    sequences = [make_sequence([1, 2, 3], max_tokens=1 << 30) for _ in range(batch)]
    for i, each in enumerate(sequences):
        sampling = dataclasses.replace(each.request.sampling, seed=i)
        each.request = dataclasses.replace(each.request, sampling=sampling)
    return sequences


class Loop:
    """Steps of a batch in virtual time."""

    def __init__(self, batch: int, acceptance: float, cost: Callable[[int], float]) -> None:
        self.sequences, self.cost = sequences_of(batch), cost
        self.speculator = Speculator("synthetic", SyntheticProposer(target, acceptance, seed=1, chance=0.7), MAX_TOKENS)
        self.seconds, self.num_drafted, self.num_accepted = 0.0, 0, 0

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens - each.num_prompt for each in self.sequences)

    def set_acceptance(self, acceptance: float) -> None:
        self.speculator._method.proposer = SyntheticProposer(target, acceptance, seed=1, chance=0.7)

    def run(self, num_steps: int) -> float:
        """Tokens per second of these steps."""
        seconds, num_tokens = self.seconds, self.num_tokens
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - num_tokens) / (self.seconds - seconds)

    def step(self) -> None:
        batch = len(self.sequences)
        drafts = self.speculator.draft(self.sequences, batch, 1 << 16)
        num_rows = batch + sum(map(len, drafts))
        for sequence, draft in zip(self.sequences, drafts, strict=True):
            assert len(draft) <= MAX_TOKENS
            num_accepted = 0
            for token_id in draft:
                if token_id != token_at(sequence.num_tokens):
                    break
                sequence.token_ids.append(token_id)
                num_accepted += 1
            sequence.token_ids.append(token_at(sequence.num_tokens))
            self.speculator.verified(sequence, len(draft), num_accepted)
            self.num_accepted += num_accepted
        self.num_drafted += num_rows - batch
        self.seconds += self.cost(num_rows)
        self.speculator.measured(num_rows, self.cost(num_rows))


def fixed(batch: int, acceptance: float, cost: Callable[[int], float], k: int) -> float:
    """Tokens per second where each sequence drafts k tokens."""
    return batch * sum(acceptance**i for i in range(k + 1)) / cost(batch * (1 + k))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_never_much_slower_than_nothing_and_about_as_fast_as_the_best_fixed_length(curve, batch, acceptance) -> None:
    cost = CURVES[curve]
    rate = Loop(batch, acceptance, cost).run(200 if batch == 64 else 600)
    assert rate >= 0.97 * fixed(batch, acceptance, cost, 0)
    assert rate >= 0.9 * max(fixed(batch, acceptance, cost, k) for k in range(MAX_TOKENS + 1))


def test_never_much_slower_on_sequences_so_short_that_little_is_learnt_of_each() -> None:
    cost, batch = CURVES["reads, then computes"], 4
    loop = Loop(batch, 0.0, cost)
    for _ in range(30):
        loop.run(20)
        for each in loop.sequences:
            loop.speculator.ended(each)
        loop.sequences = sequences_of(batch)
    assert batch * 600 / loop.seconds >= 0.97 * fixed(batch, 0.0, cost, 0)


@pytest.mark.parametrize("batch", [1, 4])
def test_sequences_that_come_are_looked_at_before_a_rest_is_over(batch: int) -> None:
    # Steps so short that a decision against drafts is followed by a rest of 20 steps and more.
    loop = Loop(batch, 0.0, lambda rows: 1e-4 * (1 + 0.5 * rows))
    loop.run(200)
    speculator = loop.speculator
    while not speculator.rests():
        loop.step()
    for each in loop.sequences[:-1]:
        speculator.ended(each)
        assert speculator.rests()
    speculator.ended(loop.sequences[-1])
    assert not speculator.rests()


def test_drafts_that_begin_to_be_accepted_are_found_out() -> None:
    cost = CURVES["reads, then computes"]
    loop = Loop(2, 0.0, cost)
    loop.run(400)
    loop.num_drafted = 0
    loop.run(400)
    assert 0 < loop.num_drafted < 0.05 * 2 * 400
    loop.set_acceptance(0.9)
    loop.run(1500)
    assert loop.run(200) >= 0.9 * max(fixed(2, 0.9, cost, k) for k in range(MAX_TOKENS + 1))
    loop.set_acceptance(0.0)
    loop.run(100)
    assert loop.run(200) >= 0.97 * fixed(2, 0.0, cost, 0)


def test_a_batch_that_shrinks_drafts_again() -> None:
    cost = CURVES["reads, then computes"]
    loop = Loop(64, 0.9, cost)
    loop.run(200)
    before = loop.num_drafted
    loop.run(100)
    assert loop.num_drafted - before <= 0.02 * 64 * 100
    loop.sequences = loop.sequences[:1]
    loop.run(50)
    assert loop.run(100) >= 0.9 * max(fixed(1, 0.9, cost, k) for k in range(MAX_TOKENS + 1))


def test_room_and_least_acceptance_bound_what_is_drafted() -> None:
    sequences, proposer = sequences_of(4), SyntheticProposer(target, 1.0)
    for min_accept, room, most in ((0.0, 3, 3), (0.0, 0, 0), (0.99, 100, 0)):
        speculator = Speculator("synthetic", proposer, MAX_TOKENS, min_accept)
        for _ in range(10):
            speculator.measured(4, 0.01)
            num_drafted = sum(map(len, speculator.draft(sequences, 4, room)))
            assert num_drafted <= most
        assert num_drafted == most


def test_the_first_step_of_a_batch_smaller_than_any_is_measured_without_drafts() -> None:
    speculator, sequences = Speculator("synthetic", SyntheticProposer(target, 1.0), MAX_TOKENS), sequences_of(4)
    assert not any(speculator.draft(sequences, 4, 100))
    speculator.measured(4, 0.01)
    assert any(speculator.draft(sequences, 4, 100))
    assert not any(speculator.draft(sequences[:2], 2, 100))
    speculator.measured(2, 0.01)
    assert any(speculator.draft(sequences[:2], 2, 100))


@pytest.mark.parametrize(("step_s", "num_rests", "num_later"), [(3e-4, 33, 33), (6e-3, 1, 6), (3e-2, 0, 0)])
def test_decisions_against_drafts_are_as_rare_as_steps_are_short(step_s: float, num_rests: int, num_later: int) -> None:
    """Deciding takes 100 us and may take 1 % of the time, and a quarter of that after several that gave nothing."""
    speculator, (sequence,) = make_speculator("ngram", MAX_TOKENS), sequences_of(1)
    speculator.measured(1, step_s)
    rests: list[int] = []
    for _ in range(2 * FRUITLESS):
        assert speculator.draft([sequence], 1, 100) == [[]]
        rests.append(0)
        while speculator.rests():
            rests[-1] += 1
            sequence.token_ids.append(100 + len(sequence.token_ids))
        sequence.token_ids.append(100 + len(sequence.token_ids))
    assert rests == [num_rests] * FRUITLESS + [num_later] * FRUITLESS


def test_drafts_that_do_not_pay_for_the_decision_are_not_made() -> None:
    """Rows are free, and a token is right once in five: a third of a step is too much for that, a hundredth is not."""
    for step_s, drafts in ((3e-4, False), (1e-2, True)):
        speculator, (sequence,) = Speculator("synthetic", SyntheticProposer(target, 0.2), 1), sequences_of(1)
        for rows in (1, 2) * 8:
            speculator.measured(rows, step_s)
        speculator._saved = -1.0  # nothing is tried
        speculator._method.acceptance.add(sequence.key, sequence.num_tokens, [0.2], 0)
        speculator._method.acceptance.ended(sequence.key)
        assert bool(speculator.draft([sequence], 1, 100)[0]) == drafts


def test_a_first_step_that_was_slow_does_not_make_rows_free_for_long() -> None:
    """The first step finds nothing in caches: 15 % longer, where one drafted token takes 9 %, and none is accepted."""
    times = [1.15 if i == 0 else 1.0 for i in range(400)]
    loop = Loop(1, 0.0, lambda rows: times[0] * (1 + 0.09 * (rows - 1)))
    for _ in range(400):
        loop.step()
        del times[0]
        times.append(1.0)
    assert loop.num_drafted <= 40


def test_a_draft_that_was_shortened_is_learnt_from_as_far_as_it_went() -> None:
    speculator, (sequence,) = Speculator("synthetic", SyntheticProposer(target, 1.0), MAX_TOKENS), sequences_of(1)
    for _ in range(8):  # often enough that it need not be soon again
        speculator.measured(1, 0.01)
    for _ in range(20):
        assert len(speculator.draft([sequence], 1, 100)[0]) > 2
        speculator.verified(sequence, 2, 2)
        speculator.measured(3, 0.01)
    assert len(speculator.draft([sequence], 1, 100)[0]) > 2
    speculator.verified(sequence, 0, 0)


def test_a_sequence_that_ended_leaves_nothing() -> None:
    speculator, sequence = make_speculator("ngram", MAX_TOKENS), make_sequence([1, 2, 3, 1, 2])
    speculator.measured(1, 0.01)
    assert speculator.draft([sequence], 1, 100) == [[3, 1, 2, 3, 1, 2, 3, 1]]
    speculator.verified(sequence, 8, 1)
    assert speculator.draft([sequence], 1, 100)[0]
    speculator.ended(sequence)
    assert not speculator._said
    assert not speculator._method.acceptance._records


def test_an_unknown_method_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'medusa'.*ngram"):
        make_speculator("medusa", MAX_TOKENS)
