"""Tensors of two files compared byte by byte; a file that cannot be read, or has no sound header, is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.plan import shards
from diptych.workers.models.plan.shards import have_equal_bytes, read_index, stored_names


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


@pytest.mark.parametrize(
    ("size", "content"),
    [
        (100_005, b'{"a":' + b"[" * 100_000),  # deeper than a parser goes
        (1 << 40, b"{}"),
        (2, b"[]"),
        (3, b"\xff{}"),
    ],
)
def test_a_header_that_is_none_is_named(size: int, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        stored_names(tmp_path)


def test_a_header_has_a_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads gigabytes of a stranger's file to know its names."""
    stored(tmp_path / "model.safetensors", 40)
    monkeypatch.setattr(shards, "MAX_HEADER_BYTES", 16)
    with pytest.raises(CheckpointError, match="its header is longer than the file, or than 16 bytes"):
        stored_names(tmp_path)


@pytest.mark.parametrize("name", ["..", "../x", "/x", "", ".", "x" * 256, "\u00e9" * 128, 7, None])
def test_an_index_names_files_of_its_folder(name: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="entry a must name a file in the same folder, found"):
        read_index(tmp_path)
