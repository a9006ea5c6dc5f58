"""Writes a checkpoint into a folder that appears whole, or not at all.

open (a temporary folder beside it)  ->  add (tensors; a file whenever enough are there)  ->  finish (index, config and
the other files; renamed to what it is to be called)
"""

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..common.errors import ConfigError
from ..models.plan.shards import INDEX_FILE, OTHER_FORMATS, SINGLE_FILE

SHARD_BYTES = 1 << 30  # of tensors that are kept until they are written
CONFIG_FILE = "config.json"
NOT_COPIED = {CONFIG_FILE, INDEX_FILE}
FOLDER_MODE, FILE_MODE = 0o777, 0o666  # less the umask: what mkdir and open would have given


class CheckpointWriter:
    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises ConfigError where it cannot be written."""
        size = tensor.nbytes
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._write()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.num_bytes += size

    def finish(self, source: Path, config: dict[str, Any]) -> None:
        """Write what is left, the config, and what else `source` has but weights. Raises ConfigError."""
        if self._pending:
            self._write()
        names = self._name_shards()
        if len(names) > 1:
            owners = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(owners.items()))}
            self._write_json(INDEX_FILE, index)
        self._write_json(CONFIG_FILE, config)
        with _writing(self._folder):
            for path in sorted(source.iterdir()):
                if path.is_file() and path.name not in NOT_COPIED and not _is_weights(path):
                    shutil.copyfile(path, self._folder / path.name)
            for path in sorted(source.glob("*/*.json")):  # of modules that pool hidden states
                (self._folder / path.parent.name).mkdir(exist_ok=True)
                shutil.copyfile(path, self._folder / path.parent.name / path.name)

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._shards)}.safetensors"
        with _writing(path):
            save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> list[str]:
        """Rename the files as their number says; return the names."""
        num = len(self._shards)
        names = [f"model-{i + 1:05}-of-{num:05}.safetensors" for i in range(num)] if num > 1 else [SINGLE_FILE]
        for i, name in enumerate(names):
            (self._folder / f"part-{i}.safetensors").rename(self._folder / name)
        return names

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        with _writing(self._folder / name):
            (self._folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def written_checkpoint(out: Path, shard_bytes: int = SHARD_BYTES) -> Generator[CheckpointWriter]:
    """Give a writer whose folder becomes `out`, which does not exist, when the block ends; nothing is left of it where
    that raises. Raises ConfigError where it cannot be made."""
    with _writing(out):
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        yield CheckpointWriter(temporary, shard_bytes)
        _make_public(temporary)
        if out.exists():
            raise ConfigError(f"{out} has been made meanwhile: name another folder, or remove it")
        with _writing(out):
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_public(folder: Path) -> None:
    """Give a temporary folder and its files the modes that others have."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(FOLDER_MODE & ~umask)
    for path in folder.glob("*.safetensors"):
        path.chmod(FILE_MODE & ~umask)


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", *OTHER_FORMATS) or path.name.endswith((".index.json", ".incomplete"))


@contextmanager
def _writing(path: Path) -> Generator[None]:
    """Raises ConfigError for what the file system refuses."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"{path} cannot be written ({e}): free space there, or name another folder with --out") from e
