"""Simulated workers that speculate: their steps are those of the engine with the same drafter, their gain what the
costs of rows and the acceptance say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.preflight.checks import resolve_model
from diptych.cluster.simulate.build import Hardware, build_simulation, pass_share, simulate
from diptych.cluster.simulate.gpus import GPUS
from diptych.cluster.simulate.simulation import Simulation
from diptych.cluster.simulate.speculation import SpeculationSetup
from diptych.cluster.simulate.timing import FittedTimer, KnownCost
from diptych.workers.common.errors import ConfigError
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.decoding import work_of
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch, Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.models.families.registry import load_spec
from diptych.workers.speculation.speculator import Speculator
from diptych.workers.speculation.synthetic import SyntheticProposer
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from ...support.drafters import of_fake_runner
from ...support.engines import Clock
from .clusters import cluster, requests

TIMER = FittedTimer((0.01, 0.001, 1e-5, 0.0005, 1e-7, 0.0))
CONFIG = SchedulerConfig(max_batch_tokens=96, max_running=8, target_step_s=0, ttft_s=1.0)
LOAD = [(0.05 * i, 20 + 7 * i, 30 + 5 * (i % 4)) for i in range(12)]
Rows = list[tuple[float, list[tuple[int, int]]]]  # time, (prompt, new tokens) of each sequence


def speculating(pass_share: float | None = None, acceptance: float = 0.7, **settings: Any) -> SpeculationSetup:
    return SpeculationSetup("ngram", acceptance, 8, pass_share=pass_share, **settings)


def simulation_of(setup: SpeculationSetup | None, timer: FittedTimer = TIMER, **settings: Any) -> Simulation:
    found = cluster({"mixed": {"replicas": 1}}, timer=timer, num_blocks=400, scheduler=CONFIG, **settings)
    found._setups = {pool: replace(of, speculation=setup) for pool, of in found._setups.items()}  # pyright: ignore[reportPrivateUsage]
    return found


def rows_of(now: float, batch: Batch) -> tuple[float, list[tuple[int, int]]]:
    return round(now, 9), [(e.sequence.num_prompt, e.num_new) for e in batch.entries]


class TimedDrafts(FakeRunner):
    """A step takes the timer's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(num_blocks=400, block_size=16)
        self.clock = clock
        self.batches: Rows = []

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        self.batches.append(rows_of(self.clock.now, batch))
        step = super().launch(batch, watch)
        self.clock.now += TIMER.seconds(work_of(batch))
        return step


def engine_batches() -> Rows:
    clock = Clock()
    runner = TimedDrafts(clock)

    def target(sequence: Sequence, num_tokens: int) -> list[int]:
        return of_fake_runner(sequence, num_tokens)

    drafter = Speculator("ngram", SyntheticProposer(target, 0.7), 8)
    engine = Engine(runner, CONFIG, prefix_cache=False, clock=clock, drafter=drafter)
    engine.scheduler.cost = KnownCost(TIMER.weights)
    coming = requests(*LOAD)
    while coming or engine.scheduler.has_work:
        if not engine.scheduler.has_work:
            clock.now = max(clock.now, coming[0].at_s)
        while coming and coming[0].at_s <= clock.now:
            request = coming.pop(0)
            # SyntheticProposer draws by the request's seed, the simulator by the number of its sequence.
            sampling = SamplingParams(
                temperature=0.0, seed=request.number + 1, max_tokens=request.num_output, ignore_eos=True
            )
            prompt = tuple(range(1, request.num_input + 1))
            engine.submit(str(request.number), Request("r", prompt, sampling, timeout_s=600.0), [])
        engine.step()
    return runner.batches


def test_the_steps_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same drafter, costs and draws: the same rows, at the same times."""
    batches: Rows = []
    schedule = Scheduler.schedule
    simulation = simulation_of(speculating())

    def recorded(scheduler: Scheduler, now: float) -> Batch:
        batch = schedule(scheduler, now)
        if batch:
            batches.append(rows_of(simulation.now, batch))
        return batch

    expected = engine_batches()
    monkeypatch.setattr(Scheduler, "schedule", recorded)
    simulation.run(requests(*LOAD))
    assert [rows for _, rows in batches] == [rows for _, rows in expected]
    assert [at for at, _ in batches] == pytest.approx([at for at, _ in expected])
    assert max(num_new for _, rows in batches for _, num_new in rows[:1]) > 1
    (worker,) = simulation.alive.values()
    assert worker.check_integrity() == 0
    assert worker.num_prefill_tokens == sum(num_input for _, num_input, _ in LOAD)
    assert worker.num_decode_tokens == sum(num_output - 1 for *_, num_output in LOAD)


def tpot_ms(setup: SpeculationSetup | None, timer: FittedTimer, batch: int = 1) -> float:
    simulation = simulation_of(setup, timer)
    simulation.run(requests(*[(0.0, 16, 2000)] * batch))
    _, tpot, _ = simulation.columns.latencies()
    return float(tpot.mean()) * 1e3


def test_drafts_gain_what_their_acceptance_and_the_cost_of_rows_say() -> None:
    """10 ms a step and 0.5 ms a row: the best of all lengths, but for the steps until that is known."""
    timer = FittedTimer((0.01, 0.0, 0.0, 0.0005, 0.0, 0.0))
    for acceptance in (0.5, 0.8):
        best = min((10 + 0.5 * k) / sum(acceptance**i for i in range(k + 1)) for k in range(9))
        assert tpot_ms(speculating(acceptance=acceptance), timer) == pytest.approx(best, rel=0.1)
    assert tpot_ms(speculating(acceptance=0.0), timer) == pytest.approx(10, rel=0.03)
    dear = FittedTimer((0.001, 0.01, 0.0, 0.01, 0.0, 0.0))  # rows cost all of a step: nothing is drafted
    assert tpot_ms(speculating(), dear) == pytest.approx(tpot_ms(None, dear), rel=0.03)


def test_passes_of_a_model_take_time_between_steps() -> None:
    timer = FittedTimer((0.01, 0.0, 0.0, 0.0005, 0.0, 0.0))
    best = min((10 + (0.5 + 1.0) * k) / sum(0.8**i for i in range(k + 1)) for k in range(9))
    assert tpot_ms(speculating(pass_share=0.1, acceptance=0.8), timer) == pytest.approx(best, rel=0.1)
    assert tpot_ms(speculating(pass_share=2.0, acceptance=0.8), timer) == pytest.approx(10, rel=0.03)


def test_a_model_with_kv_of_its_own_computes_prompts_too() -> None:
    timer = FittedTimer((0.01, 0.0, 0.0, 0.001, 0.0, 0.0))
    ttft_s: list[float] = []
    for computes in (False, True):
        simulation = simulation_of(speculating(0.25, computes_prompts=computes), timer)
        simulation.run(requests((0.0, 90, 2)))
        ttft_s.append(float(simulation.columns.latencies()[0][0]))
    assert ttft_s == pytest.approx([0.1, 0.125])


def test_settings_say_how_pools_speculate() -> None:
    drafting = {"speculation": "draft", "draft_model": "tiny_draft", "max_draft_tokens": 5}
    config = build({"model": "tiny", "pools": {"prefill": {"replicas": 1} | drafting, "decode": {"replicas": 1}}})
    simulation = build_simulation(config, Hardware(GPUS["H100"], acceptance=0.6, seed=3), shares_blocks=False)
    found = simulation._setups["prefill"].speculation  # pyright: ignore[reportPrivateUsage]
    share = pass_share(config.worker("prefill"), load_spec(Path(resolve_model("tiny"))))
    assert found == SpeculationSetup("draft", 0.6, 5, 0.0, share, computes_prompts=True, seed=3)
    assert 0.05 < share < 0.5
    assert simulation._setups["decode"].speculation is None  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ConfigError, match=r"pools.prefill: its workers speculate \(draft\): give --acceptance"):
        build_simulation(config, Hardware(GPUS["H100"]), shares_blocks=False)


def test_figures_count_drafts() -> None:
    config = build({"model": "tiny", "pools": {"mixed": {"replicas": 1, "speculation": "ngram"}}})
    load = requests((0.0, 100, 200), (0.1, 50, 200))
    figures = simulate(config, Hardware(GPUS["H100"], acceptance=0.7), load)
    plain = simulate(build({"model": "tiny", "pools": {"mixed": {"replicas": 1}}}), Hardware(GPUS["H100"]), load)
    assert figures.pools["mixed"].num_drafted > 200
    assert 0.2 < figures.pools["mixed"].num_accepted / figures.pools["mixed"].num_drafted < 0.7
    assert figures.spreads["tpot"].mean < 0.6 * plain.spreads["tpot"].mean
