"""Drafts of models beside sparse attention: answers are those of sparse attention without drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.gpu import rank_steps
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import random_prompts
from ....support.engines import assert_clean, run, tokens
from ....support.gpu.serving import early
from .test_draft_model import EXAMPLES, GREEDY, PENALISED, SEEDED, Drafting, counts
from .test_self_draft import write

TINY = EXAMPLES / "tiny"
MODELS = {"draft": "tiny_draft", "eagle3": "tiny_eagle3", "mtp": "tiny_mtp"}
SPARSE = {"sparse_attention": "quest", "sparse_budget_tokens": 64}
LENGTHS = (20, 45, 60, 63, 64, 150, 300, 400)  # some reach the budget of 64 while they are drafted for
SAMPLINGS = (GREEDY, SEEDED, PENALISED, GREEDY)
Answers = list[list[int]]


def load(isa: str, **changes: Any) -> ModelRunner:
    config = WorkerConfig.of(TINY, dtype="float32", max_context_tokens=512, cpu_isa=isa, kv_memory_bytes=64 << 20)
    return ModelRunner.load(config.changed(**changes))


def answers(engine: Engine, asked: bool | None = None) -> Answers:
    for i, prompt in enumerate(random_prompts(3, LENGTHS, 2048)):
        sampling: SamplingParams = replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i)
        engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 60.0, sparse_attention=asked), [])
    outputs = run(engine)
    assert_clean(engine)
    return [[event.token_id for event in tokens(outputs, f"0/{i}")] for i in range(len(LENGTHS))]


def without_drafts(isa: str, **changes: Any) -> Answers:
    return answers(Engine(load(isa, **changes), SchedulerConfig()))


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[Answers, Answers]]:
    """Answers of sparse and of full attention without drafts, by instruction set."""
    found = {isa: (without_drafts(isa, **SPARSE), without_drafts(isa)) for isa in ("auto", "none")}
    assert all(sum(a != b for a, b in zip(*both, strict=True)) >= 2 for both in found.values())
    return found


@pytest.mark.parametrize(
    ("method", "isa"),
    [
        *((method, "auto") for method in ("draft", "self", "eagle3", "mtp")),
        ("draft", "none"),
        *(pytest.param(method, "none", marks=pytest.mark.long) for method in ("self", "eagle3", "mtp")),
    ],
)
def test_answers_are_those_without_drafts(
    known: dict[str, tuple[Answers, Answers]], tmp_path: Path, method: str, isa: str
) -> None:
    """Of sparse requests, and of those that ask for full attention, which are drafted for to their end."""
    given: dict[str, Any] = {"draft_model": str(EXAMPLES / MODELS[method])} if method in MODELS else {}
    if method == "self":
        given["skipped_layers"] = str(write(tmp_path / "skipped.json", 5, [2]))
    runner = load(isa, speculation=method, **given, **SPARSE)
    drafting = Drafting(runner, chunk_tokens=40, method=method)
    assert answers(drafting.engine) == known[isa][0]
    num_drafted = counts(drafting.engine, method)[0]
    assert num_drafted > 20
    drafting = Drafting(runner, chunk_tokens=40, method=method)
    assert answers(drafting.engine, asked=False) == known[isa][1]
    assert counts(drafting.engine, method)[0] > 2 * num_drafted


def test_on_a_device(known: dict[str, tuple[Answers, Answers]]) -> None:
    """On a fake one, with graphs: sparse rows beside those of drafts."""
    given: dict[str, Any] = {"speculation": "draft", "draft_model": str(EXAMPLES / MODELS["draft"]), "max_running": 8}
    config = WorkerConfig.of(TINY, dtype="float32", max_context_tokens=512, cpu_isa="none", kv_memory_bytes=64 << 20)
    with patch.object(rank_steps, "GRAPH_TOKENS", 32):  # captures take time
        runner = ModelRunner.load(config.changed(**given, **SPARSE), gpu=early())
    drafting = Drafting(runner, chunk_tokens=40)
    assert answers(drafting.engine) == known["none"][0]
    assert counts(drafting.engine)[0] > 20
