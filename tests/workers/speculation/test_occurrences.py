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


@given(TEXTS, st.integers(1, 3), st.integers(0, LONG), st.booleans())
def test_a_text_that_was_cut_is_as_one_that_begins_there(ids: list[int], order: int, num_cut: int, late: bool) -> None:
    num_cut = min(num_cut, len(ids))
    end = max(num_cut, len(ids) // 2) if late else len(ids)
    occurrences = Occurrences(order)
    occurrences.extend(ids, end)
    occurrences.cut(ids, num_cut)
    rest = ids[num_cut:]
    occurrences.extend(rest, len(rest))
    for at in range(order, len(rest) + 1):
        last = rest[at - order : at]
        assert occurrences.find(last, len(ids)) == places_of(rest, last, len(rest))
    assert len(occurrences._newest) == len({tuple(rest[i : i + order]) for i in range(len(rest) - order + 1)})
