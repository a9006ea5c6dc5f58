"""A simulated worker makes the batches that the engine makes of the same arrivals, at the same times."""

import numpy as np
import pytest

from diptych.cluster.simulate.load import SimulatedRequest
from diptych.cluster.simulate.simulation import Simulation
from diptych.cluster.simulate.timing import FittedTimer, KnownCost
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.decoding import work_of
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch
from diptych.workers.engine.engine import Engine
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from ...support.engines import Clock
from .clusters import cluster, requests

TIMER = FittedTimer((0.01, 0.001, 1e-5, 0.0005, 1e-7, 0.0))
NUM_BLOCKS = 30
Rows = list[tuple[float, int, list[tuple[int, int, int]]]]  # time, decodes, (prompt, computed, new) of each sequence


def rows_of(now: float, batch: Batch) -> tuple[float, int, list[tuple[int, int, int]]]:
    rows = [(e.sequence.num_prompt, e.sequence.num_computed, e.num_new) for e in batch.entries]
    return round(now, 9), batch.num_decodes, rows


class TimedRunner(FakeRunner):
    """A step takes the timer's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=16)
        self.clock = clock
        self.batches: Rows = []
        self.scheduler: Scheduler | None = None

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        assert self.scheduler is not None
        self.batches.append(rows_of(self.clock.now, batch))
        step = super().launch(batch, watch)
        self.clock.now += TIMER.seconds(work_of(batch))
        return step


def load() -> list[SimulatedRequest]:
    """Requests with distinct lengths, so that a row identifies its request; more than the blocks can hold at once."""
    rng = np.random.default_rng(5)
    inputs, at_s = rng.permutation(np.arange(10, 130))[:40].tolist(), np.cumsum(rng.exponential(0.1, 40)).tolist()
    return requests(*((at, num, int(rng.integers(1, 60))) for at, num in zip(at_s, inputs, strict=True)))


def engine_batches(config: SchedulerConfig) -> tuple[Rows, int]:
    """Batches, and the number of preemptions."""
    clock = Clock()
    runner = TimedRunner(clock)
    engine = Engine(runner, config, prefix_cache=False, clock=clock)
    engine.scheduler.cost = KnownCost(TIMER.weights)
    runner.scheduler = engine.scheduler
    coming = load()
    while coming or engine.scheduler.has_work:
        if not engine.scheduler.has_work:
            clock.now = max(clock.now, coming[0].at_s)
        while coming and coming[0].at_s <= clock.now:
            request = coming.pop(0)
            sampling = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
            prompt = tuple(range(1, request.num_input + 1))
            asked = Request("r", prompt, sampling, timeout_s=600.0, received_at=request.at_s)
            engine.submit(str(request.number), asked, [])
        engine.step()
    return runner.batches, engine.scheduler.num_preemptions


def simulated_batches(config: SchedulerConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, int]:
    batches: Rows = []
    schedule = Scheduler.schedule
    simulation: Simulation = cluster(
        {"mixed": {"replicas": 1}}, timer=TIMER, num_blocks=NUM_BLOCKS, scheduler=config, max_requests=100
    )

    def recorded(scheduler: Scheduler, now: float) -> Batch:
        batch = schedule(scheduler, now)
        if batch:
            batches.append(rows_of(simulation.now, batch))
        return batch

    monkeypatch.setattr("diptych.cluster.simulate.worker.SimulatedWorker._num_alike", lambda *_: 1)
    monkeypatch.setattr(Scheduler, "schedule", recorded)
    simulation.run(load())
    monkeypatch.undo()
    return batches, sum(worker.scheduler.num_preemptions for worker in simulation.alive.values())


@pytest.mark.parametrize("chunk_tokens", [0, 24])
@pytest.mark.parametrize("max_running", [4, 64])
def test_the_batches_are_the_engines(monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, max_running: int) -> None:
    config = SchedulerConfig(
        max_batch_tokens=96, chunk_tokens=chunk_tokens, max_running=max_running, target_step_s=0, ttft_s=1.0
    )
    expected, num_preemptions = engine_batches(config)
    found, num_simulated = simulated_batches(config, monkeypatch)
    assert len(expected) > 100
    assert [(decodes, rows) for _, decodes, rows in found] == [(decodes, rows) for _, decodes, rows in expected]
    assert [at for at, _, _ in found] == pytest.approx([at for at, _, _ in expected])
    assert num_simulated == num_preemptions
