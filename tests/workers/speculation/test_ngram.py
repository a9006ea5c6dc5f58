"""Prompt lookup against a search through the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.speculation import ngram, occurrences
from diptych.workers.speculation.ngram import LONGEST, SHORTEST, NgramProposer, copied

from ...support.sequences import make_sequence

TOKENS = st.integers(0, 2)


def looked_up(ids: list[int], num_tokens: int) -> list[int]:
    """Draft by search: the tokens after the newest earlier occurrence of the longest n-gram that has one."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(ids) - 1, n - 1, -1):
            if len(ids) > n and ids[place - n : place] == ids[-n:]:
                return copied(ids, place, num_tokens)
    return []


@given(st.lists(TOKENS, min_size=1, max_size=24), st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6))
def test_drafts_are_those_of_a_search_where_places_are_few(prompt: list[int], steps: list[list[int]]) -> None:
    proposer, sequence = NgramProposer(), make_sequence(prompt)
    for step in [[], *steps]:
        sequence.token_ids += step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ngram, "MOST_PLACES", 100)
            draft = proposer.propose(sequence, 4)
        assert draft.token_ids == looked_up(sequence.token_ids, 4)
        assert len(draft.chances) == len(draft.token_ids)
        assert all(0 < chance <= 1 for chance in draft.chances)


@given(st.lists(TOKENS, min_size=1, max_size=300), st.integers(1, 16))
def test_a_draft_continues_an_earlier_occurrence(ids: list[int], num_tokens: int) -> None:
    draft = NgramProposer().propose(make_sequence(ids), num_tokens)
    whole = ids + draft.token_ids
    if draft:
        assert len(draft.token_ids) == num_tokens
        assert any(
            whole[place : place + num_tokens] == draft.token_ids and ids[place - 2 : place] == ids[-2:]
            for place in range(2, len(ids))
        )


def test_longer_matches_are_surer_and_so_are_later_tokens() -> None:
    short = NgramProposer().propose(make_sequence([1, 2, 9, 8, 7, 1, 2]), 4)
    long = NgramProposer().propose(make_sequence([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5]), 4)
    assert (short.token_ids, long.token_ids) == ([9, 8, 7, 1], [9, 1, 2, 3])
    assert short.chances == sorted(short.chances)
    assert all(a < b for a, b in zip(short.chances, long.chances, strict=True))


def test_a_loop_is_drafted_whole() -> None:
    assert NgramProposer().propose(make_sequence([5, 6, 7, 6, 7, 6, 7]), 6).token_ids == [6, 7, 6, 7, 6, 7]


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occurrences, "MOST_INDEXED", 64)
    proposer, sequence = NgramProposer(), make_sequence([*range(100, 200), 1, 2, 3, *range(300, 350), 1, 2])
    assert [proposer.propose(sequence, 2).token_ids for _ in range(3)] == [[], [], [3, 300]]


def test_a_sequence_that_ended_is_forgotten() -> None:
    proposer, sequence = NgramProposer(), make_sequence([1, 2, 3, 1, 2])
    assert proposer.propose(sequence, 1).token_ids == [3]
    proposer.ended(sequence)
    again = make_sequence([4, 5, 6, 4, 5])
    again.key = sequence.key
    assert proposer.propose(again, 1).token_ids == [6]
    proposer.ended(make_sequence([1]))
