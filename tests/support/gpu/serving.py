"""A ModelRunner on a FakeDevice under a real Engine, and its expected tokens: those of eager_steps.py."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.drafting import Drafter
from diptych.workers.core.runner import InFlightStep, LayerWatch
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch
from diptych.workers.device.device import Device
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.execution.gpu import rank_steps
from diptych.workers.execution.gpu.gpu_steps import GpuSteps
from diptych.workers.execution.model_runner import ModelRunner

from ..checkpoints import untied_prompts
from ..engines import assert_clean, tokens

GRAPH_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)


def load(path: Path, gpu: Device | None, **changes: Any) -> ModelRunner:
    config = WorkerConfig.of(
        path, dtype="float32", kv_memory_bytes=4 << 20, max_context_tokens=512, cpu_isa="none", max_running=6
    )
    with FEW_CAPTURES:
        return ModelRunner.load(config.changed(**changes), gpu=gpu)


class FewCaptures:
    """Graphs of small steps alone while anybody loads: captures take time. Workers that share experts load on threads,
    and of two patches that overlap the last to end would leave the other's value."""

    def __init__(self) -> None:
        self._lock, self._num_loading, self._patches = Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_loading:
                self._patches.enter_context(patch.object(rank_steps, "GRAPH_TOKENS", GRAPH_TOKENS))
                self._patches.enter_context(patch.object(rank_steps, "MIXTURE_TIMES", 1))
            self._num_loading += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_loading -= 1
            if not self._num_loading:
                self._patches.close()


FEW_CAPTURES = FewCaptures()


Cases = tuple[Path, list[list[int]], list[list[int]]]  # prompts and transformers' greedy tokens
ALL_SORTS_OF_STEPS: list[dict[str, Any]] = [
    {},
    {"chunk_tokens": 7, "arrivals": [0, 1, 2, 3]},
    {"max_batch_tokens": 40, "arrivals": [3, 0, 2, 9]},
]


def cases_of(path: Path) -> Cases:
    found = untied_prompts(path, seed=5, lengths=[1, 15, 17, 100], max_tokens=GREEDY.max_tokens)
    return path, [prompt for prompt, _ in found], [tokens for _, tokens in found]


def assert_tokens(runner: ModelRunner, cases: Cases, config: dict[str, Any]) -> None:
    """config: one of ALL_SORTS_OF_STEPS."""
    _, prompts, expected = cases
    run = generate(runner, prompts, [GREEDY] * len(prompts), **config)
    assert run.token_ids == expected
    assert run.num_ahead > 5 and any(batch.previous_entries for batch in run.batches)


def steps_of(runner: ModelRunner) -> GpuSteps:
    assert isinstance(runner.backend, GpuSteps)
    return runner.backend


@dataclass
class Run:
    """Results of an engine's run."""

    token_ids: list[list[int]] = field(default_factory=list[list[int]])  # by request
    logprobs: list[list[float | None]] = field(default_factory=list[list[float | None]])
    num_ahead: int = 0  # steps after which another was running
    batches: list[Batch] = field(default_factory=list[Batch])


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    *,
    arrivals: Sequence[int] = (),
    drafter: Drafter | None = None,
    **config: Any,
) -> Run:
    """arrivals: the step in which each request comes; empty: all in the first."""
    run, engine = Run(), Engine(runner, SchedulerConfig(**config), drafter=drafter)
    launch = runner.launch

    def spied(batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        run.batches.append(batch)
        return launch(batch, watch)

    runner.launch = spied
    outputs: list[StepOutput] = []
    waiting = sorted(zip(arrivals or [0] * len(prompts), range(len(prompts)), strict=True))
    while waiting or engine.scheduler.has_work or engine.steps:
        while waiting and waiting[0][0] <= len(outputs):
            _, i = waiting.pop(0)
            engine.submit(f"0/{i}", Request(str(i), tuple(prompts[i]), samplings[i], 600.0), [])
        outputs.append(engine.step())
        assert not outputs[-1].failures
        run.num_ahead += bool(engine.steps)
    runner.launch = launch
    assert_clean(engine)
    events = [tokens(outputs, f"0/{i}") for i in range(len(prompts))]
    run.token_ids = [[e.token_id for e in of] for of in events]
    run.logprobs = [[e.logprob for e in of] for of in events]
    return run


def late() -> FakeDevice:
    return FakeDevice()


def early() -> FakeDevice:
    return FakeDevice(is_late=False)
