"""Checkpoints of drafts: the served model with noise in its weights, which is right now and then."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ...conftest import CheckpointOf

DraftOf = Callable[[str, float], Path]  # of an architecture, and a share of noise


@pytest.fixture(scope="session")
def draft_of(checkpoint_of: CheckpointOf, tmp_path_factory: pytest.TempPathFactory) -> DraftOf:
    folder = tmp_path_factory.mktemp("drafts")

    @cache
    def make(arch: str, noise: float) -> Path:
        path = folder / f"{arch}-{noise}"
        shutil.copytree(checkpoint_of(arch), path)
        generator = torch.Generator().manual_seed(5)
        for file in path.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                drawn = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                tensors[name] = tensor + noise * tensor.float().std(correction=0).to(tensor.dtype) * drawn
            save_file(tensors, file, {"format": "pt"})
        return path

    return make
