"""Drafts on the CUDA engine, on a fake device: the tokens of an engine on CPU that has none, in graphs and without."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.errors import InternalError
from diptych.workers.common.request import Grammar, GrammarKind
from diptych.workers.core.runner import InFlightStep, LayerWatch
from diptych.workers.core.sequence import Batch, DraftEntry, ScheduledSequence
from diptych.workers.engine.events import TokenEvent
from diptych.workers.execution.gpu.buckets import token_buckets
from diptych.workers.execution.gpu.decode_graphs import queries_at_once
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.grammar.compiler import GrammarCompiler
from diptych.workers.models.families.registry import load_spec

from ....support.drafters import KnowingDrafter, of_outputs
from ....support.gpu.serving import early, late, load, steps_of
from ...conftest import CheckpointOf
from ..test_drafts import GREEDY, SAMPLINGS, SEEDED, TINY, generate, ids
from .test_gpu_steps import sequence_of

MAX_RUNNING = 4


def drafting(path: Path, device: Any, max_draft_tokens: int = 5, **changes: Any) -> ModelRunner:
    """Runner whose buffers and graphs have room for drafts."""
    settings = {"speculation": "ngram", "max_draft_tokens": max_draft_tokens, "max_running": MAX_RUNNING}
    return load(path, device, **(settings | changes))


@contextmanager
def spied(runner: ModelRunner) -> Iterator[list[tuple[int, int]]]:
    """(bucket, rows that attend together) of each decode graph that is launched."""
    graphs, found = steps_of(runner)._own.graphs, list[tuple[int, int]]()
    forward = graphs.forward

    def spy(bucket: int, max_queries: int, is_sparse: bool) -> None:
        found.append((bucket, max_queries))
        forward(bucket, max_queries, is_sparse)

    graphs.forward = spy
    yield found
    graphs.forward = forward


@pytest.fixture(scope="module")
def on_cpu(llama: Path) -> ModelRunner:
    return load(llama, None)


@pytest.fixture(scope="module", params=[late, early])
def runner(llama: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return drafting(llama, request.param())


@pytest.fixture(scope="module")
def plain_of(on_cpu: ModelRunner) -> Callable[[str], dict[str, list[TokenEvent]]]:
    """Answers to eight prompts with a sampling."""
    return cache(lambda name: generate(on_cpu, [SAMPLINGS[name]] * 8))


@pytest.mark.parametrize(
    ("runner", "name", "chance"),
    [  # each pair of these is in the half that is not long
        pytest.param(make, name, chance, marks=pytest.mark.long if (i + j + k) % 2 else ())
        for i, make in enumerate((late, early))
        for j, name in enumerate(SAMPLINGS)
        for k, chance in enumerate((0.0, 0.7, 1.0))
    ],
    indirect=["runner"],
)
def test_drafts_change_no_token_of_any_sampling(
    plain_of: Callable[[str], dict[str, list[TokenEvent]]], runner: ModelRunner, name: str, chance: float
) -> None:
    """Rejected whole, in part, and accepted whole; prompts in chunks beside them."""
    samplings, plain = [SAMPLINGS[name]] * 8, plain_of(name)
    drafter = KnowingDrafter(chance, 5, of_outputs(ids(plain)))
    with spied(runner) as graphs:
        drafted = generate(runner, samplings, drafter, chunk_tokens=40, max_running=MAX_RUNNING)
    assert ids(drafted) == ids(plain)
    for key, events in drafted.items():
        for event, expected in zip(events, plain[key], strict=True):
            assert event.finish == expected.finish
            assert [token for token, _ in event.top] == [token for token, _ in expected.top]
            assert event.logprob == (expected.logprob and pytest.approx(expected.logprob, abs=1e-4))
    assert drafter.counts["drafted"] > 50
    assert max(queries for _, queries in graphs) == 4  # of float32, 4 heads for each KV head
    if chance == 1.0:
        assert drafter.counts["accepted"] > 0.6 * drafter.counts["drafted"]


@pytest.fixture(scope="module")
def unlike(on_cpu: ModelRunner) -> dict[str, list[int]]:
    """Answers with unlike samplings beside each other."""
    return ids(generate(on_cpu, list(SAMPLINGS.values())))


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}, {"max_running": 7}, {"max_running": 1}])
def test_drafts_of_sixteen_tokens(llama: Path, unlike: dict[str, list[int]], changes: dict[str, Any]) -> None:
    """Their 17 rows are more than attend together."""
    device, samplings = early(), list(SAMPLINGS.values())
    runner = drafting(llama, device, 16, **changes)
    for alone in (False, True):
        drafter = KnowingDrafter(0.8, 16, of_outputs(unlike))
        with spied(runner) as graphs:
            running = changes.get("max_running", MAX_RUNNING)
            assert ids(generate(runner, samplings, drafter, alone=alone, max_running=running)) == unlike
        assert drafter.counts["accepted"] > 20
        assert max((queries for _, queries in graphs), default=0) == (0 if "cuda_graphs" in changes else 4)
    assert bool(device.num_captured) is ("cuda_graphs" not in changes)


def test_large_prompts_beside_a_graph_with_drafts(
    llama: Path, runner: ModelRunner, unlike: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph has the decodes, and drafts where no run stands between; its logits come before those of prompts."""
    own, beside = steps_of(runner)._own, list[tuple[int, int]]()
    monkeypatch.setattr(own.prompts, "_buckets", token_buckets(8))
    launch = runner.launch

    def spied_launch(batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        if batch.drafts and batch.num_prefill_tokens:
            beside.append((batch.num_decodes, len(batch.drafts)))
        return launch(batch, watch)

    monkeypatch.setattr(runner, "launch", spied_launch)
    drafter = KnowingDrafter(0.5, 3, of_outputs(unlike))
    samplings = list(SAMPLINGS.values())
    assert ids(generate(runner, samplings, drafter, chunk_tokens=9, max_running=MAX_RUNNING)) == unlike
    assert beside and drafter.counts["accepted"] > 20


@pytest.mark.parametrize("arch", ["qwen3-windows", "gemma3", "gptoss", "mixtral", "gemma4"])
def test_other_attentions_and_experts(checkpoint_of: CheckpointOf, arch: str) -> None:
    """Windows, sinks and mixtures; layers that compute the sampled rows alone."""
    assert_same_with_drafts(checkpoint_of(arch))


def test_latent_attention(latent_of: CheckpointOf) -> None:
    assert_same_with_drafts(latent_of("deepseek-v3"))


def assert_same_with_drafts(path: Path) -> None:
    samplings = [GREEDY, SEEDED, replace(SEEDED, presence_penalty=0.5)] * 2
    plain = ids(generate(load(path, None), samplings))
    runner = drafting(path, late())
    drafter = KnowingDrafter(0.8, 5, of_outputs(plain))
    with spied(runner) as graphs:
        assert ids(generate(runner, samplings, drafter, chunk_tokens=50, max_running=MAX_RUNNING)) == plain
    assert drafter.counts["accepted"] > 20 and max(queries for _, queries in graphs) > 1


def test_rows_attend_together_as_far_as_a_tile_of_the_kernel_holds_them(llama: Path, latent_of: CheckpointOf) -> None:
    """Of a model with 64 heads for one latent a row fills a tile: drafts are in the graphs of decodes."""
    spec, latent = load_spec(llama), load_spec(latent_of("deepseek-v3"))
    assert [queries_at_once(spec, num, 2) for num in (0, 1, 5, 16)] == [1, 2, 6, 16]
    assert queries_at_once(spec, 16, 4) == 4
    layers = [replace(layer, attention=replace(layer.attention, num_heads=64)) for layer in latent.layers]
    assert queries_at_once(replace(latent, layers=tuple(layers)), 5, 2) == 1


@pytest.mark.parametrize(("most", "queries"), [(1, {1}), (64, {1, 6})])
def test_rows_that_attend_one_by_one_and_all_together(
    llama: Path, unlike: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, most: int, queries: set[int]
) -> None:
    monkeypatch.setattr("diptych.workers.execution.gpu.decode_graphs.tile_rows", lambda *_: most)
    runner, drafter = drafting(llama, late()), KnowingDrafter(0.8, 5, of_outputs(unlike))
    with spied(runner) as graphs:
        answers = generate(runner, list(SAMPLINGS.values()), drafter, max_running=MAX_RUNNING)
    assert ids(answers) == unlike and drafter.counts["accepted"] > 20
    assert max(graphs)[0] > MAX_RUNNING and {together for _, together in graphs} <= queries
    assert max(together for _, together in graphs) == max(queries)


@pytest.mark.parametrize("graphs", [True, False])
def test_grammars(graphs: bool) -> None:
    """What was drafted wrong, or what the grammar does not allow, leaves no trace in the grammar's state."""
    grammars = GrammarCompiler.of_folder(TINY, 2048, (3, 2))
    form = Grammar(GrammarKind.REGEX, "[a-z]{2,9}( [a-z]+){3,5}!")
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"enum":["red","green","blue"]},"minItems":4}')
    greedy, seeded = replace(GREEDY, ignore_eos=False), replace(SEEDED, ignore_eos=False)
    samplings = [replace(by, grammar=of) for by in (greedy, seeded) for of in (form, schema)]
    samplings += [replace(seeded, grammar=form, min_tokens=12), replace(seeded, grammar=form, logprobs=1), seeded]
    plain = ids(generate(load(TINY, None, max_running=7), samplings, grammars=grammars))
    runner = drafting(TINY, late(), max_running=7, cuda_graphs=graphs)
    for chance in (0.0, 0.8, 1.0):
        drafter = KnowingDrafter(chance, 5, of_outputs(plain))
        assert ids(generate(runner, samplings, drafter, grammars=grammars, max_running=7)) == plain
        assert (drafter.counts["accepted"] > 20) is (chance > 0)


def verify(runner: ModelRunner, prompt: list[int], draft: list[int], stop_ids: Sequence[int] = ()) -> list[int]:
    """Compute a prompt, then a step that verifies a draft after its first token; return what that yields."""
    sequence = sequence_of(prompt, num_blocks=4)
    sequence.stop_ids = frozenset(stop_ids)
    [first] = runner.launch(Batch([ScheduledSequence(sequence, len(prompt))])).tokens()
    sequence.num_computed = len(prompt)
    sequence.token_ids.append(first.token_id)
    entry = DraftEntry(sequence, 1 + len(draft), draft, "known")
    tokens = runner.launch(Batch.of([entry], 0, num_runs=1)).tokens()
    assert entry.yielded == [token.token_id for token in tokens]
    return entry.yielded


def test_what_a_step_yields_of_a_draft(runner: ModelRunner, on_cpu: ModelRunner) -> None:
    """Rejected whole, in part, accepted whole; cut after a token that ends the sequence, whatever follows."""
    prompt = list(range(7, 40))
    sequence = sequence_of(prompt, num_blocks=4)
    while sequence.num_output < 6:
        [token] = on_cpu.launch(Batch([ScheduledSequence(sequence, sequence.num_uncomputed)])).tokens()
        sequence.num_computed = sequence.num_tokens
        sequence.token_ids.append(token.token_id)
    _, *right = sequence.output_token_ids
    wrong = [(token + 1) % 100 for token in right]
    assert verify(runner, prompt, wrong[:4]) == right[:1]
    assert verify(runner, prompt, right[:2] + wrong[2:4]) == right[:3]
    assert verify(runner, prompt, right[:4]) == right[:5]
    num = right.index(right[2]) + 1
    assert verify(runner, prompt, right[:4], stop_ids=[right[2]]) == right[:num]


def test_a_step_that_the_buffers_cannot_hold_is_refused(llama: Path) -> None:
    runner = load(llama, late(), max_running=2, cuda_graphs=False)
    sequence = sequence_of([1], num_blocks=1)
    with pytest.raises(InternalError, match="drafts 2 tokens, but the buffers hold 2 rows"):
        runner.launch(Batch.of([DraftEntry(sequence, 3, [4, 5], "known")], 0, num_runs=1))
