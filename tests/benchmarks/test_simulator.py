"""The scripts of benchmarks/simulator: tables, rankings and fits, on small traces and a profile made by hand."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.simulator import dial, goodput_simulated, simulator_check, step_fit
from benchmarks.simulator.simulator_check import Case, Found, cut_half, rank
from diptych.cluster.simulate.profile import LinkProfile, Profile, WorkerProfile, read_profile
from diptych.cluster.simulate.timing import FittedTimer
from diptych.workers.costs.step_cost import StepWork
from diptych.workers.costs.step_log_format import StepLogHeader
from diptych.workers.engine.step_log import StepLog

SHAPE = goodput_simulated.SCENARIOS["135m"].config
WEIGHTS = (0.01, 3e-4, 1e-6, 5e-4, 3e-7)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """80 requests, one a second."""
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02},{100 + 10 * i},200" for i in range(80)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Two threads are twice as fast as one."""
    workers = tuple(
        WorkerProfile(
            StepLogHeader("m", "bfloat16", "cpu", "", n, 1, 16, 2000, 46080.0, "here", 2),
            (WEIGHTS[0] / n, WEIGHTS[1] / n, WEIGHTS[2] / n, WEIGHTS[3] / n, WEIGHTS[4] / n, 0.0),
            {},
            0.2 if n == 1 else 0.0,
            0.0003,
            100,
            {1: 0.8, 50: 1.0, 99: 1.5},
        )
        for n in (1, 2)
    )
    Profile("2026-11-23", workers, LinkProfile(1e9, 0.005)).write(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_layouts_of_this_machine_are_compared(azure: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = azure.parent / "found.json"
    flags = ["--azure", str(azure), "--profile", str(profile), "--requests", "40", "--rates", "2"]
    tables: list[str] = []
    for _ in range(2):
        goodput_simulated.main([*flags, "--model", "135m", "--json", str(found)])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1], "every figure repeats"
    points = json.loads(found.read_text())
    assert [point["layout"] for point in points[:3]] == ["1p1d", "2 mixed", "1 mixed"]
    assert {point["layout"] for point in points[3:]} == {f"{n} predicted" for n in ("1p1d", "2 mixed", "1 mixed")}
    assert all(0 < point["good"] <= 1 for point in points)
    assert "| azure 2/s |" in tables[0] and "**" in tables[0]


def test_a_slower_link_costs_a_split(azure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = azure.parent / "found.json"
    flags = ["--azure", str(azure), "--model", "8b", "--link-gbit", "400", "0.05", "--requests", "40", "--rates", "5"]
    goodput_simulated.main([*flags, "--layout", "4p4d", "8 mixed", "--json", str(found)])
    good = {(point["layout"], point["link_gbit"]): point["good"] for point in json.loads(found.read_text())}
    assert good["4p4d", 400.0] > good["4p4d", 0.05]
    assert good["8 mixed", 400.0] == good["8 mixed", 0.05]
    assert "400 Gbit/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rate"), [("2000/50", 15.0), ("4000/100", 8.0)])
def test_the_dial_keeps_what_a_fixed_layout_keeps_and_more(tmp_path: Path, case: str, rate: float) -> None:
    """Where TPOT is little more than a step that decodes takes: prompts are computed while it waits for its weights."""
    (tmp_path / "config.json").write_text(json.dumps(goodput_simulated.SCENARIOS["8b"].config))
    load = dial.CASES[case].load({}, 300)
    layouts = ("mixed, roles", "split, roles", "dial")
    mixed, split, moved = (dial.run(str(tmp_path), case, rate, layout, load) for layout in layouts)
    assert moved.good > max(mixed.good, split.good) - 0.01 and moved.good > 0.98
    assert (mixed.handed_off, split.handed_off) == (0.0, 1.0)


def test_the_best_fixed_layout_is_one_by_roles() -> None:
    row = {"mixed, roles": 0.5, "split, roles": 0.6, "mixed, predicted": 0.9, "split, predicted": 0.8, "dial": 0.7}
    lines = list(dial.as_markdown([dial.Point("2000/50", 10.0, name, good, 0.0) for name, good in row.items()]))
    assert lines[2] == "| 2000/50 10/s | 50% | 60% | **90%** | 80% | 70% | +10 |"


def test_halves_of_a_trace(azure: Path, tmp_path: Path) -> None:
    first, second = (cut_half(azure, half, tmp_path).read_text().splitlines() for half in ("first", "second"))
    assert [*first, *second[1:]] == azure.read_text().splitlines() and first[0] == second[0]
    assert len(first) == len(second) == 41


def test_rankings_that_are_right_wrong_and_tied() -> None:
    cases = [Case("azure", rate, layout) for rate in (1.0, 2.0) for layout in ("1p1d", "2mixed", "1mixed")]
    real = dict(zip([case.name for case in cases], (0.5, 0.6, 0.7, 0.5, 0.51, 0.9), strict=True))
    guess = dict(zip([case.name for case in cases], (0.1, 0.3, 0.2, 0.5, 0.2, 0.6), strict=True))

    def found(shares: dict[str, float]) -> dict[str, Found]:
        return {name: Found((1.0,), dict.fromkeys(simulator_check.LEVELS, share)) for name, share in shares.items()}

    assert rank(cases, found(real), found(guess)) == (3 * 4, 3 * 1, 3 * 1)


def test_what_was_measured_is_compared_without_a_cluster(
    azure: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of requests are fitted to what is said to be measured: all TTFT take 10 ms more than without them."""
    model = azure.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    measured = azure.parent / "measured.json"
    flags = ["--model", str(model), "--azure", str(azure), "--rates", "0.5", "--layout", "1mixed", "--half", "first"]
    flags += ["--profile", str(profile), "--measured", str(measured)]
    args = simulator_check.parse_args(flags)
    case = Case("azure", 0.5, "1mixed")
    path = cut_half(azure, "first", azure.parent)
    alone = simulator_check.simulate_case(case, path, args, read_profile(profile))
    slower = [
        ms + 10.0 * metric.startswith("ttft") for (metric, _), ms in zip(simulator_check.FIGURES, alone.ms, strict=True)
    ]
    measured.write_text(json.dumps({case.name: {"ms": slower, "shares": dict(alone.shares)}}))
    simulator_check.main([*flags, "--calibrate"])
    times = {worker.worker.threads: worker.transit for worker in read_profile(profile).workers}
    assert times[2].idle_s == 0.01 and times[1].idle_s == 0.0
    output = capsys.readouterr().out
    assert "| azure 0.5/s 1mixed |" in output and "0 right, 0 wrong, 0 ties" in output


def test_errors_of_a_model_without_hidden_prompts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 10 ms that compute 20 tokens for nothing."""
    rng, timer = random.Random(0), FittedTimer((0.01, 0.0, 0.0, 0.0005, 0.0, 0.01))
    log = StepLog(tmp_path, "a", StepLogHeader("m", "bfloat16", "cpu", "mixed", 1, 1, 16, 100, 128.0, "here", 2))
    for i in range(400):
        work = StepWork(2, 100)
        if i % 2:
            work = work.with_chunk(0, rng.randint(1, 100))
        log.add(float(i), work, timer.seconds(work))
    log.close()
    step_fit.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[2]: line.strip("| ").split(" | ")[-2:] for line in lines[2:]}
    assert list(cells) == ["0", "1 to 32", "33 to 80", "81 to 200"]
    assert all(with_hidden in ("+0%", "-0%") for _, with_hidden in cells.values())
    assert abs(int(cells["1 to 32"][0].rstrip("%"))) >= 5
