"""Measures scheduling and bookkeeping: the time of an engine's step less its runner's, which computes nothing.

    python -m benchmarks.engine.scheduler [--repeat 5] [--json FILE]

Microseconds per running request and step; all decode, each with a prompt of about 200 tokens, and in every step one
in 16 fills a block. Each figure is the least of `repeat` medians over 320 steps: time on the clock, for that of a
thread cannot be read finely everywhere. `waiting` requests are queued and cannot be admitted; `cached` blocks fill
the pool, so that a block that is taken is one that is forgotten. `mean` is over all steps, with whatever else ran.
"""

import argparse
import gc
import json
import mmap
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.runner import InFlightStep, LayerWatch, ModelInfo
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch, SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.kv.layout import KVLayout, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.ranks.step_executor import DeferredStep

BLOCK_SIZE = 16
NUM_PROMPT = 200
NUM_STEPS = 320
CACHED_PROMPT = 1600  # tokens of each prompt that fills the cache
VOCAB_SIZE = 50_000


@dataclass(frozen=True)
class Load:
    running: int = 256
    waiting: int = 0
    cached: int = 0  # blocks


class NullRunner:
    """Answers with token 7, in time that is not counted."""

    def __init__(self, num_blocks: int) -> None:
        self.info = ModelInfo("null", "Null", VOCAB_SIZE, min(num_blocks * BLOCK_SIZE, 1 << 16), (0,), "float32")
        self.layout = KVLayout("float32", BLOCK_SIZE, 1, num_kv_heads=1, head_dim=1, model_id="null")
        self._buffer = mmap.mmap(-1, 4096)
        self.memory = KVMemory(self.layout, num_blocks, Region(0, 4096, memoryview(self._buffer)))
        self.elapsed_s = 0.0

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        return DeferredStep(partial(self._compute, batch))

    def _compute(self, batch: Batch) -> list[SampledToken]:
        began = time.perf_counter()
        sampled = [SampledToken(entry.sequence, 7) for entry in batch.entries if entry.samples]
        self.elapsed_s = time.perf_counter() - began
        return sampled

    @property
    def proposer(self) -> None:
        return None

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return False

    def expert_tokens(self) -> None:
        """Return no counts: it has no experts."""

    def check(self) -> None:
        """Do nothing: no rank can be lost."""

    def close(self) -> None:
        pass


def submit(engine: Engine, number: int, num_prompt: int, max_tokens: int) -> None:
    """A prompt that no other begins like."""
    prompt = (number % VOCAB_SIZE, *[1 + number // VOCAB_SIZE] * (num_prompt - 1))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(f"0/{number}", Request(str(number), prompt, sampling, timeout_s=3600.0), [])


def prepare(load: Load, num_steps: int) -> tuple[Engine, NullRunner]:
    """An engine in whose next steps all of `load.running` decode."""
    blocks_each = -(-(NUM_PROMPT + BLOCK_SIZE) // BLOCK_SIZE)
    growth = 0 if load.cached else load.running * (num_steps // BLOCK_SIZE + 2)
    runner = NullRunner(load.cached + load.running * blocks_each + growth)
    engine = Engine(runner, SchedulerConfig(max_batch_tokens=1 << 16, max_running=load.running))
    number = 0
    while engine.manager.num_cached < load.cached:
        submit(engine, number, CACHED_PROMPT, 1)
        engine.step()
        number += 1
    for i in range(load.running):
        submit(engine, number + i, NUM_PROMPT + i % BLOCK_SIZE, 4 * num_steps)
    number += load.running
    engine.step()
    for i in range(load.waiting):
        submit(engine, number + i, NUM_PROMPT, 16)
    for _ in range(BLOCK_SIZE):
        engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (load.running, load.waiting)
    return engine, runner


@dataclass(frozen=True)
class Cost:
    """Microseconds per running request and step."""

    median: float
    mean: float


def measure(load: Load, num_steps: int = NUM_STEPS) -> Cost:
    engine, runner = prepare(load, num_steps)
    gc.collect()
    times: list[float] = []
    for _ in range(num_steps):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began - runner.elapsed_s)
    return Cost(*(1e6 * f(times) / load.running for f in (statistics.median, statistics.fmean)))


LOADS = {
    "64 running": Load(running=64),
    "256 running": Load(),
    "512 running": Load(running=512),
    "10,000 waiting": Load(waiting=10_000),
    "100,000 cached blocks": Load(cached=100_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[Cost]] = {name: [] for name in LOADS}
    for _ in range(args.repeat):
        for name, load in LOADS.items():
            runs[name].append(measure(load))
    costs = {name: min(cost.median for cost in costs) for name, costs in runs.items()}
    means = {name: min(cost.mean for cost in costs) for name, costs in runs.items()}
    print(f"{'':<24} {'median':>8} {'mean':>8}  us a request and step")
    for name in LOADS:
        print(f"{name:<24} {costs[name]:8.2f} {means[name]:8.2f}")
    base = costs["256 running"]
    ratios = {
        "512 running / 64 running, a step": 8 * costs["512 running"] / costs["64 running"],
        "10,000 waiting / none": costs["10,000 waiting"] / base,
        "100,000 cached / none": costs["100,000 cached blocks"] / base,
    }
    for name, ratio in ratios.items():
        print(f"{name:<34} {ratio:6.2f} x")
    if args.json:
        rows = [
            asdict(load) | {"name": name, "median_us": costs[name], "mean_us": means[name]}
            for name, load in LOADS.items()
        ]
        args.json.write_text(json.dumps({"costs": rows, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
