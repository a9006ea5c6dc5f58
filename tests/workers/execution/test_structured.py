"""Structured answers of the tiny model: every finished one validates, and it is the same alone and among others."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers

from diptych.workers.common.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.grammar.compiler import GrammarCompiler

from ...support.gpu.serving import late, load
from ...support.schemas import KINDS, Schema, schemas

TINY = Path(__file__).parents[3] / "examples" / "tiny"
NUM_EACH = 15  # of the 300 schemas, of each kind
MAX_TOKENS = 400
BATCH = 16


@pytest.fixture(scope="module", params=["compiled", "torch"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    isa = "auto" if request.param == "compiled" else "none"
    found = ModelRunner.load(
        WorkerConfig.of(model=TINY, dtype="float32", threads=1, kv_memory_bytes=64 << 20, cpu_isa=isa)
    )
    yield found
    found.close()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.of_folder(TINY, 2048, (3, 2))


def answers(
    runner: ModelRunner,
    compiler: GrammarCompiler,
    asked: list[tuple[str, Schema]],
    *,
    is_greedy: bool,
    batch: int,
    logprobs: int | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[tuple[list[int], FinishReason | None]]:
    """Tokens of each schema's answer, so many at once. With `logprobs`, each token has a step of its own."""
    engine = Engine(runner, SchedulerConfig(max_running=batch))
    for i, (name, schema) in enumerate(asked):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        rng = random.Random(name)
        sampling = SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            seed=rng.randrange(1 << 32),
            max_tokens=max_tokens,
            grammar=grammar,
            logprobs=logprobs,
        )
        prompt = tuple(rng.randrange(10, 2000) for _ in range(rng.randint(3, 40)))
        request = Request(name, prompt, sampling, timeout_s=600.0)
        engine.submit(f"0/{i}", request, [], grammar=compiler.compile(grammar))
    found: dict[str, tuple[list[int], FinishReason | None]] = {f"0/{i}": ([], None) for i in range(len(asked))}
    while engine.scheduler.has_work or engine.steps:
        output = engine.step()
        assert not output.failures, output.failures[0].error.message
        for event in output.tokens:
            ids, _ = found[event.key]
            found[event.key] = ([*ids, event.token_id], event.finish)
    state = engine.check_integrity()
    assert state.num_unaccounted_blocks == 0
    assert batch == 1 or (state.load.num_forced_tokens > len(asked)) == (logprobs is None)
    return list(found.values())


def check(asked: list[tuple[str, Schema]], found: list[tuple[list[int], FinishReason | None]]) -> int:
    """Return the number of finished answers, all of which validate."""
    tokenizer, num_finished = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")), 0
    for (name, schema), (ids, finish) in zip(asked, found, strict=True):
        if finish is FinishReason.STOP:
            num_finished += 1
            value: Any = json.loads(tokenizer.decode(ids[:-1]))
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            errors = list(jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value))
            assert not errors, f"{name}: {errors[0].message}"
        else:
            assert (finish, len(ids)) == (FinishReason.LENGTH, MAX_TOKENS)
    return num_finished


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, NUM_EACH))])
def test_every_finished_answer_validates(
    runner: ModelRunner, compiler: GrammarCompiler, part: int, is_greedy: bool
) -> None:
    asked = schemas(NUM_EACH)[part * len(KINDS) : (part + 1) * len(KINDS)]
    found = answers(runner, compiler, asked, is_greedy=is_greedy, batch=BATCH)
    assert check(asked, found) >= len(asked) * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "is_greedy"),
    [
        pytest.param(isa, is_greedy, marks=pytest.mark.long if (isa == "compiled") is is_greedy else ())
        for isa in ("compiled", "torch")
        for is_greedy in (True, False)
    ],
    indirect=["runner"],
)
def test_an_answer_is_the_same_alone_and_among_others_and_without_forced_tokens_at_once(
    runner: ModelRunner, compiler: GrammarCompiler, is_greedy: bool
) -> None:
    asked = schemas(1)[:BATCH]
    how: dict[str, Any] = {"is_greedy": is_greedy, "max_tokens": 200}  # the longest that ends has 176
    together = answers(runner, compiler, asked, batch=BATCH, **how)
    assert together == answers(runner, compiler, asked, batch=BATCH, logprobs=0, **how)
    alone = [answers(runner, compiler, [each], batch=1, **how)[0] for each in asked]
    assert together == alone and any(len(ids) > 20 for ids, _ in alone)


@pytest.mark.parametrize("kind", ["two ranks", "GPU"])
def test_tokens_are_forced_at_once_by_ranks_and_a_gpu_as_one_by_one(compiler: GrammarCompiler, kind: str) -> None:
    config = WorkerConfig.of(model=TINY, dtype="float32", threads=1, kv_memory_bytes=16 << 20)
    runner = load(TINY, late()) if kind == "GPU" else ModelRunner.load(config.changed(tensor_parallel=2))
    try:
        asked = schemas(1)[:6]
        at_once = answers(runner, compiler, asked, is_greedy=True, batch=6, max_tokens=60)
        assert at_once == answers(runner, compiler, asked, is_greedy=True, batch=6, max_tokens=60, logprobs=0)
    finally:
        runner.close()
