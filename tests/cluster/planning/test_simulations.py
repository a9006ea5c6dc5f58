"""Measuring a layout is what `diptych simulate` does with its settings."""

import signal
from pathlib import Path

import psutil
import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.planning.layouts import PlannedLevel, Ranks, Routes, WorkerMemory, layouts_of, settings_of
from diptych.cluster.planning.search import Question
from diptych.cluster.planning.simulations import Problem, Simulations, goal_of, measure
from diptych.cluster.preflight.checks import check_model
from diptych.cluster.simulate.build import Hardware, simulate
from diptych.cluster.simulate.gpus import GPUS
from diptych.cluster.simulate.load import LogNormal, Synthetic, at_rate, synthetic_load
from diptych.workers.common.errors import ConfigError, Unavailable

from .shapes import LLAMA, checkpoint

LEVEL = PlannedLevel(0.5, 0.05)
H100 = GPUS["H100"]
LOAD = tuple(synthetic_load(Synthetic(60, 1.0, LogNormal(500, 0.8), LogNormal(50, 0.5)), 0))
LAYOUTS = layouts_of(2, (Ranks(1, 1, 400_000),))


def problem(model: Path) -> Problem:
    return Problem(str(model), WorkerMemory(H100, 0.85, 8192, 8192), Hardware(H100), LOAD, LEVEL)


def test_a_measurement_is_a_simulation_at_that_rate(tmp_path: Path) -> None:
    of = problem(checkpoint(tmp_path, LLAMA))
    split = next(each for each in LAYOUTS if each.pools[0].name == "prefill" and each.routes == Routes.ROLES)
    found = measure(of, split, 20.0, 40)
    config = build(settings_of(split, of.model, of.memory, LEVEL))
    figures = simulate(config, of.hardware, at_rate(LOAD[:40], 20.0), {"ttft": 0.5, "tpot": 0.05})
    assert (found.rate, found.sent, found.handed_off) == (20.0, 40, 1.0)
    assert found.share == pytest.approx(figures.good)
    assert found.ttft_ms == (figures.spreads["ttft"].percentiles[50], figures.spreads["ttft"].percentiles[99])


def test_answers_come_in_the_order_of_the_questions(tmp_path: Path) -> None:
    of = problem(checkpoint(tmp_path, LLAMA))
    questions = [Question(layout, 20, (rate,)) for layout in LAYOUTS for rate in (5.0, 50.0)]
    with Simulations(of, 1) as simulations:
        found = list(simulations.run(questions))
    assert [(each.layout, each.measured[0].rate) for each in found] == [(q.layout, *q.rates) for q in questions]


def test_a_search_begins_near_what_the_gpus_compute(tmp_path: Path) -> None:
    """The first rate is within 16 times of where the level ends, and at the idle rate requests do not meet."""
    of = problem(checkpoint(tmp_path, LLAMA))
    goal = goal_of(of, check_model(tmp_path), LAYOUTS)
    _, num_output = of.mean_tokens
    assert goal.idle_rate == pytest.approx(1 / (0.5 + num_output * 0.05))
    assert measure(of, LAYOUTS[0], goal.first_rate / 16, 60).share >= 0.9
    assert goal.num_requests == 60


def test_sessions_are_counted_with_all_their_turns() -> None:
    turns = Synthetic(10, 1.0, LogNormal(50, 0.1), LogNormal(20, 0.1), turns=3)
    of = Problem("tiny", WorkerMemory(H100, 0.85, 1, 2048), Hardware(H100), tuple(synthetic_load(turns, 0)), LEVEL)
    assert of.session_tokens == pytest.approx(3 * of.mean_tokens[1])
    assert measure(of, LAYOUTS[0], 1.0, 10).sent == 30


def test_a_load_without_gaps_has_no_rate() -> None:
    assert [request.at_s for request in at_rate(LOAD[:3], 4.0)][::2] == [0.0, 0.5]
    with pytest.raises(ConfigError, match="without gaps"):
        at_rate(LOAD[:1], 4.0)


def test_its_processes_end_at_sigterm_also_where_this_one_ignores_it() -> None:
    of = Problem("tiny", WorkerMemory(H100, 0.85, 1, 2048), Hardware(H100), LOAD, LEVEL)
    question = Question(layouts_of(1, (Ranks(1, 1, 2048),))[0], 20, (1.0,))
    earlier = {child.pid for child in psutil.Process().children()}
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Simulations(of, 2) as simulations:
            assert len(list(simulations.run([question]))) == 1
            own = [child for child in psutil.Process().children() if child.pid not in earlier]
            child = next(child for child in own if "spawn_main" in " ".join(child.cmdline()))
            child.terminate()
            child.wait(60)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_is_killed_is_named() -> None:
    of = Problem("tiny", WorkerMemory(H100, 0.85, 1, 2048), Hardware(H100), LOAD, LEVEL)
    question = Question(layouts_of(1, (Ranks(1, 1, 2048),))[0], 20, (1.0,))
    before = {child.pid for child in psutil.Process().children()}
    with Simulations(of, 2) as simulations, pytest.raises(Unavailable, match="a process that simulated was killed"):
        for number, _ in enumerate(simulations.run([question] * 500)):
            if number == 0:
                own = [child for child in psutil.Process().children() if child.pid not in before]
                next(child for child in own if "spawn_main" in " ".join(child.cmdline())).kill()
