"""The time of a step by its rows is learnt from steps, of few numbers of rows and in drifting conditions."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.speculation.row_cost import FIRST_REFRESHED, HALF_LIFE, RowCost


def stairs(rows: int) -> float:
    return 1e-2 * (1 + 0.3 * (-(-rows // 16)))


def roofline(rows: int) -> float:
    return 1e-2 * max(1 + 0.002 * rows, rows / 32)


def test_knows_a_curve_between_the_points_that_it_saw() -> None:
    cost, rng = RowCost(), random.Random(0)
    for _ in range(3000):
        rows = rng.randint(1, 128)
        cost.add(rows, roofline(rows) * rng.uniform(0.9, 1.1))
    for rows in range(1, 129):
        assert cost.seconds(rows) == pytest.approx(roofline(rows), rel=0.08)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10.0)), max_size=60), st.integers(1, 200))
def test_more_rows_never_take_less_time_and_the_table_agrees(steps: list[tuple[int, float]], first: int) -> None:
    cost = RowCost()
    for rows, seconds in steps:
        cost.add(rows, seconds)
    table = cost.table(first, 150)
    assert len(table) == 151
    assert all(b >= a * (1 - 1e-9) > 0 for a, b in itertools.pairwise(table))
    if first >= cost.least_rows:
        assert table == pytest.approx([cost.seconds(rows) for rows in range(first, first + 151)])


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_rows_that_were_never_seen_are_worth_finding_out(rows: int) -> None:
    cost = RowCost()
    cost.add(rows, 0.02)
    assert cost.least_rows == rows
    assert cost.seconds(rows) == pytest.approx(0.02)
    assert 0.0 < cost.least_gain(rows, 64) < 0.5
    assert rows < cost.reach <= 2 * rows + 8


def test_what_costs_its_share_beyond_the_known_is_expected_to_go_on_so() -> None:
    cost = RowCost()
    for rows in (32, 48, 64) * 8:
        cost.add(rows, 1e-3 * rows)
    assert cost.seconds(128) == pytest.approx(0.128, rel=0.1)
    assert cost.least_gain(64, 256) == pytest.approx(1, rel=0.1)


def test_what_slows_all_steps_slows_those_that_are_not_measured_now() -> None:
    cost = RowCost()
    for _ in range(30):
        for rows in (4, 8, 20):
            cost.add(rows, stairs(rows))
    for i in range(100):
        cost.add(20, stairs(20) * (1 + i / 100))
    assert cost.seconds(4) / cost.seconds(20) == pytest.approx(stairs(4) / stairs(20), rel=0.15)
    assert cost.seconds(20) == pytest.approx(2 * stairs(20), rel=0.1)


def test_one_slow_step_counts_little_and_is_forgotten() -> None:
    cost = RowCost()
    for _ in range(20):
        cost.add(4, 0.01)
    cost.add(8, 5.0)  # the first with so many
    assert cost.seconds(8) < 0.03
    for _ in range(5 * HALF_LIFE):
        cost.add(4, 0.01)
    assert cost.seconds(8) < 0.012
    cost.add(4, 5.0)
    assert cost.seconds(4) < 0.013


def test_times_that_cannot_be_are_ignored() -> None:
    cost = RowCost()
    for rows, seconds in ((4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf")), (0, 1.0)):
        cost.add(rows, seconds)
    assert cost.least_rows == float("inf")


def test_steps_since_a_number_of_rows_was_measured() -> None:
    cost = RowCost()
    for rows in (4, 8, 8, 8):
        cost.add(rows, 0.01)
    assert [cost.steps_since(rows) for rows in (8, 4, 16)] == [0, 3, 4]


def test_steps_that_nobody_measures_make_what_is_known_older() -> None:
    cost = RowCost()
    cost.add(1, 1.0)
    cost.add(2, 2.0)
    cost.skip(100 * HALF_LIFE)
    assert cost.steps_since(2) >= 100 * HALF_LIFE
    cost.add(1, 1.0)
    assert cost.seconds(2) < 1.5  # one slow step long ago: it is worth finding out again


def test_what_drafts_are_compared_with_is_measured_again_the_sooner_the_less_often_it_was() -> None:
    cost = RowCost()
    assert cost.is_old(4, 0)
    refreshed_after: list[int] = []
    for _ in range(8):
        cost.add(4, 0.01)
        num_drafted = 0
        while not cost.is_old(4, num_drafted):
            cost.add(8, 0.012)
            num_drafted += 1
        refreshed_after.append(num_drafted)
    assert refreshed_after == [8, 16, 32, 64, 128, 128, 128, 128]
    assert cost.is_old(2, 0)  # fewer than ever
    assert not cost.is_old(5, FIRST_REFRESHED - 1) and cost.is_old(5, FIRST_REFRESHED)  # never measured


def test_a_slow_first_step_is_corrected_by_the_next_few() -> None:
    """As an average with equal weights, 15 % would be 4 % after three more."""
    cost = RowCost()
    cost.add(1, 0.0115)
    for _ in range(3):
        cost.add(2, 0.011)
        cost.add(1, 0.01)
    assert cost.seconds(2) / cost.seconds(1) == pytest.approx(1.1, rel=0.03)


def test_the_least_gain_counts_that_a_long_draft_needs_every_token_before() -> None:
    """Four rows take as long as one: were each alone, tokens of 0.03 would pay for them."""
    cost = RowCost()
    for _ in range(40):
        for rows in (1, 2, 5):
            cost.add(rows, 0.01 if rows == 1 else 0.011)
    assert cost.least_gain(1, 4) == pytest.approx(0.1, abs=0.02)  # p / (1 - p) = 0.11
    assert cost.least_gain(1, 4, 0.1) > cost.least_gain(1, 4) + 0.05
