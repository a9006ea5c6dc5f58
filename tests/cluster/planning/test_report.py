"""What is shown of findings, against sentences and prices made by hand."""

from pathlib import Path

import pytest
from rich.console import Console

from diptych.cluster.bench.plot import draw_sweep, write_figure
from diptych.cluster.bench.rate_search import Bracket
from diptych.cluster.planning.layouts import Layout, PlannedLevel, PlannedPool, Ranks, Routes
from diptych.cluster.planning.report import (
    Asked,
    caption,
    picture_lines,
    picture_questions,
    sentences,
    table_of,
    write_settings,
)
from diptych.cluster.planning.search import LayoutFinding, Measured, Question, answer, rate_text
from diptych.workers.common.errors import ConfigError

ONE = Ranks(1, 1, 50_000)
LEVEL = PlannedLevel(0.5, 0.05)
MIXED = Layout((PlannedPool("mixed", 4, ONE),), Routes.ROLES)
SPLIT = Layout((PlannedPool("prefill", 1, ONE), PlannedPool("decode", 3, ONE)), Routes.ROLES)
EVEN = Layout((PlannedPool("prefill", 2, ONE), PlannedPool("decode", 2, ONE)), Routes.PREDICTED)


def finding(layout: Layout, rate: float, handed_off: float = 0.0) -> LayoutFinding:
    """A layout that holds a rate, and fails at the next."""
    measured = (
        Measured(rate, 95, 100, (100.0, 400.0), (20.0, 45.5), handed_off),
        Measured(rate * 1.03, 89, 100),
    )
    return LayoutFinding(layout, measured, Bracket(rate, rate * 1.03))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            [finding(MIXED, 20.0), finding(SPLIT, 15.0, 1.0)],
            "disaggregation loses: the best colocated layout (4 mixed, TP 1, roles) serves 20 requests/s, the best "
            "disaggregated one (1 prefill + 3 decode, TP 1, roles, which hands off 100%) 15, 25% less",
        ),
        (
            [finding(SPLIT, 25.0, 1.0), finding(MIXED, 20.0)],
            "disaggregation wins: the best colocated layout (4 mixed, TP 1, roles) serves 20 requests/s, the best "
            "disaggregated one (1 prefill + 3 decode, TP 1, roles, which hands off 100%) 25, 25% more",
        ),
        (
            [finding(SPLIT, 20.2, 1.0), finding(MIXED, 20.0)],
            "disaggregation makes no difference of 3%: the best colocated layout (4 mixed, TP 1, roles) serves 20 "
            "requests/s, the best disaggregated one (1 prefill + 3 decode, TP 1, roles, which hands off 100%) 20.2",
        ),
        ([finding(SPLIT, 20.0, 1.0)], "no colocated layout meets the level on that many GPUs"),
        # By predicted times it hands off next to nothing: it is not what is compared.
        (
            [finding(EVEN, 30.0, 0.1), finding(MIXED, 20.0), finding(SPLIT, 10.0, 1.0)],
            "disaggregation loses: the best colocated layout (4 mixed, TP 1, roles) serves 20 requests/s, the best "
            "disaggregated one (1 prefill + 3 decode, TP 1, roles, which hands off 100%) 10, 50% less",
        ),
    ],
)
def test_who_wins_is_said_plainly(found: list[LayoutFinding], expected: str) -> None:
    assert sentences(found)[1] == expected


def test_the_margin_over_the_next() -> None:
    found = [finding(MIXED, 25.0), finding(SPLIT, 20.0, 1.0)]
    assert sentences(found)[0] == (
        "best: 4 mixed, TP 1, roles: 25 requests/s on 4 GPUs, 6.25 each, 25% more than the next"
    )
    assert sentences([finding(MIXED, 20.1), found[1]])[0].endswith("each, within 3% of the next")
    assert sentences(found[:1])[0].endswith("6.25 each")


def test_a_million_tokens_cost_the_gpus_while_they_are_made() -> None:
    """4 GPUs at 3.60 an hour are 0.004 a second; 20 requests of 100 tokens a second are 2,000 tokens: 2 a million."""
    best = finding(MIXED, 20.0)
    assert Asked(LEVEL, None, 3.6, 100.0).cost(best) == pytest.approx(2.0)
    assert Asked(LEVEL, None, None, 100.0).cost(best) is None
    slow = LayoutFinding(MIXED, (*best.measured, Measured(10.0, 100, 100)), best.bracket)
    assert Asked(LEVEL, 10.0, 3.6, 100.0).cost(slow) == pytest.approx(4.0), "half of it is idle"


def test_the_table() -> None:
    out = Console(record=True, width=160)
    out.print(table_of([finding(SPLIT, 200.0, 1.0), finding(MIXED, 160.0)], Asked(LEVEL, None, 3.6, 100.0)))
    first = out.export_text().splitlines()[1].split()
    assert " ".join(first) == "1 prefill + 3 decode 1 roles 200 50 +25% 100 400 20.0 45.5 100% 0.200"
    assert caption(Asked(LEVEL, 12.5, None, 1.0)) == (
        "goodput: requests/s with TTFT <= 500 ms and TPOT <= 50 ms for 90 %; latencies in ms, at 12.5 requests/s"
    )
    assert [rate_text(rate) for rate in (0.0123, 57.93, 294.4, 12345.6)] == ["0.0123", "57.9", "294", "12,346"]


@pytest.mark.parametrize("ending", ["svg", "PNG", "html"])
def test_a_picture_of_the_best_with_the_best_of_each_kind(tmp_path: Path, ending: str) -> None:
    dial = Layout(MIXED.pools, Routes.DIAL)
    wide = Layout((PlannedPool("mixed", 2, Ranks(2, 1, 90_000)),), Routes.ROLES)
    found = [finding(MIXED, 30.0), finding(dial, 29.0), finding(wide, 28.0), finding(EVEN, 27.0, 0.1)]
    found.append(finding(SPLIT, 20.0, 1.0))
    questions = picture_questions(found, 50)
    assert [question.layout for question in questions] == [MIXED, SPLIT, wide]
    measured = [answer(question, lambda _, rate, num: Measured(rate, num // 2, num), 0.9) for question in questions]
    lines = picture_lines(measured)
    assert list(lines) == [str(question.layout) for question in questions]
    assert all(point.goodput == point.rate * point.share == point.rate / 2 for point in lines[str(MIXED)])
    file = tmp_path / f"goodput.{ending}"
    write_figure(draw_sweep(lines, [0.9]), file)
    written = file.read_bytes()
    assert written.startswith({"svg": b"<?xml", "PNG": b"\x89PNG", "html": b"<!DOCTYPE html>"}[ending])
    if ending != "PNG":
        assert b"1 prefill + 3 decode, TP 1, roles" in written
        assert (b"<?xml" in written) == (ending == "svg"), "a page holds the picture without its prologue"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*none/cluster.yaml: No such file .*--output"):
        write_settings(tmp_path / "none" / "cluster.yaml", {}, ())


def test_a_question_without_a_search_is_answered_by_its_rates() -> None:
    found = answer(
        Question(MIXED, 100, (5.0, 10.0)), lambda _, rate, num: Measured(rate, int(num * 5 / rate), num), 0.9
    )
    assert [each.rate for each in found.measured] == [5.0, 10.0]
    assert (found.rate, found.bracket.fails, found.best.share) == (5.0, 10.0, 1.0)
