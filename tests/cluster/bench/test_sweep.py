"""`diptych bench --find-rate`, against front doors that echo, and whose failures are known by trial."""

import json
import os
import signal
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from diptych.cluster.bench.workloads import stretched
from diptych.cluster.cli.main import app
from diptych.cluster.routing.token_source import TokenDelta
from diptych.workers.common.errors import InternalError, Overloaded
from diptych.workers.common.request import Request

from ...support.front import Echo, Served, served

NUM = 4  # requests of a trial
FLAGS = (
    "--find-rate",
    "--num-requests",
    str(NUM),
    "--input-tokens",
    "8",
    "--output-tokens",
    "2",
    "--vocab-size",
    "120",
)
LEVEL = ("--goodput", "ttft:60000", "--rate", "1000")


class Failing(Echo):
    """Fails every request of some trials, by number from 0. `order` is shared: the name of each request's server."""

    def __init__(self, name: str, trials: set[int], order: list[str]) -> None:
        super().__init__()
        self._name = name
        self._trials = trials
        self._order = order

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        number = len(self.requests) - 1  # the first is the warm-up
        self._order.append(self._name)
        if number >= 0 and number // NUM in self._trials:
            self.requests.append(request)
            raise Overloaded("full: try again")
        async for delta in super().stream(request):
            yield delta


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[Served, Served, list[str]]]:
    """The first one's limit is between the first rate times 2.38 and 2.83, the other's between 1.19 and 1.41."""
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    order: list[str] = []
    with ExitStack() as stack:
        # x1 holds, x2 holds, x4 fails, x2.83 fails, x2.38 holds; x2.38 holds again, x2.83 fails again.
        a = stack.enter_context(served(Failing("a", {2, 3, 6}, order)))
        # x1 holds, x2 fails, x1.41 fails, x1.19 holds; again.
        b = stack.enter_context(served(Failing("b", {1, 2, 5}, order)))
        yield a, b, order


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *FLAGS, *args])


def test_the_rate_of_two_endpoints_is_found_in_turn(doors: tuple[Served, Served, list[str]], tmp_path: Path) -> None:
    a, b, order = doors
    files = ("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"))
    endpoints = ("--endpoint", f"one={a.url}", "--endpoint", f"other=grpc://{b.address}")
    result = bench(*endpoints, *LEVEL, *files, "--within", "20", "--share", "90")
    assert result.exit_code == 0, result.output
    row: dict[str, Any] = json.loads((tmp_path / "a.json").read_text())
    one, other = row["endpoints"]
    assert [trial["rate"] for trial in one["trials"]] == pytest.approx(
        [1000 * 2**k for k in (0, 1, 2, 1.5, 1.25, 1.25, 1.5)]
    )
    assert [(trial["sent"], trial["good"]) for trial in one["trials"]] == [
        (NUM, 0 if k in {2, 3, 6} else NUM) for k in range(7)
    ]
    assert one["found"] == [
        {
            "share": 0.9,
            "rate": pytest.approx(1000 * 2**1.25),
            "fails_at": pytest.approx(1000 * 2**1.5),
            "measured_share": 1.0,
        }
    ]
    assert other["found"][0]["rate"] == pytest.approx(1000 * 2**0.25)
    assert (one["name"], one["url"], one["model"], other["name"]) == ("one", a.url, "echo", "other")
    assert row["settings"]["find_rate"] is True and not row["interrupted"]
    # Two warm-ups, then a trial at each in turn until the other's search has ended.
    assert order == ["a", "b", *(["a"] * NUM + ["b"] * NUM) * 6, *["a"] * NUM]
    words = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "one" in words and "other" in words and "goodput" in words
    assert "2.38e+03" in result.stdout and "1.19e+03" in result.stdout
    assert result.stderr.count("of 4 met the level") == 13


def test_trials_have_prompts_of_their_own_and_endpoints_the_same_ones(
    doors: tuple[Served, Served, list[str]],
) -> None:
    a, b, _ = doors
    bench("--endpoint", f"one={a.url}", "--endpoint", f"other={b.url}", *LEVEL, "--within", "20", "--share", "90")
    first, second = ([tuple(r.prompt_token_ids) for r in door.source.requests] for door in (a, b))
    assert len(set(first)) == len(first) == 1 + 7 * NUM
    # Requests of one trial may finish in any order.
    assert set(first[: 1 + NUM]) == set(second[: 1 + NUM])


def test_both_shares_are_searched_for_by_default(doors: tuple[Served, Served, list[str]], tmp_path: Path) -> None:
    result = bench("--url", doors[0].url, *LEVEL, "--json", str(tmp_path / "a.json"), "--within", "20")
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "a.json").read_text())["endpoints"]
    assert [each["share"] for each in found["found"]] == [0.9, 0.99]
    assert len({each["rate"] for each in found["found"]}) == 1 and len(found["trials"]) == 7


def test_a_server_without_a_limit_and_one_below_any_rate(tmp_path: Path) -> None:
    endless, none = Failing("a", set(), []), Failing("b", set(range(99)), [])
    with served(endless) as a, served(none) as b:
        endpoints = ("--endpoint", f"a={a.url}", "--endpoint", f"b={b.url}")
        result = bench(*endpoints, "--goodput", "ttft:60000", "--rate", "40000", "--json", str(tmp_path / "a.json"))
    assert "at least 1.64e+08" in result.stdout and "below 9.77" in result.stdout
    one, other = json.loads((tmp_path / "a.json").read_text())["endpoints"]
    assert one["found"][0]["fails_at"] is None and other["found"][0]["rate"] is None


def test_a_trace_keeps_its_gaps_in_proportion(doors: tuple[Served, Served, list[str]], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 9, "output_length": 2, "hash_ids": [t]} for t in (0, 0, 0, 9000)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "a.json"
    flags = ("--workload", "mooncake", "--file", str(trace), "--share", "90", "--within", "20", "--json", str(path))
    result = bench("--url", doors[0].url, "--goodput", "ttft:60000", "--rate", "30", *flags)
    assert result.exit_code == 0, result.output
    trials = json.loads(path.read_text())["endpoints"][0]["trials"]
    # Three gaps at 30 requests/s on average: the only one takes 0.1 s.
    assert trials[0]["duration"] >= 0.1 - 0.001


def test_times_are_stretched_to_a_rate() -> None:
    assert stretched([5.0, 6.0, 9.0], 4.0) == pytest.approx([0.0, 0.125, 0.5])
    assert stretched([5.0, 5.0, 5.0], 4.0) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--find-rate needs a service level"),
        ((*LEVEL, "--concurrency", "4"), "leave --concurrency out"),
        ((*LEVEL, "--share", "0"), "--share is a percentage"),
        ((*LEVEL, "--share", "101"), "--share is a percentage"),
        ((*LEVEL, "--endpoint", "http://127.0.0.1:8000"), "--endpoint must be NAME=URL"),
        (
            (*LEVEL, "--endpoint", "a=http://x", "--endpoint", "a=http://y"),
            "--endpoint must be NAME=URL, each name once",
        ),
        ((*LEVEL, "--endpoint", "a=x"), "'x' is not an endpoint"),
        ((*LEVEL, "--plot", "a.png"), "use --plot a.svg"),
    ],
)
def test_bad_flags_are_named(args: tuple[str, ...], message: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2 and message in result.stderr, result.output


@pytest.mark.parametrize("flags", [("--share", "90"), ("--endpoint", "a=http://127.0.0.1:1")])
def test_flags_of_the_search_without_it(flags: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["bench", *flags])
    assert result.exit_code == 2 and "need --find-rate" in result.stderr


class Stuck(Echo):
    """Stops in its second trial."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        if len(self.requests) == 1 + NUM:
            self.gate.clear()
            self.is_stuck.set()
        async for delta in super().stream(request):
            yield delta


def test_ctrl_c_shows_the_trials_that_had_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)
    source, path = Stuck(), tmp_path / "a.json"
    with served(source) as door:

        def interrupt() -> None:
            assert source.is_stuck.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        result = bench("--url", door.url, *LEVEL, "--json", str(path))
        thread.join()
        door.open_gate()
        assert source.all_closed.wait(60)
    assert result.exit_code == 130
    assert "at least 1e+03" in result.stdout and "had not ended" in result.stdout
    row = json.loads(path.read_text())
    assert row["interrupted"] and len(row["endpoints"][0]["trials"]) == 1


class Dying(Echo):
    """Fails all requests of the second trial and of those after it."""

    async def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        if len(self.requests) > NUM:
            self.requests.append(request)
            raise InternalError("the server failed")
        async for delta in super().stream(request):
            yield delta


def test_a_level_that_no_request_meets_alone_is_not_searched_for_at_ever_lower_rates() -> None:
    """At a thousandth of the rate a trial takes a thousand times as long."""
    with served(Echo()) as door:
        flags = ("--num-requests", "24", "--rate", "20", "--share", "90")
        result = bench("--url", door.url, "--goodput", "e2el:0.001", *flags)
    assert result.exit_code == 0, result.output
    assert "requests that ran alone miss the level, too: no lower rate is measured" in result.stderr
    assert result.stderr.count("met the level") < 5, "of the 13 trials down to a 4096th of the rate"
    assert "below " in result.stdout


def test_a_server_that_fails_ends_the_search_with_its_error() -> None:
    with served(Dying()) as door:
        result = bench("--url", door.url, *LEVEL, "--share", "90")
    assert result.exit_code == 3
    assert "no request succeeded at 2e+03 requests/s: " in result.stderr and "the server failed" in result.stderr
    assert len(door.source.requests) == 1 + 2 * NUM


def test_a_rate_of_a_burst_is_noted() -> None:
    """Four requests at 160 million a second say nothing of what the server sustains."""
    with served(Echo()) as door:
        result = bench("--url", door.url, "--goodput", "ttft:60000", "--rate", "40000", "--share", "90")
    assert result.exit_code == 0 and "raise --num-requests to measure what lasts" in result.stdout, result.output
