"""Grammars in steps ahead of the CUDA engine, on a fake device: the tokens of an engine on CPU, in lockstep."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from diptych.workers.common.request import Grammar, GrammarKind, SamplingParams, ThoughtBudget
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import Batch, ScheduledSequence
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.grammar.compiler import CompiledGrammar, GrammarCompiler

from ....support.gpu.serving import early, late, load, steps_of
from ..test_drafts import GREEDY, SEEDED, TINY, generate, ids
from .test_gpu_steps import sequence_of

FORM = Grammar(GrammarKind.REGEX, "[a-z]{2,9}( [a-z]+){3,5}!")
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type":"object","properties":{"identification":{"enum":["red","green"]},"occupation":{"type":"integer"}},'
    '"required":["identification","occupation"],"additionalProperties":false}',
)
LONG = Grammar(GrammarKind.REGEX, "[a-z ]{400}")
PLAIN, DRAWN = replace(GREEDY, ignore_eos=False), replace(SEEDED, ignore_eos=False)
SAMPLINGS: list[SamplingParams] = [
    *(replace(by, grammar=of) for by in (PLAIN, DRAWN) for of in (FORM, SCHEMA)),
    replace(DRAWN, grammar=FORM, min_tokens=12, presence_penalty=0.7, repetition_penalty=1.2),
    replace(DRAWN, grammar=SCHEMA, logprobs=2),
    replace(DRAWN, grammar=LONG, frequency_penalty=0.5, logit_bias={40: 3.0}),
    replace(PLAIN, thought=ThoughtBudget(5, 7, 9, is_open=True)),
    replace(DRAWN, presence_penalty=0.5, logprobs=1),
    DRAWN,
]
MAX_RUNNING = 7


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler.of_folder(TINY, 2048, (3, 2))


@pytest.fixture(scope="module")
def expected(grammars: GrammarCompiler) -> dict[str, list[int]]:
    return ids(generate(load(TINY, None, max_running=MAX_RUNNING), SAMPLINGS, grammars=grammars))


def num_waited_for(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step, whether it was launched while none was under way."""
    launch, found = runner.launch, list[bool]()

    def spied(batch: Batch, *args: Any) -> Any:
        found.append(not batch.previous_entries)
        return launch(batch, *args)

    monkeypatch.setattr(runner, "launch", spied)
    return found


@pytest.fixture(scope="module")
def runner_of() -> Callable[[Callable[[], FakeDevice], bool], ModelRunner]:
    """Of a kind of device, with graphs or without."""
    return cache(lambda make, graphs: load(TINY, make(), max_running=MAX_RUNNING, cuda_graphs=graphs))


CONFIGS = [{}, {"chunk_tokens": 9}, {"max_batch_tokens": 16}]


@pytest.mark.parametrize(
    ("make", "graphs", "config"),
    [  # each pair of these is in the half that is not long
        pytest.param(make, graphs, config, marks=pytest.mark.long if (i + graphs + k) % 2 else ())
        for i, make in enumerate((early, late))
        for graphs in (True, False)
        for k, config in enumerate(CONFIGS)
    ],
)
def test_tokens_with_grammars_are_those_on_cpu(
    make: Callable[[], FakeDevice],
    graphs: bool,
    config: dict[str, int],
    runner_of: Callable[[Callable[[], FakeDevice], bool], ModelRunner],
    grammars: GrammarCompiler,
    expected: dict[str, list[int]],
) -> None:
    found = generate(runner_of(make, graphs), SAMPLINGS, grammars=grammars, max_running=MAX_RUNNING, **config)
    assert ids(found) == expected


@pytest.fixture(scope="module")
def beside(grammars: GrammarCompiler) -> Callable[[int], tuple[list[SamplingParams], dict[str, list[int]]]]:
    """Of a number of grammars beside others: samplings, and the tokens on CPU."""

    @cache
    def find(num_grammars: int) -> tuple[list[SamplingParams], dict[str, list[int]]]:
        samplings = [replace(DRAWN, max_tokens=60, grammar=LONG)] * num_grammars
        samplings += [replace(GREEDY, max_tokens=60)] * (MAX_RUNNING - num_grammars)
        return samplings, ids(generate(load(TINY, None, max_running=MAX_RUNNING), samplings, grammars=grammars))

    return find


@pytest.mark.parametrize("num_grammars", [1, MAX_RUNNING])
@pytest.mark.parametrize("make", [late, early])
def test_the_device_waits_for_no_grammar(
    make: Callable[[], FakeDevice],
    num_grammars: int,
    runner_of: Callable[[Callable[[], FakeDevice], bool], ModelRunner],
    beside: Callable[[int], tuple[list[SamplingParams], dict[str, list[int]]]],
    grammars: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (samplings, expected), runner = beside(num_grammars), runner_of(make, True)
    waited = num_waited_for(runner, monkeypatch)
    found = generate(runner, samplings, grammars=grammars, max_running=MAX_RUNNING)
    assert sum(waited[:49]) == 1 and len(waited) > 60 - 5
    assert ids(found) == expected


def bound_to(grammar: CompiledGrammar, sampling: SamplingParams, prompt: list[int]) -> Any:
    sequence = sequence_of(prompt, num_blocks=4)
    sequence.request = replace(sequence.request, sampling=sampling)
    sequence.matcher = grammar.matcher(lambda error: None)
    return sequence


@pytest.mark.parametrize("make", [late, early])
def test_a_step_that_is_dropped_before_it_is_sampled_leaves_nothing_behind(
    make: Callable[[], FakeDevice], grammars: GrammarCompiler
) -> None:
    """Its host buffers are written again only after its logits are computed, and its matcher is where it was."""
    device = make()
    runner, compiled = load(TINY, device), grammars.compile(LONG)
    sequence = bound_to(compiled, replace(PLAIN, grammar=LONG), list(range(7, 22)))
    first = runner.launch(Batch([ScheduledSequence(sequence, 15)]))
    first.sample(lambda _: True)
    fed = runner.launch(Batch([ScheduledSequence(sequence, 1)], 1, previous_entries=[0]))
    assert steps_of(runner)._waiting is fed
    [token] = first.tokens()
    fed.abandon()
    assert all(not lane._queue or lane.name != "main" for lane in device.lanes)
    sequence.num_computed = 15
    sequence.token_ids.append(token.token_id)
    again = runner.launch(Batch([ScheduledSequence(sequence, 1)], 1)).tokens()
    twin = bound_to(compiled, replace(PLAIN, grammar=LONG), [*range(7, 22)])
    on_cpu = load(TINY, None)
    [first_twin] = on_cpu.launch(Batch([ScheduledSequence(twin, 15)])).tokens()
    twin.num_computed = 15
    twin.token_ids.append(first_twin.token_id)
    assert token.token_id == first_twin.token_id
    assert again[0].token_id == on_cpu.launch(Batch([ScheduledSequence(twin, 1)], 1)).tokens()[0].token_id
    runner.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[ModelRunner]:
    """Two ranks."""
    config = WorkerConfig.of(
        TINY, dtype="float32", kv_memory_bytes=4 << 20, max_context_tokens=512, cpu_isa="none", max_running=MAX_RUNNING
    )
    runner = ModelRunner.load(config.changed(tensor_parallel=2, threads=1), gpu=FakeDevice())
    yield runner
    runner.close()


def test_ranks_keep_one_order(ranks: ModelRunner, grammars: GrammarCompiler, expected: dict[str, list[int]]) -> None:
    found = generate(ranks, SAMPLINGS, grammars=grammars, max_running=MAX_RUNNING, chunk_tokens=9)
    assert ids(found) == expected


def test_ranks_get_the_tokens_of_a_step_that_is_dropped(ranks: ModelRunner, grammars: GrammarCompiler) -> None:
    """They wait for them, and would take the next step's for them."""
    compiled, chosen = grammars.compile(LONG), list[int]()
    for _ in range(2):
        sequence = bound_to(compiled, replace(PLAIN, grammar=LONG), list(range(7, 22)))
        first = ranks.launch(Batch([ScheduledSequence(sequence, 15)]))
        first.sample(lambda _: True)
        fed = ranks.launch(Batch([ScheduledSequence(sequence, 1)], 1, previous_entries=[0]))
        chosen.append(first.tokens()[0].token_id)
        fed.abandon()
    assert chosen[0] == chosen[1]
