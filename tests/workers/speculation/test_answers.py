"""Earlier answers: never more than the bound, the oldest forgotten first, each tenant's apart."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.speculation.answers import BOUNDARY, SHORTEST, AnswerStore

ANSWERS = st.lists(st.tuples(st.sampled_from([b"", b"a", b"b"]), st.lists(st.integers(0, 3), max_size=30)), max_size=20)


@given(ANSWERS, st.integers(6, 60))
def test_the_newest_answers_are_kept_within_the_bound(answers: list[tuple[bytes, list[int]]], bound: int) -> None:
    store, kept = AnswerStore(bound), deque[tuple[bytes, list[int]]]()
    for salt, ids in answers:
        store.add(salt, ids)
        if len(ids) >= SHORTEST:
            kept.append((salt, ids[-(bound - 1) :]))
        while sum(len(each) + 1 for _, each in kept) > bound:
            kept.popleft()
        assert store.num_tokens == sum(len(each) + 1 for _, each in kept) <= bound
        for tenant in (b"", b"a", b"b"):
            text = [token_id for other, each in kept if other == tenant for token_id in (*each, BOUNDARY)]
            found = store.of(tenant)
            assert list(found.text if found else []) == text
            for at in range(3, len(text)):
                places = [p for p in range(len(text), 2, -1) if text[p - 3 : p] == text[at - 3 : at]]
                assert found
                assert found.trigrams.find(text[at - 3 : at], 1000) == places
