"""Reads the header of a GGUF file: its metadata, and what tensors it holds, where. No torch.

    "GGUF", version, number of tensors, number of metadata values   (fixed)
    key, type, value                                                (each metadata value)
    name, sizes (innermost first), type, offset                     (each tensor)
    padding to `general.alignment`, and the tensors' bytes

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file comes from strangers, or is half of one:
every count, length, type and offset is checked against the bytes that there are before it is used.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...common.errors import CheckpointError
from .gguf_types import NOT_READ, READ, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 256,000 tokens with its merges takes 15 MiB
MAX_NAME_BYTES = (1 << 16) - 1
MAX_AXES = 4
MAX_SIZE = 1 << 40  # of an axis
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

Metadata = Mapping[str, Any]  # each an int, float, bool, str or a list of one of these


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place and type of a tensor in a file."""

    name: str
    shape: tuple[int, ...]  # outermost axis first, as torch has it
    type: GgmlType
    path: Path
    start: int  # in the file

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of its numbers, or, of a type of blocks, of its bytes."""
        if self.type.block == 1:
            return self.shape
        return (*self.shape[:-1], self.type.row_bytes(self.shape[-1]))

    @property
    def num_bytes(self) -> int:
        return self.type.row_bytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a file."""

    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError naming the file, and the key or tensor, that is damaged or not known."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(MAGIC) + 20 or file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path} is no GGUF file: fetch it again, or give another file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
                return _HeaderReader(path, mapping, size).header()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror}): check the file's permissions") from e


class _HeaderReader:
    """Position in a file's header."""

    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self._path, self._mapping, self._size = path, mapping, size
        self._at = len(MAGIC)
        self._what = "its header"  # for errors: what is being read

    def header(self) -> GgufHeader:
        version: int = self._number("I")
        if version not in VERSIONS:
            why = " (it is big-endian)" if version >> 24 in VERSIONS and not version & 0xFFFFFF else ""
            known = " and ".join(map(str, VERSIONS))
            raise CheckpointError(
                f"{self._path} has version {version} of GGUF{why}; versions {known}, little-endian, are read: convert "
                "it with llama.cpp's tools, or fetch a newer file"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._name("the key of a metadata value")
            self._what = f"metadata {key}"
            if key in metadata:
                self._fail("is there twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(metadata, self._placed(infos, self._alignment(metadata)))

    def _alignment(self, metadata: Metadata) -> int:
        value = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
        if type(value) is not int or not 8 <= value <= 1 << 16 or value & (value - 1):  # the layout: a multiple of 8
            self._what = f"metadata {ALIGNMENT_KEY}"
            self._fail(f"must be a power of two from 8 to 65536, found {value!r}")
        return value

    def _placed(self, infos: list[tuple[str, tuple[int, ...], GgmlType, int]], alignment: int) -> dict[str, GgufTensor]:
        first = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, type_, offset in infos:
            self._what = f"tensor {name}"
            tensor = GgufTensor(name, shape, type_, self._path, first + offset)
            if name in found:
                self._fail("is there twice")
            if offset % alignment:
                self._fail(f"begins at {offset}, which is no multiple of the alignment, {alignment}")
            if tensor.start + tensor.num_bytes > self._size:
                end = tensor.start + tensor.num_bytes
                self._fail(f"ends at byte {end}, but the file has {self._size}: it is not complete")
            found[name] = tensor
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], GgmlType, int]:
        name = self._name("the name of a tensor")
        self._what = f"tensor {name}"
        num_axes = self._number("I")
        if not 1 <= num_axes <= MAX_AXES:
            self._fail(f"must have 1 to {MAX_AXES} axes, found {num_axes}")
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
        if not all(1 <= n <= MAX_SIZE for n in shape) or math.prod(shape) > MAX_SIZE:
            self._fail(f"has impossible sizes, {list(shape)}")
        number = self._number("I")
        if number not in READ:
            known = ", ".join(of.name for of in READ.values())
            found = NOT_READ.get(number, "which is not known")
            raise CheckpointError(
                f"{self._path}: {self._what} has type {number} ({found}); {known} are read: fetch "
                "a file of one of these"
            )
        type_ = READ[number]
        if shape[-1] % type_.block:
            self._fail(f"has rows of {shape[-1]} numbers, which blocks of {type_.block} ({type_.name}) do not divide")
        return name, shape, type_, self._number("Q")

    def _value(self, type_: int) -> Any:
        if type_ == STRING:
            return self._string()
        if type_ == ARRAY:
            return self._array()
        if type_ not in SCALARS:
            self._fail(f"has type {type_}, which is not known")
        value = self._number("B" if type_ == BOOL else SCALARS[type_])
        return self._truth(value) if type_ == BOOL else value

    def _array(self) -> list[Any]:
        type_, length = self._number("I"), self._number("Q")
        if type_ == STRING:
            self._check(8 * length)
            return [self._string() for _ in range(length)]
        if type_ not in SCALARS:
            self._fail(f"is a list of type {type_}, which is not known")
        code = "B" if type_ == BOOL else SCALARS[type_]
        self._check(num_bytes := length * struct.calcsize(f"<{code}"))
        values: list[Any] = list(struct.unpack(f"<{length}{code}", self._take(num_bytes)))
        return [self._truth(value) for value in values] if type_ == BOOL else values

    def _truth(self, value: int) -> bool:
        if value not in (0, 1):
            self._fail(f"must be 0 or 1, found {value}")
        return bool(value)

    def _name(self, what: str) -> str:
        self._what = what
        return self._string(MAX_NAME_BYTES)

    def _string(self, longest: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > longest:
            self._fail(f"has {length} bytes, more than {longest}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._fail("is no UTF-8")

    def _number(self, code: str) -> Any:
        of = struct.Struct(f"<{code}")
        return of.unpack(self._take(of.size))[0]

    def _take(self, num_bytes: int) -> bytes:
        self._check(num_bytes)
        self._at += num_bytes
        return self._mapping[self._at - num_bytes : self._at]

    def _check(self, num_bytes: int) -> None:
        """Raise CheckpointError unless so many bytes follow, within what a header may have."""
        if self._at + num_bytes > self._size:
            self._fail(f"does not end within the {self._size} bytes of the file: it is not complete")
        if self._at + num_bytes > MAX_HEADER_BYTES:
            self._fail(f"is beyond the {MAX_HEADER_BYTES >> 20} MiB that a header may have")

    def _fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {self._what} {why}: fetch the file again")
