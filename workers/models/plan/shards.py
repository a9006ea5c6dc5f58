"""The files of a checkpoint, safetensors or GGUF: which there are, and, of safetensors, samples of what they hold. No
torch."""

import json
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...common.errors import CheckpointError
from ..families.json_config import read_json_object
from ..gguf.gguf_files import SUFFIX, gguf_paths

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", SUFFIX, ".h5", ".msgpack")
SAMPLE_BYTES = 128
CHUNK_BYTES = 4 << 20  # of tensors that are compared
MAX_SHARDS = 4096
MAX_NAME_BYTES = 255  # of a file
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file: the library's own limit


def read_index(model_path: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint; empty for one in a single file."""
    path = model_path / INDEX_FILE
    if (model_path / SINGLE_FILE).is_file() or not path.is_file():
        return {}
    weight_map: Any = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be a non-empty object: fetch the file again")
    for name, file_name in cast("dict[str, Any]", weight_map).items():
        is_name = isinstance(file_name, str) and Path(file_name).name == file_name and file_name not in ("", "..")
        if not is_name or len(file_name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise CheckpointError(
                f"{path}: weight_map entry {name} must name a file in the same folder, found {file_name!r}"
            )
    return cast("dict[str, str]", weight_map)


def shards(model_path: Path, index: dict[str, str]) -> list[Path]:
    """All files that hold tensors; they exist. index: as `read_index` gives it. Raises CheckpointError."""
    if found := gguf_paths(model_path):
        return list(found)
    paths = [model_path / name for name in sorted(set(index.values()))] or [model_path / SINGLE_FILE]
    if len(paths) > MAX_SHARDS:
        raise CheckpointError(f"{model_path / INDEX_FILE} names {len(paths)} files; at most {MAX_SHARDS} are served")
    for path in paths:
        if not path.is_file():
            if not index and (other := _other_format(model_path)):
                if other.endswith(SUFFIX):
                    raise CheckpointError(
                        f"{model_path} holds a config.json, and its weights as {other}: to serve these, give the path "
                        "of that file instead of the folder's"
                    )
                raise CheckpointError(
                    f"{model_path} holds its weights as {other}, but only safetensors and GGUF can be read: convert "
                    "it with transformers (AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)), or "
                    "fetch the checkpoint's safetensors files"
                )
            source = f"{INDEX_FILE} names it" if index else f"there is no {INDEX_FILE} either"
            raise CheckpointError(f"{path} does not exist, and {source}: fetch the missing file")
    return paths


def _other_format(model_path: Path) -> str | None:
    """Name of the first file that seems to hold weights in another format, if any. Most are pickles: these run code."""
    return next((p.name for p in sorted(model_path.iterdir()) if p.suffix in OTHER_FORMATS), None)


def stored_names(model_path: Path) -> set[str]:
    """Names of all tensors in a folder's files, without opening more than one. Raises CheckpointError."""
    index = read_index(model_path)
    paths = shards(model_path, index)
    return set(index) or _names_in(paths[0])


def _names_in(path: Path) -> set[str]:
    """Names of the tensors in a file whose header may be broken."""
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > min(path.stat().st_size, MAX_HEADER_BYTES):
                raise ValueError(f"its header is longer than the file, or than {MAX_HEADER_BYTES:,} bytes")
            header: Any = json.loads(file.read(num_bytes))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except OSError as e:
        raise _unreadable(path, e) from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a complete safetensors file ({e}): fetch the file again") from e
    return {name for name in cast("dict[str, Any]", header) if name != "__metadata__"}


def samples(path: Path) -> dict[str, bytes]:
    """The first, middle and last few bytes of every tensor in a file whose header is known to be sound."""
    found: dict[str, bytes] = {}
    try:
        with path.open("rb", buffering=0) as file:
            for name, (start, end) in _places(file).items():
                found[name] = b"".join(os.pread(file.fileno(), size, at) for at, size in pieces_of(start, end))
    except OSError as e:
        raise _unreadable(path, e) from e
    return found


def pieces_of(start: int, end: int) -> list[tuple[int, int]]:
    """Places and sizes of the first, middle and last few bytes of a range."""
    size = min(SAMPLE_BYTES, end - start)
    return [(at, size) for at in (start, start + (end - start - size) // 2, end - size)]


def have_equal_bytes(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Return whether two tensors, each by its file, whose header is known to be sound, and its name there, are stored
    as the same bytes. Reads no further than where they differ, and little at once."""
    return all(one == other for one, other in zip_longest(_chunks(*first), _chunks(*second)))


def _chunks(path: Path, name: str) -> Iterator[bytes]:
    """Read one tensor, CHUNK_BYTES at a time."""
    try:
        with path.open("rb", buffering=0) as file:
            start, end = _places(file)[name]
            for offset in range(start, end, CHUNK_BYTES):
                yield os.pread(file.fileno(), min(CHUNK_BYTES, end - offset), offset)
    except OSError as e:
        raise _unreadable(path, e) from e


def _places(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Start and end of each tensor's bytes in a file whose header is known to be sound."""
    header_bytes = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(header_bytes))
    first = 8 + header_bytes
    places = {name: of["data_offsets"] for name, of in header.items() if name != "__metadata__"}
    return {name: (first + start, first + end) for name, (start, end) in places.items()}


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error.strerror}): check the disk, or fetch the file again")
