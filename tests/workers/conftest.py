"""Checkpoints that several test modules read; made once a session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ..support.checkpoints import ARCHITECTURES, make_checkpoint

CheckpointOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    """Of a key of ARCHITECTURES: its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda arch: make_checkpoint(folder / arch, arch, seed=1 + list(ARCHITECTURES).index(arch)))


@pytest.fixture(scope="session")
def llama(checkpoint_of: CheckpointOf) -> Path:
    return checkpoint_of("llama")


@pytest.fixture(scope="session")
def qwen3(checkpoint_of: CheckpointOf) -> Path:
    return checkpoint_of("qwen3")
