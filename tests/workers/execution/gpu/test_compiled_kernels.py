"""No request waits for the compiler: every kernel that a step may launch is compiled when the worker is loaded."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from diptych.workers.common.request import SamplingParams

from ....support.checkpoints import random_prompts
from ....support.drafters import KnowingDrafter
from ....support.gpu.serving import DRAWN, GREEDY, early, generate, load
from ....support.harness import TINY
from ...conftest import CheckpointOf

ROOT = Path(__file__).parents[4]
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 127, 128, 129, 150, 200, 250, 300, 400)
SPARSE = {"sparse_attention": "quest", "sparse_budget_tokens": 64}
IN_THE_GATE = (
    "prompts by cuDNN",
    "mixture, windows and sinks",
    "a mixture of several workers",
    "sparse",
    "16 bits, few rows, without graphs",
    "int4, without graphs",
    "KV in 4 bits by channel, drafts",
    "latents",
)
KIVI = {"kv_dtype": "kivi", "block_size": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "16 bits": ("llama", {"dtype": "bfloat16"}),
    "16 bits, few rows, without graphs": ("llama", {"dtype": "bfloat16", "max_running": 8, "cuda_graphs": False}),
    "prompts by cuDNN": ("llama", {"dtype": "bfloat16"}),
    "mixture, windows and sinks": ("gptoss", {}),
    "KV of few bits": ("llama", {"kv_dtype": "int8"}),
    "sparse": ("llama", SPARSE),
    "drafts": ("llama", {"speculation": "ngram", "max_draft_tokens": 8}),
    "sparse, without graphs": ("llama", SPARSE | {"cuda_graphs": False}),
    "a mixture without graphs": ("mixtral", {"cuda_graphs": False}),
    "int4, without graphs": ("llama", {"quantize": "int4", "cuda_graphs": False}),
    "fp8, widened": ("llama", {"quantize": "fp8", "max_running": 100}),
    "rows of int8, without graphs": ("llama", {"quantize": "w8a8", "cuda_graphs": False, "max_running": 100}),
    "a mixture of several workers": ("mixtral", {"data_parallel": 2}),
    "a mixture in mxfp4": ("mixtral", {"quantize": "mxfp4"}),
    "int4, layers of sampled rows": ("gemma4", {"quantize": "int4", "cuda_graphs": False}),
    "KV in 4 bits by channel, drafts": ("tiny", KIVI | {"speculation": "ngram", "max_draft_tokens": 8}),
    "latents": ("deepseek-v3", {}),
    "latents, drafts": ("deepseek-v2", {"dtype": "bfloat16", "speculation": "ngram", "max_draft_tokens": 8}),
    "KV in 4 bits by channel, without graphs": ("tiny", KIVI | {"dtype": "bfloat16", "cuda_graphs": False}),
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "names",
    [IN_THE_GATE, pytest.param([name for name in CONFIGS if name not in IN_THE_GATE], marks=pytest.mark.long)],
    ids=["in the gate", "others"],
)
def test_no_kernel_is_compiled_for_a_request(
    checkpoint_of: CheckpointOf, latent_of: CheckpointOf, names: Sequence[str]
) -> None:
    """In one process, which takes long to import all."""

    def path_of(model: str) -> Path:
        return TINY if model == "tiny" else (latent_of if model.startswith("deepseek") else checkpoint_of)(model)

    module = "tests.workers.execution.gpu.test_compiled_kernels"
    code = f"from tests.support.gpu.launch_keys import prepare; prepare()\nfrom {module} import compare\n"
    paths = {name: path_of(CONFIGS[name][0]) for name in names}
    code += "".join(f"compare({name!r}, {str(path)!r})\n" for name, path in paths.items())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_kernel_that_is_compiled_while_requests_wait_is_named(tmp_path: Path) -> None:
    code = "from tests.support.gpu.launch_keys import prepare; prepare(); "
    code += "from tests.workers.execution.gpu.test_compiled_kernels import compile_two; compile_two()"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("on cuda:1 while requests are served") == 1 and "_rms_norm_kernel" in done.stderr


def compile_two() -> None:
    """Compile a kernel before a device is told that all is loaded, and another one after it."""
    import torch
    from triton.runtime.jit import JITFunction

    from diptych.kernels.elementwise.rms_norm import rms_norm
    from diptych.workers.device.cuda_device import CudaDevice

    run = JITFunction.run
    JITFunction.run = lambda kernel, *args, warmup, **kwargs: run(kernel, *args, warmup=True, **kwargs)
    device = object.__new__(CudaDevice)  # there is none
    device._device = torch.device("cuda", 1)
    for dim in (64, 128):
        rms_norm(torch.zeros(2, dim), torch.ones(dim), 1e-5)
        rms_norm(torch.zeros(3, dim), torch.ones(dim), 1e-5)
        device.loaded()


def compare(name: str, path: str) -> None:
    """Compare what a worker launches while it is loaded with what it launches for requests of many kinds."""
    from diptych.kernels.attention.libraries.cudnn_calls import CudnnConfig
    from tests.support.gpu.fake_cudnn import FakeCudnn, chosen
    from tests.support.gpu.launch_keys import recorded
    from tests.support.gpu.peers import lone_peer

    print(name, file=sys.stderr)
    changes = CONFIGS[name][1]
    shared = lone_peer() if "data_parallel" in changes else nullcontext({})
    short = CudnnConfig(least_new=32, least_pairs=500, unit=32, most_piece=64, step=16)
    cudnn = FakeCudnn() if name == "prompts by cuDNN" else None
    library = nullcontext() if cudnn is None else chosen(cudnn, short, computes=False)
    with recorded() as keys, shared as settings, library:
        runner = load(Path(path), early(), **{"max_running": 24, "kv_memory_bytes": 64 << 20} | changes | settings)
        at_load = keys.take()
        at_load_plans = [] if cudnn is None else [*cudnn.built]
        drafter = KnowingDrafter(0.7, 8, lambda _, num: [0] * num) if "speculation" in changes else None
        serve(runner, random.Random(1), drafter, changes.get("max_running", 24))
        assert drafter is None or drafter.counts["accepted"] > 20
    prefill = "_kivi_prefill_kernel" if changes.get("kv_dtype") == "kivi" else "_prefill_attention_kernel"
    prefill = "_mla_prefill_kernel" if CONFIGS[name][0].startswith("deepseek") else prefill
    assert sum(map(len, at_load.values())) > 15 and prefill in keys.found
    if cudnn is not None:
        assert "_merge_results_kernel" in keys.found and cudnn.built == at_load_plans
    for kernel, found in keys.found.items():
        assert found <= at_load.get(kernel, set()), f"{kernel} is compiled for a request: {found - at_load[kernel]}"


def serve(runner: Any, rng: random.Random, drafter: KnowingDrafter | None, max_running: int) -> None:
    samplings = [
        GREEDY,
        DRAWN,
        replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
        replace(GREEDY, logit_bias={3: 1.0}),
        replace(GREEDY, logprobs=5),
        replace(DRAWN, top_k=20, min_p=0.1, logprobs=1),
    ]

    def ask(lengths: list[int], samplings: list[SamplingParams], chunk_tokens: int) -> None:
        asked = [replace(sampling, max_tokens=rng.randint(2, 8)) for sampling in samplings]
        arrivals = [rng.randint(0, 12) for _ in lengths]
        prompts = random_prompts(3, lengths, runner.info.vocab_size)
        sizes = {"chunk_tokens": chunk_tokens, "max_running": max_running}
        generate(runner, prompts, asked, arrivals=arrivals, drafter=drafter, **sizes)
        runner.check()

    for chunk_tokens in (512, 48, 17):
        ask([*LENGTHS], [GREEDY] * len(LENGTHS), chunk_tokens)
        for sampling in samplings[1:]:
            ask(rng.sample(LENGTHS, 8), [sampling] * 8, chunk_tokens)
    ask(rng.sample(LENGTHS, 20), [rng.choice(samplings) for _ in range(20)], 64)
