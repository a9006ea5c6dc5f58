"""Lengths of drafts against every choice that there is."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.speculation.lengths import MARGIN, choose_lengths

CHANCES = st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=3)
COSTS = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=13)


def goodput(chances: list[list[float]], lengths: list[int], num_rows: int, seconds: list[float]) -> float:
    gain = sum(math.prod(each[: j + 1]) for each, n in zip(chances, lengths, strict=True) for j in range(n))
    return (num_rows + gain) / seconds[sum(lengths)]


def curve(increments: list[float]) -> list[float]:
    return list(itertools.accumulate(increments, initial=1.0))


@given(CHANCES, st.integers(1, 8), COSTS)
def test_no_other_lengths_yield_more(chances: list[list[float]], num_rows: int, increments: list[float]) -> None:
    seconds = curve(increments)
    lengths = choose_lengths(chances, num_rows, seconds)
    assert sum(lengths) < len(seconds)
    assert all(0 <= length <= len(each) for length, each in zip(lengths, chances, strict=True))
    chosen = goodput(chances, lengths, num_rows, seconds)
    choices = itertools.product(*(range(len(each) + 1) for each in chances))
    best = max(goodput(chances, list(c), num_rows, seconds) for c in choices if sum(c) < len(seconds))
    nothing = num_rows / seconds[0]
    assert chosen >= nothing
    assert chosen == pytest.approx(best) or (not any(lengths) and best <= (1 + MARGIN) * nothing * (1 + 1e-9))


@given(CHANCES, st.floats(0.5, 1.0), st.integers(1, 8), st.floats(0.01, 0.5))
def test_drafts_do_not_grow_when_fewer_are_accepted(chances, factor, num_rows, slope) -> None:
    """With lines as costs: with stairs, fewer tokens that are surer can make room for others."""
    seconds = [1 + slope * i for i in range(13)]
    lower = [[factor * chance for chance in each] for each in chances]
    assert sum(choose_lengths(lower, num_rows, seconds)) <= sum(choose_lengths(chances, num_rows, seconds))


def test_unlikely_tokens_are_left_out() -> None:
    free = [1.0] * 9
    assert choose_lengths([[0.5] * 4, [0.9] * 4], 2, free) == [4, 4]
    assert choose_lengths([[0.5] * 4, [0.9] * 4], 2, free, min_accept=0.2) == [2, 4]
    assert choose_lengths([[0.1, 1.0]], 2, free, min_accept=0.2) == [0]


def test_a_growing_batch_drafts_less_and_less_and_then_nothing() -> None:
    """Seconds of a machine that reads for as long as it computes 32 rows."""
    totals: list[float] = []
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128):
        seconds = [max(1 + 0.001 * rows, rows / 32) for rows in range(num_rows, 9 * num_rows + 1)]
        totals.append(sum(choose_lengths([[0.7] * 8] * num_rows, num_rows, seconds)) / num_rows)
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 8
    assert 1 <= totals[3] <= 4
    assert totals[-2:] == [0, 0]
