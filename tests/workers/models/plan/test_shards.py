"""Tensors of two files compared byte by byte; a file that cannot be read is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.plan import shards
from diptych.workers.models.plan.shards import have_equal_bytes


def stored(path: Path, *sizes: int) -> Path:
    save_file({f"t{i}": torch.arange(size, dtype=torch.uint8) for i, size in enumerate(sizes)}, path)
    return path


def test_tensors_are_equal_in_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 16)
    one, other = stored(tmp_path / "one", 40, 32), stored(tmp_path / "other", 3, 40, 48)
    assert have_equal_bytes((one, "t0"), (other, "t1"))
    for name in ("t0", "t2"):
        assert not have_equal_bytes((one, "t0"), (other, name))
        assert not have_equal_bytes((other, name), (one, "t1"))
    changed = bytearray(one.read_bytes())
    changed[-1] ^= 1
    other.write_bytes(changed)
    assert have_equal_bytes((one, "t0"), (other, "t0"))
    assert not have_equal_bytes((one, "t1"), (other, "t1"))


def test_the_file_that_cannot_be_read_is_the_one_that_is_named(tmp_path: Path) -> None:
    one, gone = stored(tmp_path / "one", 40), tmp_path / "gone"
    for pair in ((one, gone), (gone, one)):
        with pytest.raises(CheckpointError, match="gone cannot be read"):
            have_equal_bytes((pair[0], "t0"), (pair[1], "t0"))
