"""Drafts from a predicted text, which the answer follows, leaves and returns to."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation.methods import make_speculator
from diptych.workers.speculation.predicted import PredictedProposer

from ...support.sequences import make_sequence

PREDICTION = tuple(range(10, 40))


def predicted(prediction: tuple[int, ...] = PREDICTION) -> Sequence:
    sequence = make_sequence([1, 2, 10])
    sequence.request = dataclasses.replace(sequence.request, prediction=prediction)
    return sequence


def drafted(*answer: int) -> list[int]:
    sequence = predicted()
    sequence.token_ids += answer
    return PredictedProposer().propose(sequence, 3).token_ids


def test_an_answer_is_expected_to_follow_its_prediction() -> None:
    assert drafted() == [10, 11, 12]
    assert drafted(10, 11) == [12, 13, 14]
    assert drafted(*PREDICTION[:-1]) == [39]
    assert drafted(*PREDICTION) == []


def test_an_answer_that_left_its_prediction_is_found_ahead_again() -> None:
    assert drafted(10, 11, 99) == []
    assert drafted(10, 11, 99, 13) == []
    assert drafted(10, 11, 99, 13, 14) == [15, 16, 17]
    assert drafted(10, 20, 21) == [22, 23, 24]  # a part is left out
    assert drafted(99, 10, 11) == [12, 13, 14]  # a part is put before


def test_the_nearest_place_ahead_is_taken() -> None:
    sequence = predicted((1, 2, 3, 8, 9, 4, 8, 9, 5, 8, 9, 6))
    sequence.token_ids += [1, 2, 3, 8, 9, 7, 8, 9]
    assert PredictedProposer().propose(sequence, 2).token_ids == [5, 8]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.data())
def test_the_place_depends_on_the_answer_alone_however_it_came(prediction, answer, data) -> None:
    proposer, sequence = PredictedProposer(), predicted(tuple(prediction))
    while answer:
        size = data.draw(st.integers(1, len(answer)))
        sequence.token_ids += answer[:size]
        answer = answer[size:]
        draft = proposer.propose(sequence, 4)
    at_once = PredictedProposer().propose(sequence, 4)
    draft = proposer.propose(sequence, 4)
    assert draft == at_once
    assert all(0 < chance < 1 for chance in draft.chances)
    assert any(prediction[i : i + len(draft.token_ids)] == draft.token_ids for i in range(len(prediction) + 1))


def test_a_prediction_is_asked_first_and_then_the_method() -> None:
    speculator = make_speculator("ngram", 4)
    speculator.measured(1, 0.01)
    sequence = predicted()
    sequence.token_ids += [10, 11]
    assert speculator.draft([sequence], 1, 8) == [[12, 13, 14, 15]]
    speculator.verified(sequence, 4, 0)
    sequence.token_ids += [1, 2]
    assert speculator.draft([sequence], 1, 8) == [[10, 10, 11, 1]]  # of the prompt
    speculator.verified(sequence, 4, 0)
    speculator.ended(sequence)
    assert not speculator._predicted.proposer._places
