"""How many groups of layers: every number here is computed by hand from the formulas at the head of the module."""

import math

import pytest

from diptych.workers.engine.segment_cost import ReadCost, SegmentCost, group_ends

MB = 1_000_000


def measured(fixed_s: float = 0.001, bytes_s: float = 1e9, token_s: float = 1e-4, num_layers: int = 30) -> SegmentCost:
    cost = SegmentCost(num_layers)
    cost.add_reads((n, fixed_s + n / bytes_s) for n in (MB, 10 * MB))
    cost.add_step(1000, 1000 * token_s)
    return cost


def test_a_line_is_found_again() -> None:
    reads = ReadCost()
    for num_bytes in (1 * MB, 4 * MB, 9 * MB, 2 * MB):
        reads.add(num_bytes, 0.002 + num_bytes / 2e9)
    line = reads.line()
    assert line is not None
    assert line.fixed_s == pytest.approx(0.002)
    assert line.byte_s == pytest.approx(1 / 2e9)


def test_one_slow_outlier_counts_little() -> None:
    reads = ReadCost()
    reads.add(5 * MB, 0.1)  # the connection was made
    for num_bytes in (1 * MB, 10 * MB) * 5:
        reads.add(num_bytes, 0.001 + num_bytes / 1e9)
    line = reads.line()
    assert line is not None
    assert line.fixed_s == pytest.approx(0.001, rel=0.1)
    assert line.byte_s == pytest.approx(1e-9, rel=0.1)


def test_old_reads_fade() -> None:
    reads = ReadCost()
    for scale in (1.0, 10.0):
        for num_bytes in (1 * MB, 10 * MB) * 200:
            reads.add(num_bytes, scale * (0.001 + num_bytes / 1e9))
    line = reads.line()
    assert line is not None
    assert line.byte_s == pytest.approx(1e-8, rel=0.05)


@pytest.mark.parametrize(
    "read",
    [(0, 0.1), (-5, 0.1), (1 << 41, 0.1), (MB, 0.0), (MB, -1.0), (MB, math.nan), (MB, math.inf), (MB, 4000.0)],
)
def test_what_cannot_be_a_read_is_left_out(read: tuple[int, float]) -> None:
    reads = ReadCost()
    reads.add(*read)
    assert not reads.is_measured


def test_one_group_before_anything_is_measured() -> None:
    cost = SegmentCost(30)
    assert cost.num_groups(50 * MB, 1, 2000, is_last=True) == 1
    cost.add_step(1000, 0.1)
    assert cost.num_groups(50 * MB, 1, 2000, is_last=True) == 1
    only_reads = SegmentCost(30)
    only_reads.add_reads([(MB, 0.002), (10 * MB, 0.011)])
    assert only_reads.num_groups(50 * MB, 1, 2000, is_last=True) == 1


def test_reads_of_one_size_are_told_apart_by_trying_two_groups() -> None:
    cost = SegmentCost(30)
    cost.add_step(1000, 0.1)
    cost.add_reads([(MB, 0.002), (MB, 0.002), (MB, 0.0021)])
    assert cost.num_groups(MB, 1, 2000, is_last=True) == 2


def test_a_link_that_keeps_up() -> None:
    # L = 49 MB / 1 GB/s = 49 ms, T = 2000 * 0.1 ms = 200 ms, c = 1 ms: sqrt(49 / 1) = 7.
    assert measured().num_groups(49 * MB + 1000, 1, 2000, is_last=True) == 7
    # Two sequences' segments a group: sqrt(49 / 2) = 4.9.
    assert measured().num_groups(49 * MB, 2, 2000, is_last=True) == 4
    # Another step follows, which hides it all.
    assert measured().num_groups(49 * MB, 1, 2000, is_last=False) == 1
    # L = 3 ms: sqrt(3) = 1.7.
    assert measured().num_groups(3 * MB, 1, 2000, is_last=True) == 1


def test_a_link_slower_than_the_computing() -> None:
    # L = 490 ms, T = 64.1 ms, c = 1 ms: sqrt(64.1) = 8.
    for is_last in (False, True):
        assert measured().num_groups(490 * MB, 1, 641, is_last=is_last) == 8


def test_never_more_groups_than_layers() -> None:
    assert measured(num_layers=3).num_groups(49 * MB, 1, 2000, is_last=True) == 3


def test_what_announcing_costs_the_source_counts() -> None:
    cost = measured()
    cost.add_announcements(4, 0.012)  # 3 ms each: c = 4 ms, sqrt(49 / 4) = 3.5
    assert cost.num_groups(49 * MB, 1, 2000, is_last=True) == 3


def test_a_cost_of_nothing_is_not_believed() -> None:
    # c is at least 20 us: sqrt(10 ms / 20 us) = 22.4.
    assert measured(fixed_s=0.0).num_groups(10 * MB, 1, 2000, is_last=True) == 22


def test_groups_are_of_about_one_size() -> None:
    assert group_ends(30, 1) == (30,)
    assert group_ends(30, 4) == (7, 15, 22, 30)
    assert group_ends(3, 3) == (1, 2, 3)
