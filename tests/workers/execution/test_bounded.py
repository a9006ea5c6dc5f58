"""Which decodes are sparse, and for which tokens of a sequence the bounds of its blocks stand."""

import pytest

from diptych.workers.core.decoding import is_sparse
from diptych.workers.core.sequence import NEVER, ScheduledSequence, Sequence
from diptych.workers.execution.common.bounded import FULL, Bounded

from ...support.sequences import make_sequence

BLOCK, BUDGET = 4, 16


def decoding(num_tokens: int, num_prompt: int = 3) -> Sequence:
    """A sequence of so many tokens, of which the last has no KV yet."""
    sequence = make_sequence(list(range(1, num_prompt + 1)), max_tokens=500)
    sequence.token_ids += [7] * (num_tokens - num_prompt)
    sequence.num_computed, sequence.sparse_from = num_tokens - 1, BUDGET
    sequence.block_table = list(range(100, 100 + num_tokens // BLOCK + 1))
    return sequence


def step(bounded: Bounded, *sequences: Sequence, num_new: int = 1) -> list[int]:
    """Compute a step of these, and record it."""
    found = bounded.tokens([ScheduledSequence(sequence, num_new) for sequence in sequences])
    for sequence in sequences:
        sequence.num_computed += num_new
        sequence.token_ids.append(7)
        if sequence.num_tokens > len(sequence.block_table) * BLOCK:
            sequence.block_table.append(len(sequence.block_table) + 100)
    return found


@pytest.mark.parametrize(("num_tokens", "expected"), [(15, False), (16, False), (17, True), (40, True)])
def test_a_context_that_is_longer_than_the_budget_is_sparse(num_tokens: int, expected: bool) -> None:
    entry = ScheduledSequence(decoding(num_tokens), 1)
    assert is_sparse(entry) is expected
    entry.sequence.sparse_from = NEVER
    assert not is_sparse(entry)


def test_prompts_and_runs_are_not() -> None:
    prompt = make_sequence(list(range(1, 31)))
    prompt.num_computed, prompt.sparse_from = 29, BUDGET
    assert not is_sparse(ScheduledSequence(prompt, 1))
    sequence = decoding(30)
    sequence.num_computed, sequence.run_length = 27, 3
    assert not is_sparse(ScheduledSequence(sequence, 3))
    assert Bounded(BUDGET, BLOCK).tokens([ScheduledSequence(prompt, 1), ScheduledSequence(sequence, 3)]) == [FULL] * 2


def test_none_is_counted_without_a_budget() -> None:
    assert Bounded(0, BLOCK).tokens([ScheduledSequence(decoding(40), 1)]) == []


def test_each_sequence_says_itself_whether_it_is_sparse() -> None:
    bounded, sequences = Bounded(BUDGET, BLOCK), [decoding(20), decoding(20)]
    sequences[0].sparse_from = NEVER
    assert step(bounded, *sequences) == [FULL, 0]  # and fills a block
    entries = [ScheduledSequence(sequence, 1) for sequence in sequences]
    assert bounded.tokens(entries, [0, 1]) == [FULL, 16]


def test_each_step_extends_what_the_one_before_left() -> None:
    """A block that has filled is read anew: it may be replaced in the table once the step is recorded."""
    bounded, sequence = Bounded(BUDGET, BLOCK), decoding(17)
    assert [step(bounded, sequence)[0] for _ in range(9)] == [0, 17, 18, 19, 16, 21, 22, 23, 20]


def test_a_context_reaches_the_budget_while_it_decodes() -> None:
    bounded, sequence = Bounded(BUDGET, BLOCK), decoding(15)
    assert [step(bounded, sequence)[0] for _ in range(4)] == [FULL, FULL, 0, 17]


def test_tokens_that_a_run_computed_are_extended_to_later() -> None:
    bounded, sequence = Bounded(BUDGET, BLOCK), decoding(18)
    assert step(bounded, sequence) == [0]
    sequence.num_computed += 5
    sequence.token_ids += [7] * 5
    assert step(bounded, sequence) == [18]


def test_another_table_is_read_from_its_beginning() -> None:
    bounded, sequence, other = Bounded(BUDGET, BLOCK), decoding(30), decoding(21)
    assert step(bounded, sequence, other) == [0, 0]
    assert step(bounded, sequence, other) == [30, 21]
    sequence.block_table = [*sequence.block_table]  # an equal one
    assert step(bounded, sequence, other) == [0, 22]


def test_a_step_that_was_not_computed_extended_nothing() -> None:
    bounded, sequence = Bounded(BUDGET, BLOCK), decoding(30)
    step(bounded, sequence)
    entries = [ScheduledSequence(sequence, 1)]
    assert bounded.tokens(entries) == [30]
    assert bounded.tokens(entries) == [0]


def test_a_step_that_is_prepared_before_the_last_one_is_recorded() -> None:
    """Its context has the token that the last one yields. A block that that one fills may still be replaced."""
    bounded, sequence = Bounded(BUDGET, BLOCK), decoding(18)
    found = bounded.tokens([ScheduledSequence(sequence, 1)])
    for _ in range(6):
        found += bounded.tokens([ScheduledSequence(sequence, 1)], [0])
        sequence.num_computed += 1
        sequence.token_ids.append(7)
    assert found == [0, 18, 19, 16, 16, 22, 23]


def test_sequences_that_are_gone_are_forgotten() -> None:
    bounded = Bounded(BUDGET, BLOCK)
    first = decoding(30)
    step(bounded, first)
    for _ in range(100):
        step(bounded, decoding(30))
    assert len(bounded._known) < 80
    assert step(bounded, first) == [0]
