"""Embeddings against transformers' hidden states, however a prompt is cut, cached and batched; and their bounds."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.proto import inference_pb2, worker_pb2
from diptych.workers.common.errors import EmbeddingsNotServed, InternalError, InvalidRequest
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.common.timings import SequenceTimings
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.embedding import Embedding, EmbeddingSpec, Pooling
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.sampling import pooled_rows

from ...support.checkpoints import make_checkpoint, random_prompts, reference_model
from ...support.embedders import reference_embeddings, with_modules
from ...support.engines import assert_clean, run
from ...support.gpu.serving import load as load_on_gpu
from ..conftest import CheckpointOf

PROMPTS = random_prompts(3, [1, 2, 16, 17, 33, 100, 250])
MODES = {Pooling.LAST: "lasttoken", Pooling.MEAN: "mean_tokens"}


def load(path: Path, isa: str = "auto", **changes: int) -> ModelRunner:
    return ModelRunner.load(
        WorkerConfig.of(path, dtype="float32", cpu_isa=isa, max_context_tokens=512, threads=1, **changes)
    )


def embedded(engine: Engine, prompts: list[list[int]], num_answers: int = 0) -> list[Embedding]:
    """Of all prompts at once, beside `num_answers` of the same prompts that decode."""
    for i, prompt in enumerate(prompts[:num_answers]):
        sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        engine.submit(f"1/{i}", Request(f"answer-{i}", tuple(prompt), sampling, timeout_s=600.0), [])
    for i, prompt in enumerate(prompts):
        request = Request(f"request-{i}", tuple(prompt), SamplingParams(max_tokens=1), timeout_s=600.0, embeds=True)
        engine.submit(f"0/{i}", request, [])
    outputs = run(engine)
    assert not any(output.failures for output in outputs)
    assert_clean(engine)
    found = dict(event for output in outputs for event in output.embeddings)
    return [found[f"0/{i}"] for i in range(len(prompts))]


def assert_equal(found: list[Embedding], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(one.vector), other, atol=1e-4, rtol=0)


def check(runner: ModelRunner, prompts: list[list[int]], expected: list[torch.Tensor], *chunks: int) -> None:
    """Cold, with a warm cache, beside answers, and alone."""
    for chunk_tokens in chunks:
        engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens))
        assert_equal(embedded(engine, prompts), expected)
        warm = embedded(engine, prompts, num_answers=3)
        assert_equal(warm, expected)
        is_last = runner.info.embedding is not None and runner.info.embedding.pooling is Pooling.LAST
        # What answers the same prompt beside it may hold more.
        cached = [(len(p) - 1) // 16 * 16 if is_last else 0 for p in prompts]
        assert [one.num_cached for one in warm[3:]] == cached[3:] and (is_last or not any(e.num_cached for e in warm))
        assert_equal([embedded(engine, [prompt])[0] for prompt in prompts[-3:]], expected[-3:])
    runner.close()


ReferenceOf = Callable[[str, Pooling], list[torch.Tensor]]


@pytest.fixture(scope="module")
def reference_of(checkpoint_of: CheckpointOf) -> ReferenceOf:
    """Of an architecture: transformers' embeddings of PROMPTS."""
    return cache(lambda arch, pooling: reference_embeddings(checkpoint_of(arch), PROMPTS, pooling))


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize(
    ("arch", "isa"), [("llama", "auto"), ("qwen3", "none"), ("gemma3", "auto"), ("gemma4", "auto")]
)
def test_embeddings_equal_transformers_hidden_states(
    arch: str, isa: str, pooling: Pooling, checkpoint_of: CheckpointOf, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    runner = load(with_modules(checkpoint_of(arch), tmp_path / "model", MODES[pooling]), isa)
    check(runner, PROMPTS, reference_of(arch, pooling), 7, 0)


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("arch", ["llama", "gemma4"])
def test_the_cuda_engine_computes_embeddings(
    arch: str, pooling: Pooling, checkpoint_of: CheckpointOf, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    """On the fake device: small prompts by graphs, long ones without."""
    path = with_modules(checkpoint_of(arch), tmp_path / "model", MODES[pooling])
    runner = load_on_gpu(path, FakeDevice(), max_running=len(PROMPTS) + 3)
    check(runner, PROMPTS, reference_of(arch, pooling), 7, 0)


def test_hidden_states_are_pooled_a_piece_at_a_time(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(4, [30, 3, 50])
    expected = reference_embeddings(llama, prompts, Pooling.MEAN)
    monkeypatch.setattr(pooled_rows, "MAX_PIECE", 8)
    for isa in ("auto", "none"):
        runner = load(with_modules(llama, tmp_path / isa, "mean_tokens"), isa)
        assert_equal(embedded(Engine(runner, SchedulerConfig()), prompts), expected)
        runner.close()


def test_a_checkpoint_without_modules_gives_the_last_hidden_state_normalised(llama: Path) -> None:
    prompts = random_prompts(4, [30])
    runner = load(llama)
    [one] = embedded(Engine(runner, SchedulerConfig()), prompts)
    [expected] = reference_embeddings(llama, prompts, Pooling.LAST)
    assert_equal([one], [expected / expected.norm()])
    assert np.linalg.norm(one.vector) == pytest.approx(1, abs=1e-6)
    runner.close()


def test_a_checkpoint_of_a_decoder_without_its_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: tensors without "model.", and no head."""
    whole = make_checkpoint(tmp_path / "whole", "qwen3", 7, tie_word_embeddings=True)
    reference_model(whole).base_model.save_pretrained(tmp_path / "decoder")
    assert json.loads((tmp_path / "decoder" / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    prompts = random_prompts(6, [9, 40])
    expected = [state / state.norm() for state in reference_embeddings(whole, prompts, Pooling.LAST)]
    runner = load(tmp_path / "decoder")
    assert_equal(embedded(Engine(runner, SchedulerConfig()), prompts, num_answers=1), expected)
    runner.close()


VECTOR = np.array([3, 4, 12, 84], dtype=np.float32)


def test_an_embedding_is_cut_and_normalised_again() -> None:
    spec = EmbeddingSpec(4, may_be_cut=True)
    whole = spec.finished(VECTOR.astype(np.float64), 7)
    np.testing.assert_allclose(whole, VECTOR / 85)
    np.testing.assert_allclose(spec.cut(whole, 2), [0.6, 0.8], rtol=1e-6)
    assert spec.cut(whole, None) is whole and spec.cut(whole, 4) is whole
    raw = EmbeddingSpec(4, Pooling.MEAN, normalised=False, may_be_cut=True)
    np.testing.assert_allclose(raw.finished(VECTOR.astype(np.float64), 2), VECTOR / 2)
    np.testing.assert_allclose(raw.cut(VECTOR, 2), [3, 4])
    assert not spec.finished(np.zeros(4), 1).any(), "no direction, and no NaN"


@pytest.mark.parametrize(
    ("spec", "num", "why"),
    [
        (EmbeddingSpec(8), 4, "does not say that its embeddings may be cut"),
        (EmbeddingSpec(8, may_be_cut=True), 9, r"dimensions must be in \[1, 8\], got 9"),
        (EmbeddingSpec(8, may_be_cut=True), 0, r"in \[1, 8\], got 0"),
        (EmbeddingSpec(8, may_be_cut=True, dimensions=(2, 4)), 3, "one of 2, 4, got 3"),
    ],
)
def test_dimensions_that_the_model_has_not_are_refused(spec: EmbeddingSpec, num: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        spec.check(num)
    assert caught.value.param == "dimensions"
    spec.check(8)
    spec.check(None)
    with pytest.raises(EmbeddingsNotServed, match="because"):
        EmbeddingSpec(8, refusal="because").check()


def test_what_is_sent_is_received() -> None:
    spec = EmbeddingSpec(8, Pooling.MEAN, normalised=False, may_be_cut=True, dimensions=(2, 4), refusal="because")
    assert EmbeddingSpec.from_proto(spec.to_proto()) == spec
    sent = Embedding(VECTOR, 16, 8, SequenceTimings(0.25, 0.5))
    received = Embedding.from_proto(sent.to_proto(7))
    assert received.vector.tolist() == VECTOR.tolist()
    assert (received.num_cached, received.num_stored, received.timings) == (16, 8, SequenceTimings(0.25, 0.5))


def test_messages_that_no_worker_sends_are_refused() -> None:
    for values in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(InternalError):
            Embedding.from_proto(worker_pb2.Embedding(values=values))
    for message in (inference_pb2.EmbeddingSpec(size=0, pooling="last"), inference_pb2.EmbeddingSpec(size=8)):
        with pytest.raises(InternalError):
            EmbeddingSpec.from_proto(message)
