"""The CUDA engine where its kernels compute: interpreted on the fake device, and on a real one.

Greedy tokens of prompts whose reference has no ties (tests/support/checkpoints.py), and draws, equal those that
eager_steps.py gives on CPU.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.kernels.kv.kivi import GROUP
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.device import Device
from diptych.workers.kv.layout import ROWS, SCALES_LAST

from ....support.checkpoints import make_checkpoint, random_prompts, untied_prompts
from ....support.drafters import KnowingDrafter, of_outputs
from ....support.gpu.serving import DRAWN, GREEDY, generate, late, load
from ...conftest import CheckpointOf
from ...models.quant.test_formats import FORMATS
from ...models.quant.writers import mxfp4_experts, quantised
from ..draft.conftest import DraftOf
from ..draft.test_head_draft import HEADS, TINY
from ..test_drafts import SAMPLINGS, ids
from ..test_drafts import generate as generate_with_drafts
from .conftest import EVEN
from .test_models_draft_on_device import answered, compare_drafts, skipping
from .test_numbers_on_device import first_logprobs
from .test_sparse_on_device import answers as sparse_tokens
from .test_sparse_on_device import make as make_deep
from .test_sparse_on_device import on

ROOT = Path(__file__).parents[4]
FEW = replace(GREEDY, max_tokens=3)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deep(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def sparse_answers(deep: Path) -> list[list[int]]:
    return sparse_tokens(on(deep, None))


def compare(
    path: Path,
    device: Device,
    lengths: list[int],
    *,
    plain: Path | None = None,
    is_short: bool = False,
    **config: Any,
) -> None:
    """plain: has the weights of `path`, which is quantised."""
    prompts = [prompt for prompt, _ in untied_prompts(plain or path, seed=5, lengths=lengths, max_tokens=16)]
    samplings = [FEW if is_short else GREEDY, replace(DRAWN, max_tokens=3) if is_short else DRAWN] * len(prompts)
    samplings = samplings[: len(prompts)]
    expected = generate(load(path, None, kv_dtype=config.get("kv_dtype", "auto")), prompts, samplings).token_ids
    changes = {"max_running": 2, "max_context_tokens": 64} if is_short else {"max_running": 16}
    runner = load(path, device, **changes | config)
    for arrivals in (list(range(len(prompts))),) if is_short else ([0] * len(prompts), list(range(len(prompts)))):
        assert generate(runner, prompts, samplings, arrivals=arrivals, chunk_tokens=48).token_ids == expected
    runner.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tokens_on_a_gpu(llama: Path, qwen3: Path, latent_of: CheckpointOf, checkpoint_of: CheckpointOf) -> None:
    device = CudaDevice(torch.device("cuda"))
    gemma4 = [checkpoint_of(arch) for arch in ("gemma4", "gemma4-moe")]
    for path in (llama, qwen3, latent_of("deepseek-v2"), latent_of("deepseek-v3"), *gemma4):
        compare(path, device, [1, 2, 15, 16, 17, 33, 64, 100, 250])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_kv_of_few_bits_on_a_gpu(llama: Path, qwen3: Path, checkpoint_of: CheckpointOf, kv_dtype: str) -> None:
    device = CudaDevice(torch.device("cuda"))
    for path in (llama, qwen3, checkpoint_of("gptoss"), checkpoint_of("gemma4")):
        assert_near(path, device, SCALES_LAST, kv_dtype=kv_dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("arch", ["llama", "gptoss"])
def test_kivi_on_a_gpu(arch: str, tmp_path: Path) -> None:
    """Its heads have as many numbers as a group."""
    path = make_checkpoint(tmp_path / arch, arch, 8, head_dim=GROUP)
    assert_near(path, CudaDevice(torch.device("cuda")), ROWS, kv_dtype="kivi", block_size=GROUP)


def assert_near(path: Path, device: Device, packing: str, **config: Any) -> None:
    """Answers of three tokens are those of a CPU, but for two of eighteen at most: sums of another order round numbers
    that lie between two codes otherwise. packing: of KV on the device."""
    prompts = random_prompts(5, [1, 2, 15, 16, 17, 33, 64, 100, 250] * 2)
    found: list[list[list[int]]] = []
    for on_device in (None, device):
        runner = load(path, on_device, max_running=len(prompts), **config)
        assert runner.layout.packing == (ROWS if on_device is None else packing)
        found.append(generate(runner, prompts, [FEW] * len(prompts), chunk_tokens=48).token_ids)
        runner.close()
    same = sum(one == other for one, other in zip(*found, strict=True))
    assert same >= len(prompts) - 2, (path, same)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_on_a_gpu(llama: Path, latent_of: CheckpointOf, checkpoint_of: CheckpointOf, graphs: bool) -> None:
    device = CudaDevice(torch.device("cuda"))
    for path in (llama, checkpoint_of("gptoss"), latent_of("deepseek-v3"), checkpoint_of("gemma4")):
        samplings = [*SAMPLINGS.values()]
        plain = ids(generate_with_drafts(load(path, None, max_running=8), samplings))
        runner = load(path, device, max_running=8, speculation="ngram", max_draft_tokens=16, cuda_graphs=graphs)
        drafter = KnowingDrafter(0.8, 16, of_outputs(plain))
        assert ids(generate_with_drafts(runner, samplings, drafter, chunk_tokens=40, max_running=8)) == plain
        assert drafter.counts["accepted"] > 20
        runner.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_models_draft_on_a_gpu(llama: Path, draft_of: DraftOf, tmp_path: Path, graphs: bool) -> None:
    device = CudaDevice(torch.device("cuda"))
    draft = {"draft_model": str(draft_of("llama", 0.15))}
    for path, method, settings in (
        (llama, "draft", draft),
        (TINY, "self", skipping(tmp_path, 5, [2])),
        *((TINY, method, {"draft_model": str(folder)}) for method, folder in HEADS.items()),
    ):
        expected, _ = answered(path, None)
        found, counted = answered(path, device, method, cuda_graphs=graphs, **settings)
        assert found == expected
        assert counted is not None and counted[0] > 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_samplings_and_sparse_decodes_on_a_gpu(
    llama: Path, deep: Path, sparse_answers: list[list[int]], graphs: bool
) -> None:
    """Penalties, biases, filters and log-probabilities, of sequences that decode a step ahead."""
    device = CudaDevice(torch.device("cuda"))
    samplings = [*SAMPLINGS.values()]
    plain = generate_with_drafts(load(llama, None, max_running=8), samplings)
    runner = load(llama, device, max_running=8, cuda_graphs=graphs)
    found = generate_with_drafts(runner, samplings, chunk_tokens=40, max_running=8)
    runner.close()
    assert ids(found) == ids(plain)
    for key, events in plain.items():
        given = [event.logprob or 0.0 for event in events]
        assert [event.logprob or 0.0 for event in found[key]] == pytest.approx(given, abs=1e-4)
    sparse = on(deep, device, cuda_graphs=graphs)
    assert sparse_tokens(sparse) == sparse_answers
    sparse.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", ["gptq 4", "gptq 4, activations' order", "mxfp4", "bitsandbytes nf4", "fp8, block"])
def test_numbers_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Weights as they are stored, and for mxfp4 a mixture's too."""
    device, source = CudaDevice(torch.device("cuda")), make_checkpoint(tmp_path / "source", "llama", 8)
    pairs = [quantised(source, tmp_path, *FORMATS[name])]
    if name == "mxfp4":
        pairs.append(mxfp4_experts(make_checkpoint(tmp_path / "gptoss", "gptoss", 8), tmp_path / "experts"))
    for packed, plain in pairs:
        compare(packed, device, [1, 2, 17, 33, 70, 250], plain=plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("quantize", ["fp8", "w8a8", "int4"])
def test_weights_that_are_rounded_at_load_on_a_gpu(quantize: str, llama: Path) -> None:
    """Nearly what torch on CPU has: sums in another order may round a number of a row otherwise."""
    prompts, runs = random_prompts(5, [1, 17, 33, 70, 250]), list[list[float | None]]()
    for device in (None, CudaDevice(torch.device("cuda"))):
        runner = load(llama, device, max_running=16, quantize=quantize)
        runs += [first_logprobs(runner, prompts), [first_logprobs(runner, [prompt])[0] for prompt in prompts]]
        runner.close()
    assert all(run == pytest.approx(runs[0], abs=0.05) for run in runs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("config", [{}, {"expert_parallel": 2}, {"cuda_graphs": False}])
def test_tokens_of_ranks_on_gpus(checkpoint_of: CheckpointOf, llama: Path, config: dict[str, Any]) -> None:
    path = checkpoint_of("gptoss") if config.get("expert_parallel") else llama
    compare(path, CudaDevice(torch.device("cuda", 0)), [1, 16, 17, 100, 250], tensor_parallel=2, **config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_graph_holds_what_ranks_say_to_each_other(tmp_path: Path) -> None:
    """NCCL with one rank: two on one GPU it refuses."""
    device = CudaDevice(torch.device("cuda"))
    group, on = device.group(0, 1, tmp_path / "rendezvous"), device.torch_device
    part, found = torch.zeros(3, 5, device=on), torch.zeros(3, 5, device=on)

    def work() -> None:
        group.broadcast(part)
        [gathered] = group.gather(group.all_reduce(part + 1), [(3, 5)])
        found.copy_(gathered)
        group.meet()

    lane = device.lane("main")
    replay = device.capture(lane, work)
    part.fill_(2)
    device.synchronize()
    lane.run(replay)
    device.synchronize()
    assert torch.equal(found, torch.full_like(found, 3))
    del replay  # a communicator does not end while a graph holds its calls
    group.close()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_tokens_by_interpreted_kernels(llama: Path, tmp_path: Path) -> None:
    small = EVEN | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    latent = make_checkpoint(tmp_path / "latent", "deepseek-v3", seed=21, **small)
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    gemma4 = make_checkpoint(tmp_path / "gemma4", "gemma4", seed=21, **small | layers | {"num_kv_shared_layers": 1})
    packed, plain = quantised(llama, tmp_path, *FORMATS["packed 4, zero points"])
    run_interpreted(f"interpreted({[str(llama), str(latent), str(gemma4)]!r}, {str(packed)!r}, {str(plain)!r})")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_drafts_of_models_by_interpreted_kernels(llama: Path, draft_of: DraftOf) -> None:
    run_interpreted(f"interpreted_drafts({str(llama)!r}, {str(draft_of('llama', 0.05))!r})")


def run_interpreted(call: str) -> None:
    """Call a function of this file in a process that interprets Triton kernels. One thread, because interpreted kernels
    are many small operations."""
    code = f"import triton; from tests.workers.execution.gpu import test_on_a_gpu as t; t.{call}"
    env = os.environ | {"TRITON_INTERPRET": "1", "DIPTYCH_TRITON": "interpret", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=ROOT)


def interpreted(paths: list[str], packed: str, plain: str) -> None:
    first, *others = (Path(path) for path in paths)
    compare(first, late(), [5, 17], is_short=True)
    # No graphs: to interpret them takes its time.
    short: dict[str, Any] = {"is_short": True, "cuda_graphs": False, "max_context_tokens": 32}
    compare(first, late(), [17], **short, kv_dtype="int8")
    for path in others:
        compare(path, late(), [17], **short)
    compare(Path(packed), late(), [17], plain=Path(plain), **short)


def interpreted_drafts(path: str, draft: str) -> None:
    compare_drafts(Path(path), {"speculation": "draft", "draft_model": draft})
    compare_drafts(TINY, {"speculation": "eagle3", "draft_model": str(HEADS["eagle3"])})
