"""Every family by the compiled kernels: torch's tokens in float32; in bfloat16 bits that are a request's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diptych.kernels.cpu.load import library
from diptych.workers.common.request import SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.compiled_limits import why_not

from ....support.checkpoints import ARCHITECTURES, random_prompts
from ....support.serving import Server
from ...conftest import CheckpointOf

PROMPTS = random_prompts(7, [1, 30, 65, 300])


def compiled(arch: str, checkpoint_of: CheckpointOf) -> Path:
    path = checkpoint_of(arch)
    if unknown := why_not(load_spec(path)):
        pytest.skip(f"torch computes {unknown}")
    return path


@contextmanager
def runner_of(path: Path, dtype: str, cpu_isa: str = "auto", threads: int = 1) -> Iterator[ModelRunner]:
    config = WorkerConfig.of(
        path, dtype=dtype, max_context_tokens=512, kv_memory_bytes=16 << 20, threads=threads, cpu_isa=cpu_isa
    )
    runner = ModelRunner.load(config)
    yield runner
    runner.close()


def generated(runner: ModelRunner, prompts: list[list[int]], chunk_tokens: int = 0) -> list[list[SampledToken]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)
    server = Server(runner, SchedulerConfig(chunk_tokens=chunk_tokens), prefix_cache=False)
    return server.generate(prompts, [sampling] * len(prompts))


pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_are_those_of_torch(arch: str, checkpoint_of: CheckpointOf) -> None:
    path = compiled(arch, checkpoint_of)
    with runner_of(path, "float32", threads=2) as by_kernels:
        found = generated(by_kernels, PROMPTS)
    with runner_of(path, "float32", "none") as by_torch:
        expected = generated(by_torch, PROMPTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert [t.token_id for t in ours] == [t.token_id for t in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert [logprob for _, logprob in one.top] == pytest.approx([lp for _, lp in other.top], abs=1e-3)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bits_are_a_requests_own(arch: str, checkpoint_of: CheckpointOf) -> None:
    with runner_of(compiled(arch, checkpoint_of), "bfloat16") as runner:

        def tops(prompts: list[list[int]], chunk_tokens: int = 0) -> list[list[object]]:
            return [[(t.token_id, t.top) for t in tokens] for tokens in generated(runner, prompts, chunk_tokens)]

        alone = [tops([prompt])[0] for prompt in PROMPTS]
        assert tops(PROMPTS) == alone
        assert tops(PROMPTS[::-1], chunk_tokens=48)[::-1] == alone


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_latents_and_gemma_4_alone_are_left_to_torch(arch: str, checkpoint_of: CheckpointOf) -> None:
    assert (why_not(load_spec(checkpoint_of(arch))) is None) is not arch.startswith(("deepseek", "gemma4"))
