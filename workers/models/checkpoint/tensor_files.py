"""Opens a file of tensors, safetensors or GGUF: names, shapes and dtypes, and views of what is mapped."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...common.errors import CheckpointError
from ..gguf.gguf_files import SUFFIX, gguf_header
from ..gguf.gguf_reader import GgufTensor
from ..plan.shards import pieces_of, samples

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredSlice(Protocol):
    """A tensor in a file, of which some is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, part: tuple[int | slice, ...]) -> Tensor: ...


class TensorFile(Protocol):
    """A file of tensors, as safetensors has it."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> StoredSlice: ...

    def get_tensor(self, name: str) -> Tensor: ...


def open_tensors(path: Path) -> TensorFile:
    """Map a file. Raises CheckpointError."""
    try:
        return GgufMapping(path) if _is_gguf(path) else _open_safetensors(path)
    except (RuntimeError, ValueError, MemoryError) as e:  # of a mapping that the kernel refused
        raise CheckpointError(f"{path} cannot be mapped ({e}): free memory, or use a machine with more memory") from e


def sample_tensors(path: Path) -> dict[str, bytes]:
    """The first, middle and last few bytes of every tensor in a file whose header is known to be sound. Raises
    CheckpointError."""
    if not _is_gguf(path):
        return samples(path)
    places = {t.name: (t.start, t.start + t.num_bytes) for t in gguf_header(path).tensors.values()}
    try:
        with path.open("rb", buffering=0) as file:
            return {
                name: b"".join(os.pread(file.fileno(), size, offset) for offset, size in pieces_of(*place))
                for name, place in places.items()
            }
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror}): check the disk, or fetch the file again") from e


class GgufMapping:
    """A GGUF file, mapped. A tensor of a type of blocks is one of bytes."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, and ValueError or OSError for a mapping that is refused."""
        self._tensors = gguf_header(path).tensors
        with path.open("rb") as file:  # private: torch takes no memory that cannot be written
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        of = self._tensors[name]
        found = self._bytes[of.start : of.start + of.num_bytes]
        return found.view(_DTYPES.get(of.type.name, torch.uint8)).view(of.stored_shape)

    def get_slice(self, name: str) -> "GgufSlice":
        return GgufSlice(self, self._tensors[name])


class GgufSlice:
    """A StoredSlice."""

    def __init__(self, file: GgufMapping, tensor: GgufTensor) -> None:
        self._file, self._tensor = file, tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.stored_shape)

    def get_dtype(self) -> str:
        """Return safetensors' name, or ggml's, of a type of blocks."""
        return self._tensor.type.name

    def __getitem__(self, part: tuple[int | slice, ...]) -> Tensor:
        return self._file.get_tensor(self._tensor.name)[part]


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} is not a complete safetensors file ({e}): fetch the file again") from e
