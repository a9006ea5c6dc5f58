"""Quantised checkpoints computed in their numbers by the CUDA engine, on the fake device: the tokens of transformers on
what the numbers mean, and those of torch where rows are quantised too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.kernels.gemm.linear import Weight
from diptych.kernels.gemm.packed_weight import PackedWeight
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import make_checkpoint, random_prompts
from ....support.gpu.serving import (
    ALL_SORTS_OF_STEPS,
    GREEDY,
    Cases,
    assert_tokens,
    cases_of,
    generate,
    late,
    load,
    steps_of,
)
from ...models.quant.test_formats import FORMATS
from ...models.quant.writers import mxfp4_experts, quantised

EXACT = [
    ("llama", "gptq 4"),
    ("llama", "mxfp4"),
    ("llama", "fp8, block"),  # of 16 x 32: widened
    ("llama", "bitsandbytes int8"),
    ("llama", "bitsandbytes nf4"),
    ("llama", "gptq 4, activations' order"),
    ("qwen3moe", "packed 4, zero points"),
    ("gptoss", "mxfp4 of experts"),
]


def checkpoints(folder: Path, arch: str, name: str) -> tuple[Path, Path]:
    """One that is quantised, and one of what its numbers mean."""
    source = make_checkpoint(folder / "source", arch, 8)
    return mxfp4_experts(source, folder) if arch == "gptoss" else quantised(source, folder, *FORMATS[name])


def first_weight(runner: ModelRunner, field: str) -> Weight:
    weights = steps_of(runner)._own.prompts.pieces.decoder.weights
    return next(of for layer in weights.layers if (of := getattr(layer, field)) is not None)


def first_logprobs(runner: ModelRunner, prompts: list[list[int]], **config: Any) -> list[float | None]:
    """Log-probability of each prompt's first token."""
    run = generate(runner, prompts, [replace(GREEDY, max_tokens=1, logprobs=1)] * len(prompts), **config)
    return [of[0] for of in run.logprobs]


@pytest.mark.parametrize(("arch", "name"), EXACT)
def test_the_tokens_of_transformers_on_what_the_numbers_mean(arch: str, name: str, tmp_path: Path) -> None:
    packed, plain = checkpoints(tmp_path, arch, name)
    _, prompts, expected = cases_of(plain)
    cases: Cases = packed, prompts, expected
    runner = load(packed, late())
    assert isinstance(first_weight(runner, "experts_down" if arch != "llama" else "o"), PackedWeight)
    for config in ALL_SORTS_OF_STEPS:
        assert_tokens(runner, cases, config)
    runner.close()


@pytest.mark.parametrize(("name", "error"), [("int8, rows too", 0.05), ("fp8, rows too", 0.3), ("fp8 tensor", 0.3)])
def test_rows_that_are_quantised(name: str, error: float, tmp_path: Path) -> None:
    """Nearly the same alone, batched and chunked: sums in another order may round a number of a row otherwise. Torch on
    CPU quantises rows of int8 too, and not those of FP8."""
    packed, _ = checkpoints(tmp_path, "llama", name)
    prompts = random_prompts(3, [1, 15, 17, 100])
    runner = load(packed, late())
    assert isinstance(first_weight(runner, "o"), ScaledWeight)
    alone = [first_logprobs(runner, [prompt])[0] for prompt in prompts]
    for config in ALL_SORTS_OF_STEPS:
        assert first_logprobs(runner, prompts, **config) == pytest.approx(alone, abs=0.05)
    runner.close()
    plain = load(packed, None)
    assert first_logprobs(plain, prompts) == pytest.approx(alone, abs=error)
    plain.close()


@pytest.mark.parametrize("changes", [{"quantize": "int8"}, {"quantize": "int4"}, {"quantize": "mxfp4"}])
def test_weights_that_are_rounded_at_load(changes: dict[str, Any], llama: Path) -> None:
    """Torch on CPU computes with the same."""
    prompts = random_prompts(3, [1, 15, 17, 100])
    twin = load(llama, None, **changes)
    expected = generate(twin, prompts, [GREEDY] * len(prompts)).token_ids
    twin.close()
    runner = load(llama, late(), **changes)
    assert isinstance(first_weight(runner, "qkv"), PackedWeight)
    assert generate(runner, prompts, [GREEDY] * len(prompts)).token_ids == expected
    runner.close()
