"""Drafts on the CUDA engine, on a fake device: the tokens of an engine on CPU that has none, in graphs and without."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.workers.common.errors import InternalError
from diptych.workers.common.request import Grammar, GrammarKind, SamplingParams
from diptych.workers.core.drafting import MAX_DRAFT_TOKENS, max_drafted
from diptych.workers.core.sequence import Batch, DraftEntry, ScheduledSequence
from diptych.workers.execution.gpu.buckets import token_buckets
from diptych.workers.execution.gpu.decode_graphs import queries_at_once
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.grammar.compiler import GrammarCompiler
from diptych.workers.models.families.registry import load_spec

from ....support.checkpoints import random_prompts
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

    def spy(bucket: int, max_queries: int) -> None:
        found.append((bucket, max_queries))
        forward(bucket, max_queries)

    graphs.forward = spy
    yield found
    graphs.forward = forward


@pytest.fixture(scope="module")
def on_cpu(llama: Path) -> ModelRunner:
    return load(llama, None)


@pytest.fixture(scope="module", params=[late, early])
def runner(llama: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return drafting(llama, request.param())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_token_of_any_sampling(on_cpu: ModelRunner, runner: ModelRunner, name: str) -> None:
    """Rejected whole, in part, and accepted whole; prompts in chunks beside them."""
    samplings = [SAMPLINGS[name]] * 8
    plain = generate(on_cpu, samplings)
    for chance in (0.0, 0.7, 1.0):
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
        assert {queries for _, queries in graphs} >= {6}  # 1 + max_draft_tokens
        if chance == 1.0:
            assert drafter.counts["accepted"] > 0.6 * drafter.counts["drafted"]
