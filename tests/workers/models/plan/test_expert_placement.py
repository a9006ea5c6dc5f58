"""Placements of experts: examples by hand, and properties of all placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.common.errors import ConfigError
from diptych.workers.models.plan.expert_placement import Placement, by_load, contiguous, round_robin


def test_in_order_and_dealt_out() -> None:
    assert contiguous(8, 2).held == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert contiguous(5, 2).held == ((0, 1), (2, 3, 4))
    assert round_robin(5, 2).held == ((0, 2, 4), (1, 3))


def test_slots_and_holders() -> None:
    placement = Placement(3, ((0, 2), (0, 1)))
    assert placement.slots(0) == [0, -1, 1]
    assert placement.slots(1) == [0, 1, -1]
    assert placement.holders() == [[0, 1], [1], [0]]
    assert placement.load([6, 4, 1]) == [4, 7]


def test_the_heaviest_goes_where_there_is_least_to_do() -> None:
    """8 to rank 0, 7 to rank 1, 6 to rank 1; 1 to rank 0, which has 8 and not 13."""
    placement = by_load([8, 1, 7, 6], 2)
    assert placement.held == ((0, 1), (2, 3))
    assert placement.load([8, 1, 7, 6]) == [9, 13]


def test_a_hot_expert_is_held_twice() -> None:
    """Of 10, 2, 2, 2 two copies: the first expert's holders have 5 each, then 3.33 each, more than others."""
    assert by_load([10, 2, 2, 2], 3, 2).held == ((0, 1), (0, 2), (0, 3))
    assert by_load([10, 2, 2, 2], 3, 2).load([10, 2, 2, 2]) == [10 / 3 + 2] * 3


def test_no_rank_holds_more_than_its_part() -> None:
    """Expert 0 outweighs all others, and rank 1, which has less to do, has no room for the last one."""
    assert by_load([100, 1, 1, 1], 2).held == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("loads", "num_ranks", "num_copies", "message"),
    [
        ([1.0, -1.0], 2, 0, "at least 0"),
        ([1.0, float("nan")], 2, 0, "at least 0"),
        ([1.0, 1.0], 3, 0, "use 1 to 2"),
        ([1.0, 1.0], 0, 0, "use 1 to 2"),
        ([1.0, 1.0], 2, 3, "use at most 2"),
        ([1.0, 1.0], 2, -1, "use at most 2"),
    ],
)
def test_what_cannot_be_is_refused(loads: list[float], num_ranks: int, num_copies: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_load(loads, num_ranks, num_copies)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (((0, 1), (1,)), r"no rank holds the experts \[2\]"),
        (((1, 0), (2,)), "rank 0"),
        (((0, 0), (1, 2)), "rank 0"),
        (((0, 1), (2, 3)), "rank 1"),
        (((-1, 0, 1, 2),), "rank 0"),
    ],
)
def test_a_placement_is_of_all_experts_each_once_a_rank(held: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(3, held)


@given(st.data())
def test_every_placement_is_whole_and_even(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40))
    num_ranks = data.draw(st.integers(1, min(num_experts, 8)))
    num_copies = data.draw(st.integers(0, num_experts * (num_ranks - 1)))
    loads = data.draw(st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts))
    spread = by_load(loads, num_ranks, num_copies)
    for placement in (contiguous(num_experts, num_ranks), round_robin(num_experts, num_ranks)):
        sizes = [len(experts) for experts in placement.held]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(ranks) == 1 for ranks in placement.holders())
    sizes = [len(experts) for experts in spread.held]
    assert max(sizes) <= -(-(num_experts + num_copies) // num_ranks)
    assert num_experts <= sum(sizes) <= num_experts + num_copies
    assert sum(spread.load(loads)) == pytest.approx(sum(loads))
    for rank in range(num_ranks):
        slots = spread.slots(rank)
        assert [expert for expert, slot in enumerate(slots) if slot >= 0] == list(spread.held[rank])
    for expert, ranks in enumerate(spread.holders()):
        assert all(expert in spread.held[rank] for rank in ranks)
