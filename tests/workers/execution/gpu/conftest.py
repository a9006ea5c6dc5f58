"""Checkpoints of the sizes that a GPU's kernels know."""

from functools import cache

import pytest

from ....support.checkpoints import make_checkpoint
from ...conftest import CheckpointOf
from ..draft.conftest import draft_of

__all__ = ["draft_of", "latent_of"]

EVEN = {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}


@pytest.fixture(scope="session")
def latent_of(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    """Of deepseek-v2 or deepseek-v3."""
    folder = tmp_path_factory.mktemp("latent")
    return cache(lambda arch: make_checkpoint(folder / arch, arch, seed=21, **EVEN))
