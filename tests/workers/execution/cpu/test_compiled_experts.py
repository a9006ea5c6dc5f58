"""Layers with a mixture of experts by the compiled kernels: the tokens of torch, and the same bits in any company."""

from pathlib import Path
from typing import Any

import pytest

from diptych.kernels.cpu.load import library
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.execution.common.host_backend import HostBackend
from diptych.workers.execution.cpu.compiled_steps import CompiledSteps
from diptych.workers.execution.eager.eager_steps import EagerSteps
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import MoeSpec

from ....support.checkpoints import make_checkpoint, random_prompts
from .test_compiled import tops

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")


@pytest.fixture(scope="module", params=["mixtral", "qwen3moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts") / request.param, request.param, 8)


def load(path: Path, **changes: Any) -> ModelRunner:
    return ModelRunner.load(WorkerConfig.of(path, max_context_tokens=1024, kv_memory_bytes=32 << 20, **changes))


def assert_counted(steps: CompiledSteps, path: Path, num_tokens: int, num_sampled: int) -> None:
    """In each layer that has experts each token goes to top_k of them; the last one has sampled rows alone."""
    mixtures = [layer.feed_forward for layer in load_spec(path).layers]
    nums = [num_tokens] * (len(mixtures) - 1) + [num_sampled]
    expected = [n * of.routing.top_k if isinstance(of, MoeSpec) else 0 for n, of in zip(nums, mixtures, strict=True)]
    assert steps.expert_tokens is not None and steps.expert_tokens.sum(dim=1).tolist() == expected


def test_the_tokens_of_torch(checkpoint: Path) -> None:
    prompts = random_prompts(3, [1, 14, 44, 290])
    found: list[list[list[int]]] = []
    for isa, kind in (("auto", CompiledSteps), ("none", EagerSteps)):
        runner = load(checkpoint, dtype="float32", cpu_isa=isa)
        assert isinstance(runner.backend, HostBackend) and isinstance(runner.backend.steps, kind)
        found.append([[token for token, _ in tokens] for tokens in tops(runner, prompts)])
        if isinstance(runner.backend.steps, CompiledSteps):
            num_sampled = len(prompts) * len(found[0][0])
            num_tokens = sum(map(len, prompts)) + num_sampled - len(prompts)
            assert_counted(runner.backend.steps, checkpoint, num_tokens, num_sampled)
        runner.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_same_bits_alone_and_batched_and_chunked_and_threaded(checkpoint: Path, quantize: str | None) -> None:
    prompts, found = random_prompts(3, [1, 14, 44, 290]), []
    for num_threads in (1, 2):
        runner = load(checkpoint, threads=num_threads, quantize=quantize)
        found.append([tops(runner, [prompt])[0] for prompt in prompts])
        found.append(tops(runner, prompts))
        found.append(tops(runner, prompts, chunk_tokens=7, max_batch_tokens=30))
        runner.close()
    assert all(of == found[0] for of in found)
