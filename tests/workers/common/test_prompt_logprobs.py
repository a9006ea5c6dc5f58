"""Log-probabilities of prompts against transformers' log_softmax, however a prompt is cut, cached and batched."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.embedding import Pooling
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.sampling import prompt_scorer

from ...support.checkpoints import random_prompts, reference_model
from ...support.embedders import reference_embeddings, with_modules
from ...support.engines import assert_clean, run
from ...support.gpu.serving import load as load_on_gpu
from ..conftest import CheckpointOf
from ..core.test_embedding import MODES
from ..core.test_embedding import check as check_embeddings

PROMPTS = random_prompts(3, [2, 16, 17, 33, 100, 250])


def load(path: Path, isa: str = "auto", **changes: int) -> ModelRunner:
    return ModelRunner.load(
        WorkerConfig.of(path, dtype="float32", cpu_isa=isa, max_context_tokens=512, threads=1, **changes)
    )


def computed(engine: Engine, prompts: list[list[int]], num_top: int = 5) -> list[PromptLogprobs]:
    """Of all prompts at once; each position comes once, in order, and before the prompt's first token."""
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_top)
        engine.submit(f"0/{i}", Request(f"request-{i}", tuple(prompt), sampling, timeout_s=600.0), [])
    parts: dict[str, list[PromptLogprobs]] = {f"0/{i}": [] for i in range(len(prompts))}
    ended: set[str] = set()
    for output in run(engine):
        assert not output.failures
        for key, found in output.prompt_logprobs:
            assert key not in ended
            assert found.first == (parts[key][-1].end if parts[key] else 1)
            parts[key].append(found)
        ended |= {token.key for token in output.tokens}
    assert_clean(engine)
    return [PromptLogprobs.joined(parts[f"0/{i}"]) for i in range(len(prompts))]


def reference_logprobs(path: Path, prompts: list[list[int]]) -> list[Tensor]:
    """transformers' log-probabilities of all tokens, at each position of each prompt but the first: [L - 1, V]."""
    model = reference_model(path)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1) for prompt in prompts]


@pytest.fixture(scope="module")
def logprobs_of(checkpoint_of: CheckpointOf) -> Callable[[str], list[Tensor]]:
    """Of an architecture: those of PROMPTS."""
    return cache(lambda arch: reference_logprobs(checkpoint_of(arch), PROMPTS))


def assert_equal(found: PromptLogprobs, prompt: list[int], expected: Tensor) -> None:
    targets = torch.tensor(prompt[1:])[:, None]
    own = expected.gather(1, targets)
    top = expected.topk(found.top_ids.shape[1], dim=-1).values
    assert (found.first, found.end) == (1, len(prompt))
    torch.testing.assert_close(torch.from_numpy(found.logprobs), own[:, 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.from_numpy(found.top_logprobs), top, atol=1e-4, rtol=0)
    # The log-probability of a top token is the reported one, whichever of several equal tokens was chosen.
    of_tops = expected.gather(1, torch.from_numpy(found.top_ids).long())
    torch.testing.assert_close(torch.from_numpy(found.top_logprobs), of_tops, atol=1e-4, rtol=0)
    num_likelier = [(expected > own + gap).sum(dim=-1) for gap in (1e-4, -1e-4)]
    ranks = torch.from_numpy(found.ranks)
    assert bool((num_likelier[0] + 1 <= ranks).all()) and bool((ranks <= num_likelier[1]).all())


@pytest.fixture(
    scope="module",
    params=[("llama", "auto"), ("qwen3", "auto"), ("qwen3", "none"), ("gemma3", "auto"), ("gemma4", "auto")],
    ids="-".join,
)
def served(checkpoint_of: CheckpointOf, request: pytest.FixtureRequest) -> Iterator[tuple[str, ModelRunner]]:
    """An architecture, and what computes it."""
    arch, isa = request.param
    runner = load(checkpoint_of(arch), isa)
    yield arch, runner
    runner.close()


@pytest.mark.parametrize("chunk_tokens", [7, 64, 0])
def test_prompt_logprobs_equal_transformers_alone_chunked_and_with_a_warm_cache(
    served: tuple[str, ModelRunner], chunk_tokens: int, logprobs_of: Callable[[str], list[Tensor]]
) -> None:
    arch, runner = served
    engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens))
    together, warm = computed(engine, PROMPTS), computed(engine, PROMPTS)
    alone = [computed(engine, [prompt])[0] for prompt in PROMPTS]
    for found in (together, warm, alone):
        for one, prompt, expected in zip(found, PROMPTS, logprobs_of(arch), strict=True):
            assert_equal(one, prompt, expected)


def test_logits_of_a_prompt_are_made_a_piece_at_a_time(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt] = random_prompts(4, [200])
    for isa in ("auto", "none"):
        whole = computed(Engine(runner := load(llama, isa), SchedulerConfig()), [prompt])[0]
        monkeypatch.setattr(prompt_scorer, "PIECE_BYTES", 4 * 500 * 9)
        pieces = computed(Engine(runner, SchedulerConfig()), [prompt])[0]
        assert whole.ranks.tolist() == pieces.ranks.tolist()
        torch.testing.assert_close(torch.from_numpy(whole.logprobs), torch.from_numpy(pieces.logprobs))
        monkeypatch.undo()
        runner.close()


@pytest.mark.parametrize("isa", ["auto", "none"])
def test_ranks_compute_prompt_logprobs_and_embeddings_together(isa: str, llama: Path, tmp_path: Path) -> None:
    """One test, for ranks take long to start."""
    pooling = Pooling.MEAN if isa == "none" else Pooling.LAST
    prompts = random_prompts(5, [40, 100])
    runner = load(with_modules(llama, tmp_path / "model", MODES[pooling]), isa, tensor_parallel=2)
    found = computed(Engine(runner, SchedulerConfig(chunk_tokens=30)), prompts)
    for one, prompt, expected in zip(found, prompts, reference_logprobs(llama, prompts), strict=True):
        assert_equal(one, prompt, expected)
    check_embeddings(runner, prompts, reference_embeddings(llama, prompts, pooling), 30)


@pytest.fixture(scope="module", params=["llama", "gemma4"])
def on_a_device(checkpoint_of: CheckpointOf, request: pytest.FixtureRequest) -> Iterator[tuple[str, ModelRunner]]:
    """An architecture, and the CUDA engine with it, on the fake device."""
    runner = load_on_gpu(checkpoint_of(request.param), FakeDevice())
    yield request.param, runner
    runner.close()


@pytest.mark.parametrize("chunk_tokens", [7, 0])
def test_the_cuda_engine_computes_prompt_logprobs(
    on_a_device: tuple[str, ModelRunner], chunk_tokens: int, logprobs_of: Callable[[str], list[Tensor]]
) -> None:
    """Small prompts by graphs, long ones without."""
    arch, runner = on_a_device
    engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens))
    for found in (computed(engine, PROMPTS), computed(engine, PROMPTS)):
        for one, prompt, expected in zip(found, PROMPTS, logprobs_of(arch), strict=True):
            assert_equal(one, prompt, expected)
