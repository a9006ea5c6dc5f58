"""Logits and greedy tokens of the engine against transformers', on random weights of a small model of a family.

    python -m benchmarks.gpu.report.exact --family qwen3 [--device cuda]

In float32 and in bfloat16, with graphs and without: prompts of several lengths, then decodes, one sequence at a time.
Both have the same tokens before each position (those that the engine chose). Reported is, over all positions,

    error              ||ours - theirs|| / ||theirs|| of a position's logits, theirs of the same type: the median (a
                       router that decides otherwise changes single positions wholly), and the largest
    from float32       the median of ours against transformers' float32; beside it that of transformers' own type
    tokens that agree  positions at which both have the same largest logit
    gap elsewhere      at the others: how far apart theirs has the two tokens, as a share of the logits' deviation

bfloat16 is right where ours is no farther from float32 than MORE times what transformers' is.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.workers.common.garbage import leave
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.upload import put_on
from diptych.workers.models.checkpoint.weights import DTYPES, Checkpoint, DecoderWeights, load_weights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import WHOLE
from tests.support.checkpoints import make_checkpoint, random_prompts

from ..gpu_engine.rig import Rig, Settings, make_rig
from ..gpu_engine.timed import CudaClock, HostClock, TimedDevice
from .rows import PROBLEM, put

NUM_NEW = 12
LENGTHS = (1, 16, 17, 100, 250)
# Sizes that a GPU's kernels know of latents.
LATENT = {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}
SIZES: dict[str, dict[str, Any]] = {"deepseek-v3": LATENT}
FLOAT32_ERROR = 1e-3  # products of float32 may be computed otherwise on each side, and sums in another order
MORE = 1.5


def device_of(name: str) -> TimedDevice:
    if name == "fake":
        return TimedDevice(FakeDevice(), HostClock())
    return TimedDevice(CudaDevice(torch.device("cuda")), CudaClock())


def weights_of(path: Path, dtype: str, device: TimedDevice) -> DecoderWeights:
    with Checkpoint(path, load_spec(path)) as checkpoint, put_on(device, at_once=False) as put_there:
        where = device.torch_device
        return load_weights(checkpoint.reader(DTYPES[dtype], where, lambda _done, _all: None, WHOLE, None, put_there))


def generate(rig: Rig, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens of a sequence that is alone, and the logits of each, [NUM_NEW, vocabulary] float32."""
    engine, launch, noted = rig.engine, rig.runner.launch, list[Tensor]()

    def noting(*arguments: Any) -> Any:
        step = launch(*arguments)
        rig.main.run(lambda: noted.append(rig.logits[0].clone()))  # after the step, and before the one that follows
        return step

    rig.runner.launch = noting
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    engine.submit("exact/0", Request("exact", tuple(prompt), sampling, 600.0), [])
    tokens: list[int] = []
    while engine.scheduler.has_work or engine.steps:
        tokens += [event.token_id for event in engine.step().tokens]
    rig.device.synchronize()
    rig.runner.launch = launch
    return tokens, torch.stack(noted[:NUM_NEW]).float()


def reference(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Logits of transformers at the positions of these tokens, [NUM_NEW, vocabulary] float32."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    with torch.inference_mode():
        return model(ids).logits[0, len(prompt) - 1 :].float()


def error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative error of each position, [n] float32. ours, theirs: [n, vocabulary] float32."""
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def compare(family: str, path: Path, device_name: str) -> Iterator[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    spec, prompts = load_spec(path), random_prompts(31, LENGTHS)
    lengths_end = max(LENGTHS) + NUM_NEW + 4
    for dtype in ("float32", "bfloat16"):
        models = {of: AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[of]).eval() for of in {"float32", dtype}}
        for graphs in (True, False):
            device = device_of(device_name)
            settings = Settings(
                -(-lengths_end // 16) * 16, 512, 4, kv_memory_bytes=4 << 20, dtype=dtype, cuda_graphs=graphs
            )
            rig = make_rig(spec, settings, device, weights_of(path, dtype, device))
            found = [generate(rig, prompt) for prompt in prompts]
            rig.runner.close()
            for model in models.values():
                model.to(device.torch_device)
            theirs, exact = (
                torch.cat([reference(models[of], p, t) for p, (t, _) in zip(prompts, found, strict=True)])
                for of in (dtype, "float32")
            )
            ours = torch.cat([logits for _, logits in found])
            yield {"family": family, "dtype": dtype, "graphs": graphs, **agreement(ours, theirs, exact)}


def agreement(ours: Tensor, theirs: Tensor, exact: Tensor) -> dict[str, Any]:
    """ours, theirs: [n, vocabulary] float32; exact: theirs in float32."""
    chosen, best = ours.argmax(dim=-1, keepdim=True), theirs.argmax(dim=-1, keepdim=True)
    agrees = (chosen == best)[:, 0]
    gaps = (theirs.gather(1, best) - theirs.gather(1, chosen))[:, 0] / theirs.std(dim=-1)
    own, their_own = error(ours, exact).median().item(), error(theirs, exact).median().item()
    is_float32 = torch.equal(theirs, exact)
    return {
        "error": error(ours, theirs).median().item(),
        "largest": error(ours, theirs).max().item(),
        "from float32": own,
        "transformers from float32": their_own,
        "tokens that agree": f"{int(agrees.sum())} of {len(agrees)}",
        "gap elsewhere": gaps.max().item(),
        "is right": own <= (FLOAT32_ERROR if is_float32 else MORE * their_own),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", required=True, help="a key of tests/support/checkpoints.py's ARCHITECTURES")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    options = parser.parse_args()
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "model", options.family, seed=21, **SIZES.get(options.family, {}))
        for row in compare(options.family, path, options.device):
            put("agreement", **row)
            print(row, flush=True)
            if not row["is right"]:
                is_right = False
                put(PROBLEM, what=f"{row['family']}, {row['dtype']}", problem="logits are farther off than they may be")
    return 0 if is_right else 1


if __name__ == "__main__":
    leave(main())
