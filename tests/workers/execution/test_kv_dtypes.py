"""Workers that keep KV in few bits: what their tokens depend on, how near they are to full width, what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.workers.common.errors import ConfigError
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.gpu import gpu_loader
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import DOT, ROWS, SCALES_LAST
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import AttentionSpec
from diptych.workers.models.plan.kv_plan import check_kv_dtype

from ...support.checkpoints import make_checkpoint, random_prompts
from ...support.engines import run, tokens
from ...support.harness import TINY
from ...support.serving import Server
from ..conftest import CheckpointOf

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 40, 90, 150)
KV_DTYPES = ["int8", "fp8", "int4"]
# Windows, sinks, softcaps, layers that are unlike, layers that read another one's KV, experts.
FAMILIES = ["gptoss", "gemma2", "gemma3", "gemma4", "mixtral", "qwen3"]


ON_GPU = {"device": "fake"}  # whose kernels are torch's, on CPU


def load(path: Path, **settings: Any) -> ModelRunner:
    common = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 32 << 20, "max_context_tokens": 256}
    return ModelRunner.load(WorkerConfig.of(path, **(common | settings)))


def tokens_of(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[t.token_id for t in tokens] for tokens in server.generate(prompts, [GREEDY] * len(prompts))]


def share_of_equal(some: list[int], others: list[int]) -> float:
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


@pytest.mark.parametrize(
    ("settings", "kv_dtype"),
    [
        ({"tensor_parallel": 2}, "int4"),  # each rank stores whole vectors, in any dtype as alone
        *(pytest.param({"tensor_parallel": 2}, kv_dtype, marks=pytest.mark.long) for kv_dtype in ("int8", "fp8")),
        *(
            (settings, kv_dtype)
            for settings in ({}, {"dtype": "bfloat16", "kv_axis_order": "layer"}, ON_GPU | {"cuda_graphs": False})
            for kv_dtype in KV_DTYPES
        ),
    ],
)
def test_tokens_are_a_requests_own(kv_dtype: str, settings: dict[str, Any]) -> None:
    """Whatever the chunks, the company, and what the prefix cache has."""
    runner = load(TINY, kv_dtype=kv_dtype, **settings)
    packing = SCALES_LAST if "device" in settings else DOT
    assert (runner.layout.dtype, runner.layout.packing) == (kv_dtype, packing)
    prompts = random_prompts(3, LENGTHS)
    whole = Server(runner, SchedulerConfig(chunk_tokens=0))
    expected = [tokens_of(whole, [prompt])[0] for prompt in prompts]
    assert tokens_of(whole, prompts) == expected, "from the prefix cache, in company"
    for chunk_tokens in (16, 7):
        chunked = Server(runner, SchedulerConfig(chunk_tokens=chunk_tokens, max_running=3))
        assert tokens_of(chunked, prompts) == expected
    runner.close()


@pytest.mark.parametrize("settings", [{}, {"cpu_isa": "none"}, ON_GPU | {"kv_axis_order": "layer"}])
def test_a_block_that_two_answers_share_is_copied_with_its_scales(settings: dict[str, Any]) -> None:
    """Of one prompt, at once: the second answer gets a copy of the last block, and writes on in it."""
    runner = load(TINY, kv_dtype="int8", **settings)
    prompt = tuple(random_prompts(4, [41])[0])

    def answers(num: int) -> list[list[int]]:
        engine = Engine(runner, SchedulerConfig())
        for i in range(num):
            sampling = replace(GREEDY, temperature=1.0, seed=i)
            engine.submit(f"0/{i}", Request(str(i), prompt, sampling, 60.0), [])
        outputs = run(engine)
        return [[t.token_id for t in tokens(outputs, f"0/{i}")] for i in range(num)]

    together = answers(3)
    assert together[:1] == answers(1) and together[0] != together[1]
    assert together == answers(3)
    runner.close()


@pytest.mark.parametrize(
    ("arch", "kv_dtype"),
    [
        pytest.param(arch, kv_dtype, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, arch in enumerate(FAMILIES)
        for j, kv_dtype in enumerate(KV_DTYPES)
    ],
)
def test_every_family_follows_full_width(checkpoint_of: CheckpointOf, arch: str, kv_dtype: str) -> None:
    """First tokens of models that have learned nothing: small changes of logits change some. The compiled kernels and
    torch store the same numbers."""
    path, prompts = checkpoint_of(arch), random_prompts(5, [30, 60, 90] * 6)
    once = replace(GREEDY, max_tokens=1)
    found: list[list[int]] = []
    few, by_torch = {"kv_dtype": kv_dtype}, {"cpu_isa": "none", "block_size": 12}
    for settings in ({}, few, few | by_torch, few | by_torch | ON_GPU | {"cuda_graphs": False}):
        runner = load(path, **settings)
        outputs = Server(runner, SchedulerConfig()).generate(prompts, [once] * len(prompts))
        found.append([tokens[0].token_id for tokens in outputs])
        runner.close()
    full, kept, on_cpu, on_gpu = found
    assert share_of_equal(full, kept) >= {"int8": 0.8, "fp8": 0.5, "int4": 0.25}[kv_dtype]
    assert share_of_equal(kept, on_cpu) >= 0.9
    assert on_gpu == on_cpu


@pytest.mark.parametrize("settings", [{}, ON_GPU | {"cuda_graphs": False}], ids=["cpu", "gpu"])
@pytest.mark.parametrize("method", ["draft", "eagle3", "mtp"])
def test_what_drafts_keeps_its_kv_as_the_target_does(method: str, settings: dict[str, Any]) -> None:
    draft = {"speculation": method, "draft_model": str(TINY.parent / f"tiny_{method}")}
    runner = load(TINY, kv_dtype="int8", **draft, **settings)
    layout = runner.layout
    found = [(of.uniform.dtype, of.uniform.packing) for of in layout.layer_groups(0, layout.num_layers)]
    assert found == [("int8", SCALES_LAST if settings else DOT)] * 2
    runner.close()


def test_as_many_more_blocks_fit_as_they_are_smaller(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", 3, head_dim=64)
    layouts = [load(path, dtype="bfloat16", kv_dtype=kv_dtype).layout for kv_dtype in ("auto", *KV_DTYPES)]
    full, *kept = (layout.block_bytes for layout in layouts)
    due = dict(zip(KV_DTYPES, (66, 66, 34), strict=True))  # bytes of a vector: 64 numbers, and their scale
    assert [full / num_bytes for num_bytes in kept] == [128 / due[of] for of in KV_DTYPES]


def test_what_the_kernels_do_not_know_torch_computes() -> None:
    assert load(TINY, kv_dtype="int8", block_size=5).layout.packing == ROWS


def test_models_that_cannot_are_refused_by_name(checkpoint_of: CheckpointOf) -> None:
    with pytest.raises(ConfigError, match="kv_dtype int8 does not work with latent attention"):
        load(checkpoint_of("deepseek-v2"), kv_dtype="int8")
    spec = load_spec(checkpoint_of("llama"))
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    odd = replace(spec, layers=(replace(spec.layers[0], attention=replace(attention, head_dim=9)),))
    with pytest.raises(ConfigError, match=r"kv_dtype int8 needs heads of a multiple of 2 numbers, and .* have 9"):
        check_kv_dtype(odd, "int8", 16, on_gpu=False)
    with pytest.raises(ConfigError, match=r"kv_dtype int4 needs heads of a multiple of 4 numbers, and .* have 9"):
        check_kv_dtype(odd, "int4", 16, on_gpu=False)
    check_kv_dtype(odd, "float32", 16, on_gpu=True)


def test_what_a_gpu_cannot_keep_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, checkpoint_of: CheckpointOf
) -> None:
    """Its loads need blocks of whole 16 bytes; and a GPU may have no FP8."""
    config = WorkerConfig.of(TINY, dtype="float32", kv_dtype="fp8", block_size=6)
    expected = "kv_dtype fp8 needs on a GPU a block_size that is a multiple of 4, and it is 6: set block_size to 16"
    with pytest.raises(ConfigError, match=expected):
        ModelRunner.load(config, gpu=FakeDevice())
    with pytest.raises(ConfigError, match="kv_dtype fp8 does not work with latent attention"):
        ModelRunner.load(config.changed(model=str(checkpoint_of("deepseek-v2")), block_size=16), gpu=FakeDevice())
    monkeypatch.setattr(gpu_loader, "can_store", lambda dtype, _: dtype == torch.int8)
    with pytest.raises(ConfigError, match=r"kv_dtype fp8 needs a GPU with FP8 .*: set it to int8, or leave it out"):
        ModelRunner.load(config.changed(block_size=16), gpu=FakeDevice())
