"""What tensors are where: a worker's engine on a device whose tensors have no numbers (described_device.py)."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from diptych.kernels.common.untried import VARIABLE, is_wanted

from ...support.checkpoints import make_checkpoint, random_prompts
from ...support.drafters import KnowingDrafter
from ...support.gpu.serving import DRAWN, GREEDY, generate, load

ROOT = Path(__file__).parents[3]
SPARSE = {"sparse_attention": "quest", "sparse_budget_tokens": 64}
OVERLAPPED = "overlapped-halves"
IN_HALVES = "experts that others have, in halves"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "drafts": ("gptoss", {"speculation": "ngram", "max_draft_tokens": 8}),
    "eager": ("mixtral", {"cuda_graphs": False}),
    "sparse": ("llama", SPARSE),
    "latent": ("deepseek-v3", {}),
    "inputs of each token": ("gemma4", {}),
    "a KV tail": ("qwen3", {"kv_dtype": "kivi", "block_size": 32, "speculation": "ngram", "max_draft_tokens": 8}),
    "experts that others have": ("deepseek-v3", {"data_parallel": 2}),
    IN_HALVES: ("deepseek-v3", {"data_parallel": 2}),
}
IN_THE_GATE = ("drafts", "latent", "experts that others have")
LATENT: dict[str, Any] = {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}  # sizes that a GPU's kernels know


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_THE_GATE else pytest.mark.long) for name in CONFIGS]
)
def test_host_and_device_do_not_mix(tmp_path: Path, name: str) -> None:
    arch, changes = CONFIGS[name]
    sizes = LATENT if arch == "deepseek-v3" else {"head_dim": 32} if "kv_dtype" in changes else {}
    path = make_checkpoint(tmp_path / arch, arch, seed=21, **sizes)
    call = f"serve({str(path)!r}, {changes!r})"
    code = "from tests.support.gpu.described_device import prepare; prepare(); "
    code += f"from tests.workers.device.test_described_device import serve; {call}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({VARIABLE: OVERLAPPED} if name == IN_HALVES else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def serve(path: str, changes: dict[str, Any]) -> None:
    """Serve requests of all kinds; whatever is refused raises."""
    from diptych.workers.execution.common.halves import Halves
    from tests.support.gpu.described_device import DescribedDevice, launching
    from tests.support.gpu.peers import lone_peer

    device = DescribedDevice()
    launching(device)
    module = "diptych.workers.execution.model_runner.available_bytes"
    shared = lone_peer() if "data_parallel" in changes else nullcontext({})
    small = patch("diptych.workers.execution.gpu.rank_steps.least_rows", lambda _: 64)  # for prompts of tests
    halves = patch.object(Halves, "run", autospec=True, side_effect=Halves.run)
    with device.described(), patch(module, lambda _: 1 << 30), small, halves as in_halves, shared as settings:
        runner = load(Path(path), device, max_running=8, kv_memory_bytes=64 << 20, **changes | settings)
        at_load = sum(device.launches.values())
        samplings = [
            GREEDY,
            DRAWN,
            replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
            replace(GREEDY, logit_bias={3: 1.0}),
            replace(GREEDY, logprobs=5),
            replace(DRAWN, top_k=20, min_p=0.1, logprobs=1),
            replace(GREEDY, prompt_logprobs=2),
        ]
        prompts = random_prompts(3, [1, 16, 33, 100, 250, 400, 90], runner.info.vocab_size)
        drafter = KnowingDrafter(0.7, 8, lambda _, num: [0] * num) if "speculation" in changes else None
        arrivals = [0, 0, 2, 3, 5, 8, 1]
        for chunk_tokens in (512, 40):
            generate(runner, prompts, samplings, arrivals=arrivals, drafter=drafter, chunk_tokens=chunk_tokens)
            runner.check()
        runner.close()
    assert 100 < at_load < sum(device.launches.values())
    assert bool(in_halves.call_count) == is_wanted(OVERLAPPED)
