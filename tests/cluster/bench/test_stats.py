"""Figures against numbers computed by hand, and the picture and the JSON that show them."""

from xml.etree import ElementTree

import pytest

from diptych.cluster.bench.plot import draw, open_requests
from diptych.cluster.bench.report import Result, to_json
from diptych.cluster.bench.stats import Spread, Summary, alone, max_concurrent, parse_levels, summarise
from diptych.cluster.bench.types import Reply, RequestFailure
from diptych.workers.common.errors import ConfigError

# Sent at 10: a token event at 10.1, 10.2, 10.5 and the end there; five tokens in three events.
STEADY = Reply(10.0, [10.1, 10.2, 10.5], 10.5, num_input=100, num_cached=64, num_output=5)
# One token, at 10.9.
SINGLE = Reply(10.4, [10.9], 10.9, num_input=10, num_output=1)
BROKEN = Reply(10.1, [10.2], 10.6, num_input=7, num_output=3, failure=RequestFailure("HTTP 500", "it broke"))
REPLIES = [STEADY, SINGLE, BROKEN]


def test_the_times_of_one_reply() -> None:
    assert STEADY.ttft_s == pytest.approx(0.1)
    assert STEADY.e2e_s == pytest.approx(0.5)
    assert STEADY.tpot_s == pytest.approx(0.1)  # (0.5 - 0.1) / (5 - 1)
    assert STEADY.itl_s == pytest.approx([0.1, 0.3])
    assert SINGLE.tpot_s is None and SINGLE.itl_s == []
    assert Reply(1.0, [], 3.0).ttft_s == 2.0


def test_a_summary_counts_what_came_to_its_end() -> None:
    s = summarise(REPLIES, 2.0, {})
    assert (s.completed, s.failed, s.failures) == (2, 1, {"HTTP 500": 1})
    assert (s.num_input, s.num_cached, s.num_output) == (110, 64, 6)
    assert s.per_s(s.num_output) == 3.0
    assert s.max_concurrent == 3  # 10.4 .. 10.5
    assert s.good is None
    assert s.spreads["ttft"].mean == pytest.approx(300)
    assert s.spreads["ttft"].std == pytest.approx(200)
    assert s.spreads["tpot"].mean == pytest.approx(100)
    assert s.spreads["itl"].percentiles[50] == pytest.approx(200)
    assert s.spreads["e2el"].percentiles[99] == pytest.approx(500)


def test_percentiles_interpolate() -> None:
    spread = Spread.of([0.004, 0.001, 0.003, 0.002, 0.005])
    assert spread.percentiles == pytest.approx({50: 3.0, 90: 4.6, 95: 4.8, 99: 4.96})
    assert Spread.of([]) == Spread(0.0, 0.0, {50: 0.0, 90: 0.0, 95: 0.0, 99: 0.0})


@pytest.mark.parametrize(
    ("levels", "good"),
    [
        (["ttft:600"], 2),
        (["ttft:200"], 1),
        (["tpot:99"], 1),  # the single token has no tpot
        (["tpot:101", "ttft:600", "e2e:501"], 2),
        (["e2el:499"], 0),
    ],
)
def test_goodput(levels: list[str], good: int) -> None:
    assert summarise(REPLIES, 2.0, parse_levels(levels)).good == good


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "ttft:inf", "ttft:nan", "speed:3"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a service level"):
        parse_levels([text])


def test_a_level_named_twice() -> None:
    with pytest.raises(ConfigError, match="names e2e twice"):
        parse_levels(["e2el:5", "e2e:6"])


def test_calls_that_touch_are_not_at_once() -> None:
    assert max_concurrent([Reply(0.0, [], 1.0), Reply(1.0, [], 2.0)]) == 1
    assert max_concurrent([]) == 0


def result(replies: list[Reply], summary: Summary) -> Result:
    return Result({"workload": "a <b>"}, replies, summary, {"ttft": 0.2}, 10.0, 0.5, "2026-01-01T00:00:00+00:00")


def test_json_has_the_figures_and_every_request() -> None:
    row = to_json(result(REPLIES, summarise(REPLIES, 2.0, {"ttft": 0.2})))
    assert (row["completed"], row["failed"], row["duration"]) == (2, 1, 2.0)
    assert (row["output_throughput"], row["total_token_throughput"], row["request_goodput"]) == (3.0, 58.0, 0.5)
    assert row["median_ttft_ms"] == row["p50_ttft_ms"] == pytest.approx(300)
    assert row["p99_e2el_ms"] == pytest.approx(500)
    assert [r["error"] for r in row["requests"]] == [None, None, "HTTP 500: it broke"]
    assert row["requests"][1]["start_s"] == pytest.approx(0.4)


@pytest.mark.parametrize("replies", [REPLIES, [BROKEN], []])
def test_the_picture_has_a_panel_a_figure(replies: list[Reply]) -> None:
    picture = ElementTree.fromstring(draw(result(replies, summarise(replies, 2.0, {}))))
    panels = [group.get("id", "") for group in picture.iter("{http://www.w3.org/2000/svg}g")]
    assert sum(name.startswith("axes_") for name in panels) == 6
    words = " ".join(picture.itertext())
    assert "a <b>" in words and "open requests" in words
    assert ("p99" in words) == ("level" in words) == (replies is REPLIES)


def test_requests_are_open_from_sending_to_their_end() -> None:
    points = open_requests(result(REPLIES, summarise(REPLIES, 2.0, {})))
    numbers = [number for _, number in points]
    assert numbers[0] == numbers[-1] == 0 and max(numbers) >= 1 and min(numbers) == 0
    assert [at for at, _ in points] == sorted(at for at, _ in points)


def test_replies_during_which_no_other_request_ran() -> None:
    long, within, next_to, last = Reply(0.0, [], 9.0), Reply(1.0, [], 2.0), Reply(9.0, [], 10.0), Reply(11.0, [], 12.0)
    assert alone([last, next_to, within, long]) == [next_to, last], "one that ran for long has met others, and they it"
    assert alone([]) == [] and alone([long]) == [long]
