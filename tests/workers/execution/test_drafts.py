"""Answers with drafts are those without, token for token: models, backends, samplers, grammars, ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.request import Grammar, GrammarKind, Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.drafting import Drafter
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import TokenEvent
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.grammar.compiler import GrammarCompiler

from ...support.checkpoints import random_prompts
from ...support.drafters import KnowingDrafter, of_outputs
from ...support.engines import assert_clean, run, tokens
from ..conftest import CheckpointOf

TINY = Path(__file__).parents[3] / "examples" / "tiny"
LENGTHS = (1, 5, 16, 17, 40, 63, 100, 130)
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filtered": replace(SEEDED, temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
    "penalties": replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "bias": replace(GREEDY, logit_bias={7: 3.0, 9: -100.0, 11: 2.5}),
    "min_tokens": replace(SEEDED, min_tokens=9, stop_token_ids=tuple(range(0, 500, 25)), ignore_eos=False),
    "log-probabilities": replace(SEEDED, logprobs=3),
}


def load(path: Path, **changes: Any) -> ModelRunner:
    return ModelRunner.load(WorkerConfig.of(path, dtype="float32", max_context_tokens=256).changed(**changes))


def generate(
    runner: ModelRunner,
    samplings: Sequence[SamplingParams],
    drafter: Drafter | None = None,
    *,
    alone: bool = False,
    grammars: GrammarCompiler | None = None,
    **config: Any,
) -> dict[str, list[TokenEvent]]:
    """Answers to a prompt for each sampling; `alone`: one after the other."""
    prompts = random_prompts(3, LENGTHS, runner.info.vocab_size)
    engine = Engine(runner, SchedulerConfig(**config), drafter=drafter)
    found: dict[str, list[TokenEvent]] = {}
    for i, sampling in enumerate(samplings):
        key = f"0/{i}"
        request = Request(key, tuple(prompts[i % len(prompts)]), replace(sampling, seed=sampling.seed + i), 60.0)
        grammar = grammars.compile(sampling.grammar) if grammars and sampling.grammar else None
        engine.submit(key, request, [], grammar=grammar)
        if alone:
            found[key] = tokens(run(engine), key)
    if not alone:
        outputs = run(engine)
        found = {f"0/{i}": tokens(outputs, f"0/{i}") for i in range(len(samplings))}
    assert_clean(engine)
    return found


def ids(answers: dict[str, list[TokenEvent]]) -> dict[str, list[int]]:
    return {key: [event.token_id for event in events] for key, events in answers.items()}


@pytest.fixture(scope="module")
def compiled(llama: Path) -> ModelRunner:
    return load(llama)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_token_of_any_sampling(compiled: ModelRunner, name: str) -> None:
    runner, samplings = compiled, [SAMPLINGS[name]] * 8
    plain = generate(runner, samplings)
    for chance in (0.0, 0.7, 1.0):
        drafter = KnowingDrafter(chance, 5, of_outputs(ids(plain)))
        drafted = generate(runner, samplings, drafter, chunk_tokens=40)
        assert ids(drafted) == ids(plain)
        for key, events in drafted.items():
            for event, expected in zip(events, plain[key], strict=True):
                assert event.finish == expected.finish
                assert [token for token, _ in event.top] == [token for token, _ in expected.top]
                assert event.logprob == (expected.logprob and pytest.approx(expected.logprob, abs=1e-4))
        assert drafter.counts["drafted"] > 50
        if chance == 1.0:
            assert drafter.counts["accepted"] > 0.6 * drafter.counts["drafted"]


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_unlike_samplings_beside_each_other_and_alone(llama: Path, isa: str) -> None:
    runner, samplings = load(llama, cpu_isa=isa), list(SAMPLINGS.values())
    plain = ids(generate(runner, samplings))
    for alone in (False, True):
        drafter = KnowingDrafter(0.8, 16, of_outputs(plain))
        assert ids(generate(runner, samplings, drafter, alone=alone)) == plain
        assert drafter.counts["accepted"] > 0


@pytest.mark.parametrize("arch", ["qwen3-windows", "gemma3", "gptoss", "deepseek-v3", "mixtral"])
def test_other_attentions_and_experts(checkpoint_of: CheckpointOf, arch: str) -> None:
    """Windows, sinks, latent attention and mixtures: a draft's rows attend as those of a prompt do."""
    runner = load(checkpoint_of(arch))
    samplings = [GREEDY, SEEDED] * 3
    plain = ids(generate(runner, samplings))
    drafter = KnowingDrafter(0.8, 5, of_outputs(plain))
    assert ids(generate(runner, samplings, drafter)) == plain
    assert drafter.counts["accepted"] > 20


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_over_ranks(llama: Path, isa: str) -> None:
    plain = ids(generate(load(llama, cpu_isa=isa), [GREEDY, SEEDED] * 2))
    runner = load(llama, cpu_isa=isa, tensor_parallel=2)
    try:
        drafter = KnowingDrafter(0.8, 5, of_outputs(plain))
        assert ids(generate(runner, [GREEDY, SEEDED] * 2, drafter)) == plain
        assert drafter.counts["accepted"] > 20
    finally:
        runner.close()


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_grammars(isa: str) -> None:
    """What was drafted wrong, or what the grammar does not allow, leaves no trace in the grammar's state."""
    runner, grammars = load(TINY, cpu_isa=isa), GrammarCompiler.of_folder(TINY, 2048, (3, 2))
    form = Grammar(GrammarKind.REGEX, "[a-z]{2,9}( [a-z]+){3,5}!")
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"enum":["red","green","blue"]},"minItems":4}')
    greedy, seeded = replace(GREEDY, ignore_eos=False), replace(SEEDED, ignore_eos=False)
    samplings = [replace(by, grammar=of) for by in (greedy, seeded) for of in (form, schema)]
    samplings += [replace(seeded, grammar=form, min_tokens=12), replace(seeded, grammar=form, logprobs=1), seeded]
    plain = ids(generate(runner, samplings, grammars=grammars))
    for chance in (0.0, 0.8, 1.0):
        drafter = KnowingDrafter(chance, 5, of_outputs(plain))
        assert ids(generate(runner, samplings, drafter, grammars=grammars)) == plain
        assert (drafter.counts["accepted"] > 20) is (chance > 0)
