"""Checkpoints that several test modules read; made once a session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ..checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama", "llama", seed=1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "qwen3", "qwen3", seed=2)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of one of ARCHITECTURES."""

    @cache
    def made(arch: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("families") / arch, arch, seed=8)

    return made
