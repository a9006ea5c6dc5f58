"""A worker that is killed in the middle of answers that a model drafts for, with the draft's KV: the same tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving import faults
from diptych.workers.common.request import Request
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner

from ..support.checkpoints import random_prompts
from ..support.engines import run, tokens
from ..support.harness import TINY
from .test_failure_ladder import LENGTHS, ROLES, WHILE_PREFILLING, Cases, running
from .test_model_drafts import GREEDY, MODELS

NUM_TOKENS = 60
WHILE_DECODING = len(LENGTHS) * 2 * NUM_TOKENS // 3

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


@pytest.fixture(scope="module")
def cases() -> Cases:
    """Prompts, and their answers without drafts, of one engine."""
    runner = ModelRunner.load(WorkerConfig.of(TINY, dtype="float32", threads=1, kv_memory_bytes=64 << 20))
    engine = Engine(runner, SchedulerConfig())
    prompts = random_prompts(3, LENGTHS * 2, runner.info.vocab_size)
    sampling = replace(GREEDY, max_tokens=NUM_TOKENS)
    for i, prompt in enumerate(prompts):
        engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 120.0), [])
    outputs = run(engine)
    runner.close()
    return [(prompt, [t.token_id for t in tokens(outputs, f"0/{i}")]) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("method", ["draft", "eagle3"])
async def test_killed_workers_cost_no_token(method: str, cases: Cases) -> None:
    drafting = ["--speculation", method, "--draft-model", str(Path(TINY).parent / MODELS[method])]
    module = "tests.support.drafting_worker"
    async with running(TINY, "grpc", drafting, module) as cluster:
        for victim, strike_at in ((ROLES.index("prefill"), WHILE_PREFILLING), (ROLES.index("decode"), WHILE_DECODING)):
            await cluster.check(cases, cluster.workers[victim].kill, strike_at)
        assert cluster.value("diptych_request_resumes_total") > 0
        assert cluster.value("diptych_worker_drafted_tokens_total") > NUM_TOKENS
        assert cluster.value("diptych_worker_accepted_tokens_total") > 0
        alive = [worker for worker in cluster.workers if worker.is_alive]
        assert len(alive) == 2
        assert await faults.leaked(alive) == {}
