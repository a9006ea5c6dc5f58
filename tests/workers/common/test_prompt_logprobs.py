"""Log-probabilities of prompts against transformers' log_softmax, however a prompt is cut, cached and batched."""

from pathlib import Path

import pytest
import torch

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

LENGTHS = [2, 16, 17, 33, 100, 250]


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


def assert_equal(found: PromptLogprobs, prompt: list[int], model: torch.nn.Module) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    expected, targets = logits.log_softmax(dim=-1), torch.tensor(prompt[1:])[:, None]
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


@pytest.mark.parametrize("chunk_tokens", [7, 64, 0])
@pytest.mark.parametrize(
    ("arch", "isa"),
    [("llama", "auto"), ("qwen3", "auto"), ("qwen3", "none"), ("gemma3", "auto"), ("gemma4", "auto")],
)
def test_prompt_logprobs_equal_transformers_alone_chunked_and_with_a_warm_cache(
    arch: str, isa: str, chunk_tokens: int, checkpoint_of: CheckpointOf
) -> None:
    path = checkpoint_of(arch)
    model, prompts = reference_model(path), random_prompts(3, LENGTHS)
    runner = load(path, isa)
    engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens))
    together, warm = computed(engine, prompts), computed(engine, prompts)
    alone = [computed(engine, [prompt])[0] for prompt in prompts]
    for found in (together, warm, alone):
        for one, prompt in zip(found, prompts, strict=True):
            assert_equal(one, prompt, model)
    runner.close()


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
    model, prompts = reference_model(llama), random_prompts(5, [40, 100])
    runner = load(with_modules(llama, tmp_path / "model", MODES[pooling]), isa, tensor_parallel=2)
    for found, prompt in zip(computed(Engine(runner, SchedulerConfig(chunk_tokens=30)), prompts), prompts, strict=True):
        assert_equal(found, prompt, model)
    check_embeddings(runner, prompts, reference_embeddings(llama, prompts, pooling), 30)


@pytest.mark.parametrize("chunk_tokens", [7, 0])
@pytest.mark.parametrize("arch", ["llama", "gemma4"])
def test_the_cuda_engine_computes_prompt_logprobs(arch: str, chunk_tokens: int, checkpoint_of: CheckpointOf) -> None:
    """On the fake device: small prompts by graphs, long ones without."""
    path = checkpoint_of(arch)
    model, prompts = reference_model(path), random_prompts(3, LENGTHS)
    runner = load_on_gpu(path, FakeDevice())
    engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens))
    for found in (computed(engine, prompts), computed(engine, prompts)):
        for one, prompt in zip(found, prompts, strict=True):
            assert_equal(one, prompt, model)
    runner.close()
