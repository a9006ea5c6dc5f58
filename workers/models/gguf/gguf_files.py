"""Finds the GGUF files of a model, and reads their headers as one. No torch.

A model is a file, several that llama.cpp has split (`NAME-00001-of-00003.gguf`), or a folder that holds no other and no
config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...common.errors import CheckpointError
from .gguf_reader import GgufHeader, GgufTensor, Metadata, read_header

SUFFIX, CONFIG_FILE = ".gguf", "config.json"
VISION = "mmproj"  # part of the names of files that hold what makes tokens of images
MAX_FILES = 1024
_PART = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
_KEPT = 16  # headers in memory: a model's are asked for several times


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata and tensors of all files of a model."""

    path: Path  # of the first file
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def gguf_paths(model_path: Path) -> tuple[Path, ...]:
    """Files of the model in a file or folder, in order; none where it is no GGUF model. Raises CheckpointError."""
    if model_path.suffix.lower() == SUFFIX and model_path.is_file():
        return _with_parts(model_path)
    if not model_path.is_dir() or (model_path / CONFIG_FILE).is_file():
        return ()
    files = sorted(p for p in model_path.iterdir() if p.suffix.lower() == SUFFIX and VISION not in p.name.lower())
    models = {part["stem"] if (part := _PART.match(p.name)) else p.name: p for p in reversed(files)}
    if len(models) > 1:
        raise CheckpointError(f"{model_path} holds several models ({', '.join(sorted(models))}): give the path of one")
    return _with_parts(files[0]) if files else ()


def read_gguf(model_path: Path) -> GgufModel | None:
    """Return the model in a file or folder; None: it is no GGUF model. Raises CheckpointError."""
    paths = gguf_paths(model_path)
    return _joined(list(paths)) if paths else None


def _joined(paths: list[Path]) -> GgufModel:
    """Read the headers of a model's files as one; its metadata are the first's."""
    headers = [gguf_header(path) for path in paths]
    first, tensors = headers[0].metadata, dict[str, GgufTensor]()
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        said = header.metadata.get("split.no"), header.metadata.get("split.count")
        if len(paths) > 1 and said != (number, len(paths)):
            raise CheckpointError(
                f"{path}: split.no and split.count must be {number} and {len(paths)}, as its name says: fetch it again"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name} is also in {tensors[name].path.name}: fetch both again")
            tensors[name] = tensor
    if len(paths) == 1 and first.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{paths[0]} is one of {first['split.count']} files (split.count): put the others beside it, each under "
            "the name that it had"
        )
    return GgufModel(paths[0], first, tensors)


def gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file, or return it as it was read before. Raises CheckpointError."""
    try:
        found = path.stat()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror}): check the file's permissions") from e
    return _header(path, found.st_size, found.st_mtime_ns)


@lru_cache(_KEPT)
def _header(path: Path, _size: int, _changed: int) -> GgufHeader:
    return read_header(path)


def _with_parts(path: Path) -> tuple[Path, ...]:
    """path: any file of a model."""
    part = _PART.match(path.name)
    if part is None:
        return (path,)
    count = int(part["count"])
    if not 1 <= count <= MAX_FILES:
        raise CheckpointError(f"{path} is one of {count} files; at most {MAX_FILES} are served")
    names = (f"{part['stem']}-{number:05}-of-{count:05}{path.suffix}" for number in range(1, count + 1))
    paths = tuple(path.with_name(name) for name in names)
    for each in paths:
        if not each.is_file():
            raise CheckpointError(f"{each} does not exist, and {path.name} is one of {count} files: fetch it, too")
    return paths
