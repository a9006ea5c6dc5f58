"""Workers that keep KV as kivi: full blocks in 4 bits, the last tokens at full width in the KV tail (kv/dtypes.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import ConfigError, OutOfDeviceMemory
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.runner import InFlightStep
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import AttentionSpec
from diptych.workers.models.plan.kv_plan import check_kv_dtype

from ...support.checkpoints import make_checkpoint, random_prompts
from ...support.drafters import KnowingDrafter, of_cases
from ...support.engines import run, tokens
from ...support.harness import TINY
from ..conftest import CheckpointOf

LENGTHS = (1, 31, 32, 33, 63, 90, 150)
PROMPTS = random_prompts(3, LENGTHS)
MAX_TOKENS = 40
BY_TORCH = {"cpu_isa": "none"}
ON_GPU = {"device": "fake", "max_running": 16}  # whose kernels are torch's, on CPU
EAGERLY = ON_GPU | {"cuda_graphs": False}
BACKENDS = [{}, BY_TORCH, EAGERLY]
Answers = list[list[int]]


def load(path: Path = TINY, **settings: Any) -> ModelRunner:
    common = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 32 << 20, "max_context_tokens": 256}
    return ModelRunner.load(WorkerConfig.of(path, **(common | {"kv_dtype": "kivi", "block_size": 32} | settings)))


def submit(engine: Engine, prompts: Answers, num: int = 1, name: str = "0") -> list[str]:
    keys: list[str] = []
    for i, prompt in enumerate(prompts):
        for seed in range(num):
            keys.append(f"{name}/{i}/{seed}")
            sampling = SamplingParams(temperature=float(num > 1), seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True)
            engine.submit(keys[-1], Request(keys[-1], tuple(prompt), sampling, 600.0), [])
    return keys


def generate(engine: Engine, prompts: Answers, *, num: int = 1, name: str = "0") -> Answers:
    """Answers to `num` requests with each prompt, all at once; greedy where there is one, else of a seed each."""
    keys = submit(engine, prompts, num, name)
    outputs = run(engine)
    assert engine.check_integrity().num_unaccounted_blocks == 0
    return [[token.token_id for token in tokens(outputs, key)] for key in keys]


def answers(runner: ModelRunner, prompts: Answers = PROMPTS, num: int = 1, **config: Any) -> Answers:
    return generate(Engine(runner, SchedulerConfig(**config)), prompts, num=num)


def alone(runner: ModelRunner, prompts: Answers = PROMPTS, num: int = 1) -> Answers:
    engines = (Engine(runner, SchedulerConfig(), prefix_cache=False) for _ in prompts)
    return [
        tokens
        for engine, prompt in zip(engines, prompts, strict=True)
        for tokens in generate(engine, [prompt], num=num)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        BY_TORCH,
        ON_GPU | {"kv_axis_order": "layer"},
        {"dtype": "bfloat16", "kv_axis_order": "layer"},
        {"look_ahead": True},
        {"tensor_parallel": 2},
        ON_GPU | {"tensor_parallel": 2, "max_running": 8},
    ],
    ids=str,
)
def test_tokens_are_a_requests_own(settings: dict[str, Any]) -> None:
    """Whatever the chunks, the company, and what the prefix cache has."""
    runner = load(**settings)
    expected = alone(runner)
    assert answers(runner) == expected
    assert answers(runner, chunk_tokens=16, max_running=3) == expected
    assert answers(runner, chunk_tokens=7) == expected
    engine = Engine(runner, SchedulerConfig())
    assert generate(engine, PROMPTS) == expected
    assert generate(engine, PROMPTS, name="again") == expected and engine.scheduler.prompts.num_cached > 0
    runner.close()


@pytest.mark.parametrize("settings", BACKENDS, ids=str)
def test_nothing_is_rounded_before_a_block_is_full(settings: dict[str, Any]) -> None:
    found, full = (answers(load(**settings | of)) for of in ({}, {"kv_dtype": "auto"}))
    assert found[0][:32] == full[0][:32] and found != full


def test_the_compiled_kernels_and_torch_give_the_same_tokens() -> None:
    found, expected = (answers(load(**settings)) for settings in ({}, BY_TORCH))
    equal = sum(a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))
    assert equal >= 0.9 * MAX_TOKENS * len(PROMPTS)


@pytest.mark.parametrize("settings", [ON_GPU, EAGERLY], ids=str)
def test_a_device_gives_the_tokens_of_torch_on_cpu(settings: dict[str, Any]) -> None:
    """In chunks, from the prefix cache, with drafts, and in steps that are launched ahead."""
    expected = alone(load(**BY_TORCH))
    runner = load(**settings)
    for config in ({}, {"chunk_tokens": 7}, {"chunk_tokens": 40, "max_running": 3}):
        engine = Engine(runner, SchedulerConfig(**config))
        assert generate(engine, PROMPTS) == expected
        assert generate(engine, PROMPTS, name="again") == expected and engine.scheduler.prompts.num_cached > 0
    drafter = KnowingDrafter(0.8, num_tokens=9, answer=of_cases(zip(PROMPTS, expected, strict=True)))
    drafting = load(**settings, speculation="ngram", max_draft_tokens=9)
    assert generate(Engine(drafting, SchedulerConfig(), drafter=drafter), PROMPTS) == expected
    assert 0 < drafter.counts["accepted"] < drafter.counts["drafted"]


@pytest.mark.parametrize(
    "arch", [*(pytest.param(arch, marks=pytest.mark.long) for arch in ("gptoss", "gemma2")), "gemma4"]
)
def test_a_device_gives_the_tokens_of_torch_on_cpu_of_every_family(tmp_path: Path, arch: str) -> None:
    """Windows, sinks, softcaps, layers that are unlike, layers that read another one's KV; of sampled rows alone."""
    dims = {"head_dim": 32} | ({"global_head_dim": 64} if arch == "gemma4" else {})
    path = make_checkpoint(tmp_path / arch, arch, seed=5, **dims)
    prompts = random_prompts(6, [31, 64, 100], 500)
    expected = answers(load(path, **BY_TORCH), prompts, chunk_tokens=48)
    for settings in (ON_GPU | {"max_running": 4}, EAGERLY):
        assert answers(load(path, **settings), prompts, chunk_tokens=48) == expected


@pytest.mark.parametrize("settings", BACKENDS, ids=str)
@pytest.mark.parametrize("chance", [0.5, 0.9])
def test_drafts_change_no_token(settings: dict[str, Any], chance: float) -> None:
    """Rejected ones have filled blocks, which are rounded anew."""
    runner = load(**settings, speculation="ngram", max_draft_tokens=9)
    expected = alone(runner)
    drafter = KnowingDrafter(chance, num_tokens=9, answer=of_cases(zip(PROMPTS, expected, strict=True)))
    assert generate(Engine(runner, SchedulerConfig(), drafter=drafter), PROMPTS) == expected
    assert 0 < drafter.counts["accepted"] < drafter.counts["drafted"]


@pytest.mark.parametrize("settings", BACKENDS, ids=str)
def test_answers_to_one_prompt_share_its_full_blocks(settings: dict[str, Any]) -> None:
    runner, prompt = load(**settings), random_prompts(4, [75])
    together = answers(runner, prompt, num=3)
    assert together == alone(runner, prompt, num=3) and together[0] != together[1]


@pytest.mark.parametrize("settings", BACKENDS, ids=str)
def test_preempted_sequences_are_computed_again(settings: dict[str, Any]) -> None:
    prompts = random_prompts(5, [90, 100, 110, 120, 130])
    runner = load(**settings, kv_memory_bytes=200 << 10)
    engine = Engine(runner, SchedulerConfig())
    assert generate(engine, prompts) == alone(load(**settings), prompts)
    assert engine.scheduler.num_preemptions > 0


class FailingStep:
    """Step that is computed, and then has too little memory."""

    def __init__(self, step: InFlightStep) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def tokens(self) -> list[SampledToken]:
        self._step.tokens()
        raise OutOfDeviceMemory("it has failed")


@pytest.mark.parametrize("settings", BACKENDS, ids=str)
def test_decodes_of_a_step_that_failed_are_computed_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that it had filled, and rounded, are filled once more."""
    runner, launch = load(**settings), ModelRunner.launch
    expected, outputs = alone(runner), list[StepOutput]()
    engine = Engine(runner, SchedulerConfig())
    submit(engine, PROMPTS)
    for i in range(60):
        fails = i >= 4 and i % 4 == 0
        if fails:
            monkeypatch.setattr(ModelRunner, "launch", lambda *given: FailingStep(launch(*given)))
            submit(engine, PROMPTS[3:4], name=f"late-{i}")
        if engine.scheduler.has_work:
            outputs.append(engine.step())
        monkeypatch.setattr(ModelRunner, "launch", launch)
    assert sum(len(output.failures) for output in outputs) >= 9
    assert [[token.token_id for token in tokens(outputs, f"0/{i}/0")] for i in range(len(PROMPTS))] == expected


def test_the_tail_takes_few_blocks() -> None:
    """Sequences that have ended give theirs back, and so do those whose prompts are computed."""
    runner = load(kv_memory_bytes=64 << 20)
    steps: Any = runner.backend
    for name in range(6):
        generate(Engine(runner, SchedulerConfig(chunk_tokens=64)), random_prompts(name, [150] * 8), name=str(name))
    assert steps.steps._tail.num_assigned <= 2 * 8 + 64 // 32 + 8


def test_what_it_does_not_work_with_is_refused(checkpoint_of: CheckpointOf) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype kivi needs a block_size of 32, .* it is 16: set block_size to 32"):
        load(block_size=16)
    with pytest.raises(ConfigError, match="kv_dtype kivi does not work with latent attention"):
        load(checkpoint_of("deepseek-v2"))
    with pytest.raises(ConfigError, match="kivi does not work with sparse_attention"):
        load(sparse_attention="quest")
    with pytest.raises(ConfigError, match=r"kivi does not work with a model that drafts.* ngram or suffix"):
        load(speculation="draft", draft_model=str(TINY))
    spec = load_spec(TINY)
    layer = spec.layers[0]
    assert isinstance(layer.attention, AttentionSpec)
    odd = replace(spec, layers=(replace(layer, attention=replace(layer.attention, head_dim=48)),))
    with pytest.raises(ConfigError, match=r"kv_dtype kivi needs heads of a multiple of 32 numbers, .* have 48"):
        check_kv_dtype(odd, "kivi", 32, on_gpu=False)
