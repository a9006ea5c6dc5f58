"""The search, with layouts whose limits are given numbers, so that the best one is known."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from diptych.cluster.bench.rate_search import Search
from diptych.cluster.planning.layouts import Layout, LayoutKind, PlannedLevel, Ranks, Routes, layouts_of
from diptych.cluster.planning.report import goodput_text
from diptych.cluster.planning.search import (
    LayoutFinding,
    Measured,
    Question,
    Run,
    SearchGoal,
    answer,
    find_best,
    find_smallest,
)
from diptych.workers.common.errors import ConfigError

LEVEL = PlannedLevel(0.5, 0.05)
GOAL = SearchGoal(4000, LEVEL, idle_rate=0.01, first_rate=10.0)
ONE, TWO = Ranks(1, 1, 50_000), Ranks(2, 1, 90_000)
LAYOUTS = layouts_of(8, (ONE, TWO))


def runs(limit: Callable[[Layout], float], counts: Counter[int] | None = None) -> Run:
    """Layouts that hold up to a rate, and beyond it serve that much. `counts`: of simulations, by their requests."""

    def measure(layout: Layout, rate: float, num: int) -> Measured:
        if counts is not None:
            counts[num] += 1
        return Measured(rate, int(num * min(1.0, 0.9 * limit(layout) / rate)), num)

    def run(questions: Sequence[Question]) -> Iterable[LayoutFinding]:
        return [answer(question, measure, LEVEL.share) for question in questions]

    return run


def limit_of(layout: Layout) -> float:
    """Highest with three prefill workers of eight and the dial."""
    if layout.kind == LayoutKind.COLOCATED:
        return 50.0 + 2 * (layout.routes == Routes.DIAL)
    ranks = layout.pools[0].ranks.tensor_parallel
    return 80.0 - 10 * abs(layout.pools[0].num_workers - 3) - 5 * ranks + 3 * (layout.routes == Routes.DIAL)


def test_the_best_layout_is_found_and_fewer_are_measured_at_length() -> None:
    counts, lines = Counter[int](), list[str]()
    found = find_best(LAYOUTS, GOAL, runs(limit_of, counts), lines.append)
    assert str(found[0].layout) == "3 prefill + 5 decode, TP 1, dial"
    assert found[0].rate == pytest.approx(78, rel=0.03) and found[0].rate <= 78
    assert [each.rate for each in found] == sorted((each.rate for each in found), reverse=True)
    assert {each.layout.kind for each in found} == set(LayoutKind)
    assert {each.layout.routes for each in found} == set(Routes)
    assert counts[32] == len(LAYOUTS) and counts[4000] < counts[1000] / 2
    assert lines[0] == f"{len(LAYOUTS)} layouts, 1,000 requests"
    assert sum(line.startswith("  ") for line in lines) > len(LAYOUTS), "each measured layout is a line"


def test_a_group_that_holds_nothing_is_measured_at_lower_rates() -> None:
    """Colocated layouts serve a hundredth of the others, and are in the table all the same."""
    lines = list[str]()

    def limit(layout: Layout) -> float:
        return 0.4 if layout.kind == LayoutKind.COLOCATED else 40.0

    found = find_best(LAYOUTS, GOAL, runs(limit), lines.append)
    rates = {kind: max(each.rate for each in found if each.layout.kind == kind) for kind in LayoutKind}
    assert rates[LayoutKind.DISAGGREGATED] == pytest.approx(40, rel=0.03)
    assert rates[LayoutKind.COLOCATED] == pytest.approx(0.4, rel=0.03)


def test_a_split_that_a_short_load_hides_is_found_beside_the_best() -> None:
    """Over a part of the load six prefill workers are best, and the rest of their groups far behind."""

    def measure(layout: Layout, rate: float, num: int) -> Measured:
        prefill = layout.pools[0].num_workers if layout.kind == LayoutKind.DISAGGREGATED else 20
        ranks = layout.pools[0].ranks.tensor_parallel
        limit = 60.0 / ranks - 4 * abs(prefill - (3 if num == GOAL.num_requests else 6))
        return Measured(rate, int(num * min(1.0, 0.9 * max(limit, 1.0) / rate)), num)

    def run(questions: Sequence[Question]) -> Iterable[LayoutFinding]:
        return [answer(question, measure, LEVEL.share) for question in questions]

    found = find_best(LAYOUTS, GOAL, run, print)
    assert found[0].layout.pools_text == "3 prefill + 5 decode" and found[0].rate == pytest.approx(60, rel=0.03)


def test_the_same_search_finds_the_same() -> None:
    first, second = (find_best(LAYOUTS, GOAL, runs(limit_of), print) for _ in range(2))
    assert first == second


def test_a_short_load_has_one_round() -> None:
    counts = Counter[int]()
    find_best(LAYOUTS, SearchGoal(300, LEVEL, 0.01, 10.0), runs(limit_of, counts), print)
    assert set(counts) == {32, 300}


def test_layouts_that_miss_the_level_without_load_are_left_out() -> None:
    counts = Counter[int]()
    slow = [each for each in LAYOUTS if each.ranks_text == "1"]
    found = find_best(LAYOUTS, GOAL, runs(lambda layout: 0.001 if layout in slow else 20.0, counts), print)
    assert not {each.layout for each in found} & set(slow)
    assert found[0].rate == pytest.approx(20, rel=0.03)


def test_a_level_that_nothing_meets_is_named_with_the_best_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"TTFT <= 500 ms and TPOT <= 50 ms for 90 % .*8 mixed, TP 1, roles: 44% meet"
    ):
        find_best(LAYOUTS, GOAL, runs(lambda _: 0.005), print)


@pytest.mark.parametrize(("rate", "gpus"), [(5.0, 1), (30.0, 4), (31.0, 5), (59.0, 8)])
def test_the_fewest_gpus_for_a_rate(rate: float, gpus: int) -> None:
    """A GPU serves 7.5 requests a second, and colocated a tenth less."""

    def limit(layout: Layout) -> float:
        return layout.num_gpus * (7.5 if layout.kind == LayoutKind.DISAGGREGATED or layout.num_gpus == 1 else 6.75)

    found = find_smallest(8, (ONE,), rate, GOAL, runs(limit), print)
    assert found[0].layout.num_gpus == gpus
    assert found[0].at(rate).share >= LEVEL.share and found[0].rate >= rate
    with pytest.raises(ConfigError, match="no layout meets"):
        find_smallest(8, (ONE,), 61.0, GOAL, runs(limit), print)


BISECTION = Search(LEVEL.share, 1.0, 0.03, 1, 10)


def test_no_rate_is_claimed_at_which_the_load_is_a_burst() -> None:
    """A hundred requests that come within 2.5 s are all at work at once; the layout holds that at any rate."""

    def measure(_: Layout, rate: float, num: int) -> Measured:
        return Measured(rate, num, num, is_burst=num / rate < 2.5)

    found = answer(Question(LAYOUTS[0], 100, search=BISECTION), measure, LEVEL.share)
    assert found.rate == pytest.approx(40, rel=0.03) and found.rate <= 40
    assert not found.is_bounded and goodput_text(found).startswith(">= ")
    assert answer(Question(LAYOUTS[0], 100, (500.0,)), measure, LEVEL.share).rate == 500.0, (
        "a race compares all the same"
    )


def test_a_rate_that_fails_although_it_is_a_burst_bounds_the_goodput() -> None:
    """Where requests wait for each other an answer takes as long as the whole load."""

    def measure(_: Layout, rate: float, num: int) -> Measured:
        return Measured(rate, num if rate <= 20 else 0, num, is_burst=rate > 20)

    found = answer(Question(LAYOUTS[0], 100, search=BISECTION), measure, LEVEL.share)
    assert found.rate == pytest.approx(20, rel=0.03) and found.is_bounded
    assert not goodput_text(found).startswith(">= ")


def test_the_fewest_gpus_for_a_burst_are_not_told() -> None:
    def run(questions: Sequence[Question]) -> Iterable[LayoutFinding]:
        return [answer(each, lambda _, rate, num: Measured(rate, num, num, is_burst=True), 0.9) for each in questions]

    with pytest.raises(ConfigError, match="the 4,000 requests of the load come in a burst"):
        find_smallest(8, (ONE,), 60.0, GOAL, run, print)
