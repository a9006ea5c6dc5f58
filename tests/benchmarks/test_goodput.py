"""goodput.py: its loads, its scores against figures computed by hand, and a whole run against servers that echo."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.serving.goodput import FIXED, LAYOUTS, PEERS, RATES, main, parse_args
from benchmarks.serving.goodput_loads import CHAT, DOCUMENT, LOADS, Asked, document, swing
from benchmarks.serving.goodput_report import LEVELS, Run, as_markdown, draw, score
from benchmarks.serving.servers import MAX_CONTEXT, diptych
from diptych.cluster.bench.report import Result
from diptych.cluster.bench.stats import summarise
from diptych.cluster.bench.types import Reply, RequestFailure

from ..support.front import Echo, served


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Azure's and Mooncake's, of 100 requests with gaps of a second."""
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02},{100 + i},20" for i in range(100)]
    azure.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lines = [
        {"timestamp": 1000 * i, "input_length": 600, "output_length": 40, "hash_ids": [0, i + 1]} for i in range(100)
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    return azure, mooncake


def asked(rate: float, seconds: float, traces: tuple[Path, Path] = (Path(), Path()), seed: int = 0) -> Asked:
    return Asked(rate, seconds, seed, 1000, *traces)


@pytest.mark.parametrize("load", LOADS)
def test_a_load_has_its_rate_and_repeats_with_its_seed(load: str, traces: tuple[Path, Path]) -> None:
    sessions = LOADS[load](asked(4.0, 20.0, traces))
    assert 0.6 * 80 <= len(sessions) <= 1.4 * 80
    times_s = [session.at_s or 0.0 for session in sessions]
    assert times_s == sorted(times_s) and times_s[0] >= 0 and 15 <= times_s[-1] <= 20.5
    assert sessions == LOADS[load](asked(4.0, 20.0, traces)) != LOADS[load](asked(4.0, 20.0, traces, seed=1))


def test_a_swing_begins_with_prompts_and_goes_on_with_answers() -> None:
    turns = [(session.at_s or 0.0, session.turns[0]) for session in swing(asked(5.0, 90.0))]
    for at_s, turn in turns:
        is_prompt_heavy = not 30 <= at_s < 60
        assert (turn.num_tokens >= 400) == is_prompt_heavy == (turn.max_tokens <= 12)
    assert any(at_s >= 60 for at_s, _ in turns)


def test_a_document_comes_every_ten_seconds_among_chats() -> None:
    turns = [(session.at_s, session.turns[0]) for session in document(asked(4.0, 40.0))]
    documents = [at_s for at_s, turn in turns if turn.num_tokens == DOCUMENT.inputs.low]
    assert documents == [5.0, 15.0, 25.0, 35.0]
    chats = [turn for _, turn in turns if turn.num_tokens != DOCUMENT.inputs.low]
    assert all(CHAT.inputs.low <= turn.num_tokens <= CHAT.inputs.high for turn in chats)


def reply(ttft_s: float, tpot_s: float) -> Reply:
    end_s = ttft_s + 10 * tpot_s
    return Reply(0.0, [ttft_s, end_s], end_s, num_output=11)


def test_one_run_is_scored_by_every_level() -> None:
    broken = Reply(0.0, [0.1], 0.2, num_output=2, failure=RequestFailure("HTTP 500", "it broke"))
    replies = [reply(0.4, 0.04), reply(0.4, 0.09), reply(0.9, 0.04), reply(0.9, 0.09), broken]
    result = Result({}, replies, summarise(replies, 5.0, {}), {}, 0.0, 0.0, "")
    assert score(result) == {"tight TTFT": 2, "tight TPOT": 2, "both tight": 1}


def run(layout: str, rate: float, good: int, sent: int = 20) -> Run:
    figures: dict[str, float] = {"completed": sent - 1, "failed": 1}
    figures |= {f"p{p}_{metric}_ms": 1.0 for p in (50, 90) for metric in ("ttft", "tpot")}
    return Run(layout, "swing", rate, 10.0, figures, dict.fromkeys(LEVELS, good))


def test_the_table_compares_the_dial_with_the_best_fixed_layout() -> None:
    runs = [run("1p1d", 2.0, 8), run("2mixed", 2.0, 10), run("dial", 2.0, 15), run("vllm", 2.0, 18)]
    assert as_markdown(runs, PEERS).splitlines()[:3] == [
        "| swing: rate, level | 1p1d | 2mixed | dial | vllm | dial / best fixed | dial / vllm |",
        "|---|--:|--:|--:|--:|--:|--:|",
        "| 2/s, tight TTFT | 40%, 0.80/s | 50%, 1.00/s | 75%, 1.50/s | **90%, 1.80/s** | 1.50 | 0.83 |",
    ]
    # While the second rate is measured, not all layouts have a figure.
    assert as_markdown([*runs, run("1p1d", 3.0, 0)], PEERS).splitlines()[5] == (
        "| 3/s, tight TTFT | 0%, 0.00/s |  |  |  |  |  |"
    )
    # The dial has a run for each level.
    dial = replace(runs[2], good={"tight TPOT": 20})
    rows = as_markdown([*runs[:2], dial], PEERS).splitlines()
    assert rows[2].endswith("|  |  |") and rows[3].endswith("**100%, 2.00/s** | 2.00 |")
    assert runs[0].line().startswith("swing at 2/s, 1p1d: tight TTFT 40%")


def test_the_picture_has_a_panel_for_each_load_and_level() -> None:
    words = " ".join(ElementTree.fromstring(draw([run("1p1d", 2.0, 8), run("1p1d", 3.0, 9)])).itertext())
    assert all(f"swing: {level}" in words for level in LEVELS) and "1p1d" in words


def test_the_loads_are_those_with_a_trace_and_the_fixed_layouts_exist() -> None:
    assert set(FIXED) < set(LAYOUTS) and set(RATES) == set(LOADS)
    assert parse_args([]).load == ["swing", "document"]
    assert parse_args(["--azure", "a.csv"]).load == ["azure", "swing", "document"]
    assert parse_args(["--", "--no-share-cores"]).flags == ["--no-share-cores"]
    with pytest.raises(SystemExit):
        parse_args(["--load", "mooncake"])


def test_a_whole_run_against_servers_that_run_already(
    tmp_path: Path, traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 120}))
    files = {name: tmp_path / f"out.{name}" for name in ("json", "svg", "md")}
    with served(Echo()) as one, served(Echo()) as other:
        main(
            [
                *("--layout", "--load", "azure", "--rates", "20", "40", "--seconds", "0.5", "--warm-up", "0.1"),
                *("--model", str(model), "--azure", str(traces[0]), "--logs", str(tmp_path)),
                *("--endpoint", f"one={one.url}", "--endpoint", f"other={other.url}"),
                *("--json", str(files["json"]), "--plot", str(files["svg"]), "--markdown", str(files["md"])),
            ]
        )
    runs = json.loads(files["json"].read_text())["runs"]
    assert [(r["layout"], r["rate"]) for r in runs] == [
        ("one", 20.0), ("other", 20.0), ("one", 40.0), ("other", 40.0)
    ]  # fmt: skip
    assert [r["figures"]["completed"] for r in runs] == [10, 10, 20, 20]
    asked = [[tuple(request.prompt_token_ids) for request in server.source.requests] for server in (one, other)]
    assert len(asked[0]) == len(set(asked[0])) == 2 + 10 + 4 + 20, "no prompt comes twice: a server may have it cached"
    assert sorted(asked[0]) == sorted(asked[1])
    assert "| 20/s, tight TTFT |" in files["md"].read_text() and ElementTree.parse(files["svg"])
    assert "azure at 40/s, other:" in capsys.readouterr().err


@pytest.mark.parametrize(("positions", "tokens"), [(2048, 2048), (MAX_CONTEXT, MAX_CONTEXT), (131072, MAX_CONTEXT)])
def test_servers_take_as_long_requests_as_the_model_does(positions: int, tokens: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    command = diptych(tmp_path, {"mixed": 1}, 1, 1).arguments
    assert command[command.index("--max-context-tokens") + 1] == str(tokens)
