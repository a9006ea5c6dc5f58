"""ModelRunner against transformers: greedy tokens equal `generate` strictly, however a request is cut and batched.

Ties are excluded exactly: checkpoints.py takes prompts whose reference never has its two largest logits within
1e-4, so float32 rounding cannot decide a comparison.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.workers.common.errors import CheckpointError, ConfigError, RankLost
from diptych.workers.common.request import SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.execution.common.host_backend import HostBackend
from diptych.workers.execution.model_runner import ModelRunner

from ...support.checkpoints import ARCHITECTURES, make_checkpoint, untied_prompts
from ...support.serving import Server
from ..conftest import CheckpointOf

LENGTHS = [1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 100, 250, 333, 512, 777, 1000]
CHUNKS = [16, pytest.param(64, marks=pytest.mark.long), 0]  # 64: whole blocks, as 16
MAX_TOKENS = 24
MAX_CONTEXT = 1056
Reference = list[tuple[list[int], list[int]]]


def load(path: Path, **changes: Any) -> ModelRunner:
    config = WorkerConfig.of(path, dtype="float32", max_context_tokens=MAX_CONTEXT)
    return ModelRunner.load(config.changed(**changes))


def greedy(server: Server, reference: Reference) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=len(reference[0][1]), ignore_eos=True)
    outputs = server.generate([prompt for prompt, _ in reference], [sampling] * len(reference))
    return [[token.token_id for token in tokens] for tokens in outputs]


@cache
def reference_of(path: Path) -> Reference:
    return untied_prompts(path, seed=5, lengths=LENGTHS, max_tokens=MAX_TOKENS)


@pytest.fixture(
    scope="module",
    params=[("llama", "auto"), ("qwen3", "auto"), ("qwen3", "none")],
    ids=["llama", "qwen3", "qwen3 by torch"],
)
def case(request: pytest.FixtureRequest) -> tuple[ModelRunner, Reference]:
    arch, isa = request.param
    path: Path = request.getfixturevalue(arch)
    return load(path, cpu_isa=isa), reference_of(path)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_greedy_in_a_batch_cold_and_warm(case: tuple[ModelRunner, Reference], chunk_tokens: int) -> None:
    runner, reference = case
    expected = [tokens for _, tokens in reference]
    server = Server(runner, SchedulerConfig(chunk_tokens=chunk_tokens))
    assert greedy(server, reference) == expected
    assert server.scheduler.prompts.num_cached == 0
    assert greedy(server, reference) == expected
    assert server.scheduler.prompts.num_cached == sum((n - 1) // 16 * 16 for n in LENGTHS)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_greedy_alone(case: tuple[ModelRunner, Reference], chunk_tokens: int) -> None:
    runner, reference = case
    server = Server(runner, SchedulerConfig(chunk_tokens=chunk_tokens), prefix_cache=False)
    for one in reference:
        assert greedy(server, [one]) == [one[1]]


def test_greedy_through_preemption(case: tuple[ModelRunner, Reference]) -> None:
    runner, reference = case
    short = [(p, t) for p, t in reference if len(p) <= 100]
    server = Server(runner, SchedulerConfig(chunk_tokens=16), num_blocks=30, prefix_cache=False)
    assert greedy(server, short) == [tokens for _, tokens in short]
    assert server.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24}),
        ("llama", {"num_key_value_heads": 1, "max_shard_size": "200KB"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "rope_theta": 1e4,
                }
            },
        ),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        ("mixtral", {}),
        ("qwen3moe", {}),
        ("qwen3moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    ],
)
def test_greedy_for_other_shapes(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path, arch, 7, **changes)
    reference = untied_prompts(path, seed=9, lengths=[1, 20, 170], max_tokens=12)
    for block_size in (5, 32):  # torch computes the first, which only it supports; the kernels the second
        server = Server(load(path, block_size=block_size), SchedulerConfig(chunk_tokens=48))
        assert greedy(server, reference) == [tokens for _, tokens in reference]


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in ("llama", "qwen3")])
def test_greedy_of_every_family(checkpoint_of: CheckpointOf, arch: str) -> None:
    """Alone, and in a batch whose chunks end within a window and beyond it."""
    path = checkpoint_of(arch)
    reference = untied_prompts(path, seed=9, lengths=[20, 90], max_tokens=8)
    runner = load(path, threads=1, kv_memory_bytes=32 << 20)
    chunked = Server(runner, SchedulerConfig(chunk_tokens=16), prefix_cache=False)
    assert greedy(chunked, reference) == [tokens for _, tokens in reference]
    for one in reference:
        assert greedy(Server(runner, SchedulerConfig(), prefix_cache=False), [one]) == [one[1]]


def test_what_goes_to_experts_is_counted(checkpoint_of: CheckpointOf) -> None:
    runner = load(checkpoint_of("qwen3moe"), cpu_isa="none")
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    Server(runner, SchedulerConfig()).generate([list(range(1, 21))], [sampling])
    counts = runner.expert_tokens()
    assert counts is not None
    assert runner.info.num_experts == (6, 6, 0, 6)
    # 20 + 4 tokens, each to two, and in the last layer those after which one is sampled; the third one has none.
    assert counts.sum(axis=1).tolist() == [48, 48, 0, 10]


def test_ranks_end_with_a_step_that_fails_between_their_sums(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would take the next step's first sum for this one's next."""

    class Ranks:
        def fail(self, error: RankLost) -> RankLost:
            return RankLost(f"all end: {error}")

    def fails() -> list[SampledToken]:
        raise MemoryError("no room for a sum")

    backend = load(llama).backend
    assert isinstance(backend, HostBackend)
    with pytest.raises(MemoryError):
        backend.compute(fails)
    monkeypatch.setattr(backend, "_ranks", Ranks())
    with pytest.raises(RankLost, match=r"all end: rank 0 failed in a step .no room for a sum."):
        backend.compute(fails)
    monkeypatch.setattr(backend, "_ranks", None)


def test_draws_do_not_depend_on_the_batch(llama: Path) -> None:
    runner = load(llama)
    reference = untied_prompts(llama, seed=5, lengths=[3, 40, 90, 17], max_tokens=2)
    prompts = [prompt for prompt, _ in reference]
    samplings = [
        SamplingParams(temperature=t, max_tokens=16, seed=2**64 - 1 - i, top_p=0.9)
        for i, t in enumerate((0.0, 0.7, 1.0, 1.3))
    ]
    together = Server(runner, SchedulerConfig()).generate(prompts, samplings)
    chunked = Server(runner, SchedulerConfig(chunk_tokens=16)).generate(prompts[::-1], samplings[::-1])[::-1]
    alone = [Server(runner, SchedulerConfig()).generate([p], [s])[0] for p, s in zip(prompts, samplings, strict=True)]
    ids = [[t.token_id for t in tokens] for tokens in together]
    assert ids == [[t.token_id for t in tokens] for tokens in chunked]
    assert ids == [[t.token_id for t in tokens] for tokens in alone]


def test_bfloat16_follows_float32(llama: Path) -> None:
    """bfloat16 rounds differently from float32, so tokens may part; the first logprobs must be near."""
    prompt = untied_prompts(llama, seed=5, lengths=[40], max_tokens=2)[0][0]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    tops: list[dict[int, float]] = []
    for dtype in ("float32", "bfloat16"):
        runner = load(llama, dtype=dtype)
        assert (runner.layout.dtype, runner.info.dtype) == (dtype, dtype)
        tops.append(dict(Server(runner, SchedulerConfig()).generate([prompt], [sampling])[0][0].top))
    common = tops[0].keys() & tops[1].keys()
    assert len(common) >= 3
    assert all(abs(tops[0][token] - tops[1][token]) < 0.3 for token in common)


def test_what_it_says_of_itself(llama: Path) -> None:
    runner = load(llama, served_model_name="tiny", kv_memory_bytes=1 << 20, max_context_tokens=64, block_size=8)
    assert (runner.info.name, runner.info.architecture) == ("tiny", "LlamaForCausalLM")
    assert (runner.info.vocab_size, runner.info.max_context_tokens, runner.info.eos_token_ids) == (500, 64, (0,))
    assert runner.memory.num_blocks == (1 << 20) // runner.layout.block_bytes
    assert load(llama).info.name == "llama"
    assert load(llama, max_context_tokens=None).info.max_context_tokens == 2048


def test_a_context_that_yarn_lengthens_has_to_be_asked_for(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    path = make_checkpoint(tmp_path, "qwen3", 7, rope_parameters=yarn, max_position_embeddings=640)
    for asked, found in ((None, 640), (1024, 1024)):
        runner = load(path, max_context_tokens=asked, kv_memory_bytes=4 << 20)
        assert runner.info.max_context_tokens == found
        runner.close()
    with pytest.raises(ConfigError, match="max_context_tokens=1025 exceeds the model's 1024 positions"):
        load(path, max_context_tokens=1025)


def test_two_dtypes_of_one_checkpoint_share_its_name(llama: Path, qwen3: Path) -> None:
    names = [load(llama).layout.model_id, load(llama, dtype="bfloat16").layout.model_id, load(qwen3).layout.model_id]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype: Input should be"),
        ({"device": "abacus"}, "does not know the device"),
        ({"device": "mps"}, "not supported"),
        ({"block_size": 0}, "block_size: Input should be"),
        ({"kv_memory_fraction": 1.5}, "kv_memory_fraction: Input should be"),
        ({"kv_memory_bytes": -1}, "kv_memory_bytes: Input should be"),
        ({"kv_memory_bytes": 1000}, "one context of 1056 tokens needs"),
        ({"max_context_tokens": 4096}, "exceeds the model's 2048 positions"),
        ({"threads": 0}, "threads: Input should be"),
    ],
)
def test_settings_out_of_range_are_refused(llama: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(llama, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(llama: Path) -> None:
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        load(llama, device="cuda")


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "absent")


def test_importing_it_needs_little() -> None:
    heavy = {"transformers", "ray", "scipy", "pandas"}
    if torch.version.cuda is None and torch.version.hip is None:
        heavy.add("triton")
    code = f"import sys, diptych.workers.execution.model_runner; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
