"""Quantised checkpoints computed in their own numbers by the compiled kernels: the tokens and probabilities of torch on
what the numbers mean, and the same bits in any company."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.load import library
from diptych.workers.common.request import SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.execution.common.host_backend import HostBackend
from diptych.workers.execution.cpu.compiled_steps import CompiledSteps
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import make_checkpoint, random_prompts
from ....support.serving import Server
from ...models.quant.test_formats import FORMATS
from ...models.quant.writers import mxfp4_experts, quantised
from .test_compiled import Tops, tops

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")
CASES = [
    ("llama", "gptq 4"),
    ("llama", "mxfp4"),
    ("llama", "fp8, block"),
    ("llama", "bitsandbytes int8"),
    ("llama", "bitsandbytes nf4"),
    ("qwen3moe", "packed 4, zero points"),
    ("llama", "gptq 4, activations' order"),
    ("qwen3moe", "packed 4, activations' order"),
    ("gptoss", "mxfp4 of experts"),
]
PROMPTS = [1, 17, 40, 290]


def checkpoints(folder: Path, arch: str, name: str) -> tuple[Path, Path]:
    """One that is quantised, and one of what its numbers mean."""
    source = make_checkpoint(folder / "source", arch, 8)
    return mxfp4_experts(source, folder) if arch == "gptoss" else quantised(source, folder, *FORMATS[name])


def load(path: Path, **changes: Any) -> ModelRunner:
    return ModelRunner.load(WorkerConfig.of(path, max_context_tokens=1024, kv_memory_bytes=32 << 20, **changes))


def assert_near(found: Tops, expected: Tops, error: float) -> None:
    """The same tokens; of each the likeliest ones, and their log-probabilities to within `error`."""
    for own, others in zip(found, expected, strict=True):
        assert [token for token, _ in own] == [token for token, _ in others]
        for (_, top), (_, other) in zip(own, others, strict=True):
            wanted = dict(other)
            assert all(wanted[token] == pytest.approx(value, abs=error) for token, value in top if token in wanted)
            assert len(wanted.keys() & dict(top).keys()) >= len(top) - 1  # one may be as likely as the next


def first_logprobs(runner: ModelRunner, prompts: list[list[int]]) -> Tensor:
    """[prompts, vocabulary]: log-probabilities of the first token of each."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    found = torch.full((len(prompts), runner.info.vocab_size), torch.nan)
    server = Server(runner, SchedulerConfig(), prefix_cache=False)
    for row, tokens in enumerate(server.generate(prompts, [sampling] * len(prompts))):
        for token, value in tokens[0].top:
            found[row, token] = value
    return found


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_the_tokens_of_torch_on_what_the_numbers_mean(
    arch: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diptych.worker")
    packed, plain = checkpoints(tmp_path, arch, name)
    prompts = random_prompts(3, PROMPTS)
    runner, twin = load(packed, dtype="float32"), load(plain, dtype="float32", cpu_isa="none")
    assert isinstance(runner.backend, HostBackend) and isinstance(runner.backend.steps, CompiledSteps)
    assert sum("products of the quantised checkpoint: " in line for line in caplog.messages) == 1
    assert_near(tops(runner, prompts), tops(twin, prompts), 1e-4)
    for of in (runner, twin):
        of.close()


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_rows_that_are_quantised(arch: str, tmp_path: Path) -> None:
    """The compiled kernels and torch do the same; the plain model is further away, but not far."""
    packed, plain = checkpoints(tmp_path, arch, "int8, rows too")
    prompts = random_prompts(3, PROMPTS)
    settings: list[tuple[Path, dict[str, str]]] = [
        (packed, {}),
        (packed, {"cpu_isa": "none"}),
        (packed, {"quantize": "int8"}),  # which leaves rows as they are, and makes the head int8
        (packed, {"cpu_isa": "none", "quantize": "int8"}),
        (plain, {"cpu_isa": "none"}),
    ]
    runners = [load(path, dtype="float32", **how) for path, how in settings]
    found, twin, by_weights, its_twin, exact = (first_logprobs(of, prompts) for of in runners)
    for of in runners:
        of.close()
    assert median_error(found, twin) < 1e-5
    assert (found - twin).abs().nan_to_num().max() < 0.05  # a number of a row that lies between two may be either
    assert 1e-3 < median_error(found, exact) < 0.05
    assert median_error(by_weights, its_twin) < 1e-5


def median_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().nanmedian())


@pytest.mark.parametrize(("arch", "name"), [CASES[0], CASES[2], CASES[-1]])
def test_the_same_bits_alone_and_batched_and_chunked_and_threaded(arch: str, name: str, tmp_path: Path) -> None:
    path, _ = checkpoints(tmp_path, arch, name)
    prompts, found = random_prompts(3, PROMPTS), list[Tops]()
    for num_threads in (1, 2):
        runner = load(path, threads=num_threads)
        found.append([tops(runner, [prompt])[0] for prompt in prompts])
        found.append(tops(runner, prompts))
        found.append(tops(runner, prompts, chunk_tokens=7, max_batch_tokens=30))
        runner.close()
    assert all(of == found[0] for of in found)
