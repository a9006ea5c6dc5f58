"""Workers that are killed, and one that drains, while pools keep KV in int8: tokens are those of one such engine alone.

A resumed request is computed anew, in other chunks and company; a migrated one goes on from the bytes that it had."""

import pytest

from benchmarks.serving import faults
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner

from ..support.checkpoints import random_prompts
from ..support.engines import run, tokens
from ..support.harness import TINY
from .test_failure_ladder import (
    LENGTHS,
    NUM_TOKENS,
    ROLES,
    WHILE_DECODING,
    WHILE_PREFILLING,
    Cases,
    check_drain,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


@pytest.fixture(scope="module")
def cases() -> Cases:
    """Prompts, and their answers by one engine."""
    config = WorkerConfig.of(TINY, dtype="float32", kv_dtype="int8", threads=1, kv_memory_bytes=64 << 20)
    runner = ModelRunner.load(config)
    engine = Engine(runner, SchedulerConfig())
    prompts = random_prompts(3, LENGTHS * 2, runner.info.vocab_size)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 120.0), [])
    outputs = run(engine)
    runner.close()
    return [(prompt, [t.token_id for t in tokens(outputs, f"0/{i}")]) for i, prompt in enumerate(prompts)]


async def test_killed_workers_cost_no_token(cases: Cases) -> None:
    """Four workers: one is drained, by live migration, and then two are killed."""
    async with running(TINY, "shared_memory", ["--kv-dtype", "int8"]) as cluster:
        await check_drain(cluster, cases)
        for victim, strike_at in ((ROLES.index("prefill"), WHILE_PREFILLING), (ROLES.index("decode"), WHILE_DECODING)):
            await cluster.check(cases, cluster.workers[victim].kill, strike_at)
        assert cluster.value("diptych_request_resumes_total") > 0
        alive = [worker for worker in cluster.workers if worker.is_alive]
        assert len(alive) == 2
        assert await faults.leaked(alive) == {}
