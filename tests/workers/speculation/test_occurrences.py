"""Places of n-grams against a search through the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.speculation.occurrences import LONG, Occurrences

TEXTS = st.lists(st.integers(0, 3) | st.integers(0, (1 << 21) - 1), max_size=3 * LONG)


def places_of(ids: list[int], last: list[int], end: int) -> list[int]:
    """All places of an n-gram up to `end`, newest first."""
    order = len(last)
    return [place for place in range(end, order - 1, -1) if ids[place - order : place] == last]


@given(TEXTS, st.integers(1, 3), st.lists(st.integers(1, 2 * LONG), max_size=8), st.randoms(use_true_random=False))
def test_all_places_are_found_newest_first_however_the_text_grew(ids, order, pieces, rng) -> None:
    occurrences, end = Occurrences(order), 0
    for piece in pieces:
        end = min(end + piece, len(ids))
        occurrences.extend(ids, end)
    if len(ids) < order:
        return
    at = rng.randint(order, len(ids))
    last = ids[at - order : at]
    assert occurrences.find(last, len(ids)) == places_of(ids, last, end)
    assert occurrences.find(last, 2) == places_of(ids, last, end)[:2]


def test_ids_of_more_bits_than_a_key_has_are_found_among_others() -> None:
    ids = [1 << 30, 5, (1 << 30) + 1, 5] * LONG
    for step in (1, len(ids)):
        occurrences = Occurrences(3)
        for end in range(0, len(ids) + 1, step):
            occurrences.extend(ids, end)
        assert set(places_of(ids, ids[:3], len(ids))) <= set(occurrences.find(ids[:3], len(ids)))
