"""Checkpoints that several test modules read; made once a session."""

from pathlib import Path

import pytest

from ..checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama", "llama", seed=1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "qwen3", "qwen3", seed=2)
