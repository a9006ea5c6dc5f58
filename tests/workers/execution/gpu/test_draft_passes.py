"""Passes of drafts: launched without waiting, as graphs; where penalties count drafted tokens, read back one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.draft import Draft
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.common.draft_rows import DraftRows
from diptych.workers.execution.draft.draft_model import DraftModel
from diptych.workers.execution.draft.guarded_draft import GuardedDraft
from diptych.workers.execution.gpu.draft_passes import ModelPasses, PassChain
from diptych.workers.execution.gpu.rank_passes import ModelWork
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import random_prompts
from ....support.engines import assert_clean, run, tokens
from ....support.gpu.serving import early, late, load
from ...conftest import CheckpointOf
from ..draft.conftest import DraftOf
from ..draft.test_draft_model import GREEDY, PENALISED, SEEDED
from .test_models_draft_on_device import SETTINGS, untimed


def chain_of(runner: ModelRunner) -> PassChain:
    assert isinstance(runner.proposer, GuardedDraft)
    draft = runner.proposer.draft
    assert isinstance(draft, DraftModel) and isinstance(draft._decoder, ModelPasses)
    return draft._decoder.chain


@pytest.fixture(scope="module")
def make(checkpoint_of: CheckpointOf, draft_of: DraftOf) -> Callable[..., ModelRunner]:
    def made(device: Any, **changes: Any) -> ModelRunner:
        draft = {"speculation": "draft", "draft_model": str(draft_of("llama", 0.15))}
        return load(checkpoint_of("llama"), device, **(SETTINGS | draft | changes))

    return made


def answer(engine: Engine, samplings: Sequence[SamplingParams], vocab_size: int = 500) -> list[list[int]]:
    prompts = random_prompts(8, (3, 17, 30, 45), vocab_size)
    for i, sampling in enumerate(samplings):
        engine.submit(f"0/{i}", Request(str(i), tuple(prompts[i % 4]), sampling, 60.0), [])
    outputs = run(engine)
    assert_clean(engine)
    return [[event.token_id for event in tokens(outputs, f"0/{i}")] for i in range(len(samplings))]


@pytest.mark.parametrize("samplings", [[GREEDY, SEEDED], [GREEDY, PENALISED]], ids=["plain", "penalised"])
def test_passes_are_launched_before_those_before_them_are_computed(
    make: Callable[..., ModelRunner], samplings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two are under way, for there are two sets of host buffers. A penalty waits for each pass."""
    runner = make(late())
    chain, began, num_done = chain_of(runner), list[tuple[int, int]](), 0
    launch, compute = chain._launch, chain._pass

    def spied_launch(number: int, *of: Any) -> None:
        nonlocal num_done
        num_done = 0 if number == 0 else num_done
        began.append((number, num_done))
        launch(number, *of)

    def spied_pass(*of: Any) -> None:
        nonlocal num_done
        num_done += 1
        compute(*of)

    monkeypatch.setattr(chain, "_launch", spied_launch)
    monkeypatch.setattr(chain, "_pass", spied_pass)
    answer(untimed(runner, "draft"), samplings)
    assert max(number for number, _ in began) == 3
    is_plain = samplings[1] is SEEDED
    assert all(done == (max(number - 2, 0) if is_plain else number) for number, done in began)


@pytest.mark.parametrize("graphs", [True, False])
def test_passes_are_graphs(make: Callable[..., ModelRunner], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, launched = make(early(), cuda_graphs=graphs), list[int]()
    for name in ("first", "further"):
        work = getattr(ModelWork, name)
        monkeypatch.setattr(ModelWork, name, lambda *of, work=work: (launched.append(of[2]), work(*of)))
    answer(untimed(runner, "draft"), [GREEDY, SEEDED])
    assert bool(launched) is not graphs


def test_a_first_pass_that_does_not_fit_is_computed_in_parts(
    make: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences whose whole draft was accepted have two rows; here there is room for one of each, and one more."""
    samplings = [replace(GREEDY, max_tokens=20)] * 4
    expected, runner = answer(untimed(make(early()), "draft"), samplings), make(early(), cuda_graphs=False)
    chain, sizes = chain_of(runner), list[int]()
    monkeypatch.setattr(chain, "max_rows", 5)
    draft = chain.draft

    def spied(rows: DraftRows, *of: Any) -> list[Draft]:
        sizes.append(rows.num_rows - len(rows.sequences))
        return draft(rows, *of)

    monkeypatch.setattr(chain, "draft", spied)
    assert answer(untimed(runner, "draft"), samplings) == expected
    assert max(sizes) == 1


def test_drafts_for_which_there_is_too_little_memory_are_left_out(
    make: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    samplings, num_calls = [GREEDY, SEEDED, PENALISED], 0
    expected, runner = answer(untimed(make(early()), "draft"), samplings), make(late())
    chain = chain_of(runner)
    choose = chain._choose

    def failing(*of: Any, **how: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 11:
            raise torch.OutOfMemoryError("CUDA out of memory")
        choose(*of, **how)

    monkeypatch.setattr(chain, "_choose", failing)
    monkeypatch.setattr(chain, "_choices", {})
    engine = untimed(runner, "draft")
    assert answer(engine, samplings) == expected
    assert isinstance(runner.proposer, GuardedDraft)
    assert num_calls >= 11 and runner.proposer.num_failures == 1


def test_grammars_and_log_probabilities_are_left_to_the_verification(
    make: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that ask for log-probabilities alone are drafted as plain rows."""
    runner, plain = make(early()), list[bool]()
    chain = chain_of(runner)
    write = chain._sampler.write_drafts
    monkeypatch.setattr(chain._sampler, "write_drafts", lambda *of: plain.append(write(*of)) or plain[-1])
    answer(untimed(runner, "draft"), [replace(GREEDY, logprobs=3), replace(SEEDED, logprobs=1)])
    assert plain and all(plain)
