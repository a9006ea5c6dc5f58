"""transformers loads what `quantise` writes, by compressed-tensors, and computes the same model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ...support.checkpoints import make_checkpoint, random_prompts, reference_model
from .written import decoded_by_library, write

# Largest error of the logits, as a part of their norm. Of w8a8 and fp8 transformers rounds activations, too.
ERRORS = {"int8": 1e-5, "int4": 1e-5, "w8a8": 0.05, "fp8": 0.2}


def logits(path: Path, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference_model(path)(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("format", ERRORS)
def test_logits_are_those_of_what_the_numbers_mean(format: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", 1, initializer_range=0.05)
    write(source, tmp_path / "out", format)
    (prompt,) = random_prompts(5, [30])
    found, expected = (
        logits(tmp_path / "out", prompt),
        logits(decoded_by_library(tmp_path / "out", tmp_path / "plain"), prompt),
    )
    error = float((found - expected).norm() / expected.norm())
    assert error < ERRORS[format]
    assert (error > 1e-3) == (format in ("w8a8", "fp8"))
    assert float((expected - logits(source, prompt)).norm() / expected.norm()) < 0.2
