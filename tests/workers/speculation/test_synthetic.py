"""The synthetic proposer is right as often as it is told to be, and the same again."""

import pytest

from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation.synthetic import SyntheticProposer, another

from ...support.sequences import make_sequence


def target(sequence: Sequence, num_tokens: int) -> list[int]:
    return [(sequence.num_tokens + i) % 7 for i in range(num_tokens)]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 1.0])
def test_the_set_share_of_tokens_is_right(acceptance: float) -> None:
    draft = SyntheticProposer(target, acceptance, seed=3).propose(make_sequence([1, 2]), 4000)
    right = [token_id == (2 + i) % 7 for i, token_id in enumerate(draft.token_ids)]
    assert sum(right) / len(right) == pytest.approx(acceptance, abs=0.03)
    assert draft.chances == [acceptance] * 4000


def test_a_position_is_drafted_alike_wherever_a_draft_begins() -> None:
    proposer, sequence = SyntheticProposer(target, 0.5, seed=3), make_sequence([1, 2])
    whole = proposer.propose(sequence, 12).token_ids
    sequence.token_ids += [2, 3, 4]
    assert proposer.propose(sequence, 9).token_ids == whole[3:]
    assert SyntheticProposer(target, 0.5, seed=4).propose(sequence, 9).token_ids != whole[3:]


def test_another_token_is_of_the_smallest_vocabulary() -> None:
    assert [another(token_id) for token_id in (0, 1, 5)] == [1, 0, 4]
