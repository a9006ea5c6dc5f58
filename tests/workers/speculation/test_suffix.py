"""Suffix decoding against a search through all texts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation import suffix
from diptych.workers.speculation.ngram import copied
from diptych.workers.speculation.suffix import ALPHA, DOUBT, LEAST_PRODUCT, LENGTHS, SuffixProposer

from ...support.sequences import make_sequence

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
LONGEST = 12  # draft


def ended(proposer: SuffixProposer, answer: list[int], salt: bytes = b"") -> None:
    """An answer of which the proposer has heard as the engine tells it."""
    sequence = make_sequence([9], salt=salt)
    proposer.propose(sequence, 1)
    sequence.token_ids += answer
    proposer.ended(sequence)


def followed(text: list[int], ids: list[int], length: int, *, own: bool) -> list[list[int]]:
    """What followed each occurrence of the last tokens, newest first."""
    last = ids[-length:]
    ends = range(len(text) - own, length - 1, -1) if len(ids) >= length + own else range(0)
    places = [place for place in ends if text[place - length : place] == last]
    return [copied(ids, place, LONGEST) if own else text[place : place + LONGEST] for place in places]


def voted(found: list[list[int]], length: int) -> list[int]:
    draft, product = list[int](), 1.0
    for i in range(min(LONGEST, ALPHA * length)):
        votes = Counter(each[i] for each in found if len(each) > i and each[:i] == draft)
        if not votes:
            break
        token_id, most = votes.most_common(1)[0]
        product *= most / (votes.total() + DOUBT / (length + i))
        if product < LEAST_PRODUCT:
            break
        draft.append(token_id)
    return draft


def searched(ids: list[int], answers: list[list[int]]) -> list[int]:
    """Draft by search through the sequence and all answers."""
    for length in reversed(LENGTHS):
        found = followed(ids, ids, length, own=True)
        if not found and length > 2:
            found = [each for answer in reversed(answers) for each in followed(answer, ids, length, own=False)]
            if not found:
                continue
        if found:
            return voted(found, length)
    return []


@given(IDS, st.lists(IDS, max_size=4), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4))
def test_drafts_are_those_of_a_search_where_places_are_few(prompt, answers, steps) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MOST_PLACES", 1000)
        patch.setattr(suffix, "MOST_VOTES", 1000)
        proposer, sequence = SuffixProposer(), make_sequence(prompt)
        for answer in answers:
            ended(proposer, answer)
        for step in [[], *steps]:
            sequence.token_ids += step
            draft = proposer.propose(sequence, LONGEST)
            kept = [answer for answer in answers if len(answer) >= 4]
            assert draft.token_ids == searched(sequence.token_ids, kept)
            assert len(draft.chances) == len(draft.token_ids)
            assert all(0 < chance <= 1 for chance in draft.chances)


@given(IDS, st.lists(st.tuples(st.booleans(), IDS), max_size=6))
def test_a_tenant_is_never_drafted_what_another_was_answered(prompt, answers) -> None:
    """All tokens of the other tenant's answers are others, except what leads to them."""
    shift = 100
    proposer, ours = SuffixProposer(), make_sequence(prompt, salt=b"ours")
    for is_ours, answer in answers:
        ended(proposer, answer if is_ours else [each + shift for each in answer], b"ours" if is_ours else b"other")
        ended(proposer, [*prompt, 1000, 1001, 1002], b"other")
    draft = proposer.propose(ours, LONGEST)
    assert all(token_id < shift for token_id in draft.token_ids)


def test_another_tenant_gets_nothing_of_what_a_tenant_gets() -> None:
    proposer, answer = SuffixProposer(), list(range(10, 30))
    ended(proposer, answer, b"a")
    drafts = {salt: proposer.propose(make_sequence([1, *answer[:5]], salt=salt), 6) for salt in (b"a", b"b", b"")}
    assert drafts[b"a"].token_ids == answer[5:11]
    assert not drafts[b"b"]
    assert not drafts[b""]


def test_the_end_of_the_same_prompt_finds_the_first_token_of_its_answer() -> None:
    prompt, answer = list(range(100, 100 + 2 * LENGTHS[-1])), list(range(10, 30))
    proposer, sequence = SuffixProposer(), make_sequence(prompt)
    proposer.propose(sequence, 1)
    sequence.token_ids += answer
    proposer.ended(sequence)
    assert proposer.propose(make_sequence(prompt), 16).token_ids == answer[:16]
    assert proposer._answers.num_tokens == LENGTHS[-1] + len(answer) + 1


def test_longer_matches_draft_more_and_are_surer() -> None:
    proposer, answer = SuffixProposer(), list(range(10, 60))
    ended(proposer, answer)
    drafts = [proposer.propose(make_sequence([1, *answer[:n]]), 16) for n in (3, 4, 8, 16)]
    assert [len(draft.token_ids) for draft in drafts] == [6, 8, 16, 16]
    firsts = [draft.chances[0] for draft in drafts]
    assert firsts == sorted(set(firsts))


def test_what_followed_most_often_is_drafted() -> None:
    proposer = SuffixProposer()
    for answer in ([1, 2, 3, 7, 8], [1, 2, 3, 7, 9], [1, 2, 3, 7, 8], [1, 2, 3, 6, 6]):
        ended(proposer, answer)
    draft = proposer.propose(make_sequence([5, 1, 2, 3]), 8)
    assert draft.token_ids == [7, 8]
    assert draft.chances[0] == pytest.approx(3 / (4 + DOUBT / 3))


def test_the_longest_of_many_occurrences_is_among_the_newest() -> None:
    ids = [4, 1, 2, 3, 5, *[6, 1, 2, 3, 7] * (suffix.MOST_PLACES - 1), 4, 1, 2, 3]
    assert SuffixProposer().propose(make_sequence(ids), 1).token_ids == [5]
    assert SuffixProposer().propose(make_sequence([6, 1, 2, 3, 7, *ids[:-4], *ids[-4:]]), 1).token_ids == [5]


def test_earlier_answers_are_bounded_and_prompts_are_not_kept_alone() -> None:
    proposer = SuffixProposer(max_tokens=64)
    for i in range(100):
        sequence: Sequence = make_sequence([7, 7, 7, 8, 9])
        proposer.propose(sequence, 1)
        sequence.token_ids += range(100 * i + 100, 100 * i + 110)
        proposer.ended(sequence)
        proposer.ended(sequence)
        assert proposer._answers.num_tokens <= 64
    assert not proposer._indexes
    assert not proposer.propose(make_sequence([7, 7, 7]), 1).token_ids[1:]
    assert proposer.propose(make_sequence([1, *range(10000, 10004)]), 2).token_ids == [10004, 10005]
    assert not proposer.propose(make_sequence([1, *range(100, 104)]), 2)
