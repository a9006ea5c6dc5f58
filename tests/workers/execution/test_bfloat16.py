"""bfloat16 of every family, by the CUDA engine (on a fake device) and by the compiled kernels, beside transformers'.

All have the same tokens before each position: those that the engine chose. What is compared are the log-probabilities
of its likeliest tokens, by their distance from transformers' float32: no engine's is more than MORE times that of
transformers' own bfloat16, in the median of all positions (a router that decides otherwise changes single ones wholly).
The likeliest token of a position is the same as in transformers' bfloat16 in at least SAME of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from diptych.kernels.cpu.load import library
from diptych.workers.common.request import SamplingParams
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.compiled_limits import why_not

from ...support.checkpoints import ARCHITECTURES, make_checkpoint, one_thread, random_prompts
from ...support.gpu.serving import early, load
from ...support.serving import Server

PROMPTS = random_prompts(7, [1, 16, 30, 65, 200])
LONG = PROMPTS[2:]  # of "phi3-long": transformers rotates its first 16 positions otherwise, see rope.py
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=20)
MORE = 1.5
SAME = 0.85
IN_THE_GATE = ("llama", "gptoss", "gemma3")
LATENT: dict[str, Any] = {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}  # sizes that a GPU's kernels know
FAMILIES = [pytest.param(arch, marks=[] if arch in IN_THE_GATE else pytest.mark.long) for arch in ARCHITECTURES]


@dataclass(frozen=True)
class Agreement:
    own: float  # median distance of a position's log-probabilities from float32
    theirs: float  # that of transformers' bfloat16
    num_agreeing: int  # positions whose likeliest token is the same as in transformers' bfloat16
    num: int
    gap: float  # at the others: the largest distance of the two tokens, in transformers' bfloat16

    def check(self) -> None:
        assert 0 < self.own <= MORE * self.theirs, self
        assert self.num_agreeing >= SAME * self.num, self


@pytest.fixture(scope="session")
def bf16_checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bfloat16")
    return cache(
        lambda arch: make_checkpoint(folder / arch, arch, seed=31, **(LATENT if arch.startswith("deepseek") else {}))
    )


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_cuda_engine_is_as_near_as_transformers(arch: str, bf16_checkpoint_of: Any) -> None:
    agreement_of(bf16_checkpoint_of(arch), "cuda", LONG if arch == "phi3-long" else PROMPTS).check()


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("arch", FAMILIES)
def test_the_compiled_kernels_are_as_near_as_transformers(arch: str, bf16_checkpoint_of: Any) -> None:
    path = bf16_checkpoint_of(arch)
    if unknown := why_not(load_spec(path)):
        pytest.skip(f"torch computes {unknown}")
    agreement_of(path, "compiled", LONG if arch == "phi3-long" else PROMPTS).check()


def agreement_of(path: Path, engine: str, prompts: list[list[int]]) -> Agreement:
    """engine: "cuda", on a fake device, or "compiled"."""
    how: dict[str, Any] = {"cpu_isa": "auto"} if engine == "compiled" else {}
    with one_thread():
        runner = load(path, early() if engine == "cuda" else None, dtype="bfloat16", **how)
        server = Server(runner, SchedulerConfig(chunk_tokens=48), prefix_cache=False)
        found = server.generate(prompts, [GREEDY] * len(prompts))
        runner.close()
        exact, theirs = (logprobs_of(path, dtype, prompts, found) for dtype in (torch.float32, torch.bfloat16))
    tops = [token.top for tokens in found for token in tokens]
    ids = torch.tensor([[token_id for token_id, _ in top] for top in tops])
    ours = torch.tensor([[logprob for _, logprob in top] for top in tops])
    best, chosen = theirs.argmax(dim=1), ids[:, 0]
    gaps = (theirs.gather(1, best[:, None]) - theirs.gather(1, chosen[:, None]))[:, 0]
    wanted = exact.gather(1, ids)
    return Agreement(
        distance(ours, wanted),
        distance(theirs.gather(1, ids), wanted),
        int((best == chosen).sum()),
        len(tops),
        float(gaps.max()),
    )


def distance(of: Tensor, exact: Tensor) -> float:
    """Median over positions of the root mean square of the differences. of, exact: [positions, tokens]."""
    return float((of - exact).square().mean(dim=1).sqrt().median())


def logprobs_of(
    path: Path, dtype: torch.dtype, prompts: list[list[int]], found: Sequence[Sequence[SampledToken]]
) -> Tensor:
    """Log-probabilities of transformers at the positions of these tokens, [positions, vocabulary] float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    rows: list[Tensor] = []
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = prompt + [token.token_id for token in tokens][:-1]
        with torch.inference_mode():
            rows.append(model(torch.tensor([ids])).logits[0, len(prompt) - 1 :].float().log_softmax(dim=1))
    return torch.cat(rows)
