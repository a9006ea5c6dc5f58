"""The files of a checkpoint, safetensors or GGUF, opened and checked against a ModelSpec. Knows no decoder.

Locate the shards, open them (mmap: nothing is read yet), name every tensor as tensor_names.py does, decide whether the
head is the embeddings, find what quantised weights are stored as (quant/), and compare all names, shapes and dtypes
with what the spec needs.
"""

import json
import logging
import math
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from torch import Tensor

from ....kernels.cpu.formats import NumberLayout
from ...common.errors import CheckpointError
from ..families.spec import ModelSpec
from ..gguf.gguf_types import BLOCKS
from ..plan.shards import INDEX_FILE, have_equal_bytes, read_index, shards
from ..plan.tensor_names import EMBED, HEAD, Shape, expected_tensors, own_name, spare_tensors
from ..quant.formats import weight_format
from ..quant.stored_weight import Header, StoredNumbers, StoredWeight
from .tensor_files import TensorFile, open_tensors, sample_tensors

STORED_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # safetensors' names of the dtypes that we convert from
_PACKED = {"U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # and decode
PACKED_BYTES = _PACKED | dict.fromkeys(BLOCKS, 1)
OF_KV = (".k_scale", ".v_scale", ".kv_scale")  # ends of names of tensors
DECODED_BYTES = 4  # of a number of a quantised weight: float32

log = logging.getLogger("diptych.worker")


class CheckpointFiles:
    """An opened and fully checked checkpoint. Use as a context manager: it holds file mappings."""

    spec: ModelSpec  # as given, but that its head is not tied where another one is stored

    def __init__(self, model_path: Path, spec: ModelSpec) -> None:
        """Raises CheckpointError naming file, tensor, expected and found."""
        self.spec = spec
        self._files: dict[str, TensorFile] = {}  # tensor name -> the open shard with it, until the entry is removed
        self._paths: dict[str, Path] = {}
        self._stored: dict[str, str] = {}  # tensor name -> its name there
        self._read_from: set[Path] = set()
        self._folder, self._format = model_path, weight_format(model_path)
        self._quantised: dict[str, StoredWeight] = {}  # by the name of the weight
        self._open(model_path)
        self._rename()
        self._tie()
        self._check(model_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(self.stored_bytes(name) for name in self._files)

    def fingerprint(self) -> str:
        """Hex name of the weights: blake2b over the spec, how they are quantised, names, shapes, dtypes and a sample of
        each tensor's bytes.

        How the tensors are spread over files does not matter. Reads a few pages a tensor, whatever its size; not by
        mmap, whose faults read ahead by megabytes. Raises CheckpointError where a file cannot be read.
        """
        digest = blake2b(json.dumps(asdict(self.spec), sort_keys=True).encode(), digest_size=16)
        if self._format is not None:
            digest.update(repr(self._format).encode())
        sampled: dict[str, bytes] = {}
        for path in set(self._paths.values()):
            sampled |= sample_tensors(path)
        for name in sorted(self._files):
            stored = self._slice(name)
            digest.update(f"{name} {stored.get_shape()} {stored.get_dtype()}".encode())
            digest.update(sampled[self._stored[name]])
        return digest.hexdigest()

    def stored(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        """The part of tensor `name`, as stored; of a quantised weight, in float32."""
        quantised = self._quantised.get(name)
        return self.raw(name, part) if quantised is None else quantised.part(part)

    @property
    def layouts(self) -> dict[str, NumberLayout]:
        """Layouts of the weights whose numbers the compiled kernels can compute with, by name."""
        return {name: of.numbers.layout for name, of in self._quantised.items() if of.numbers is not None}

    def numbers(self, name: str) -> StoredNumbers:
        """Numbers of a weight of `layouts`."""
        found = self._quantised[name].numbers
        assert found is not None
        return found

    def header(self, name: str) -> Header | None:
        if name not in self._files:
            return None
        stored = self._slice(name)
        return Header(tuple(stored.get_shape()), stored.get_dtype())

    def where(self, name: str) -> str:
        return str(self._paths.get(name, self._folder))

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor, or a weight that is quantised, has in its file."""
        quantised = self._quantised.get(name)
        known = name if quantised is None else quantised.names[0]
        return self._stored.get(known, known)

    def raw(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        """The part of a tensor of the files, as stored."""
        self._read_from.add(self._paths[name])
        spans = tuple(of if isinstance(of, int) else slice(of.start, of.stop) for of in part)
        steps = tuple(slice(None, None, of.step) for of in part if isinstance(of, slice))
        try:
            shape = self._slice(name).get_shape()
            if all(isinstance(of, slice) and range(n)[of] == range(n) for n, of in zip(shape, part, strict=True)):
                return self._files[name].get_tensor(self._stored[name])
            return self._slice(name)[spans][steps]
        except (SafetensorError, OSError) as e:
            raise CheckpointError(
                f"{self._paths[name]}: tensor {name} cannot be read ({e}): fetch the file again"
            ) from e

    def let_go(self) -> None:
        """Map anew what was read from: the pages of a mapping count as this process's memory for as long as it lasts.
        It does while a tensor of `read` lasts."""
        for path in self._read_from:
            shard = open_tensors(path)
            self._files |= {name: shard for name in self._files if self._paths[name] == path}
        self._read_from.clear()

    def stored_bytes(self, name: str) -> int:
        dtype = self._slice(name).get_dtype()
        return math.prod(self._slice(name).get_shape()) * (STORED_BYTES | PACKED_BYTES)[dtype]

    def stored_size(self, name: str) -> int:
        """Bytes of one of the numbers that `stored` gives."""
        return DECODED_BYTES if name in self._quantised else STORED_BYTES[self._slice(name).get_dtype()]

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(self._stored[name])

    def _open(self, model_path: Path) -> None:
        index = read_index(model_path)
        for path in shards(model_path, index):
            shard = open_tensors(path)
            for name in shard.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in self._files:
                    raise CheckpointError(
                        f"{path}: tensor {name} is also in {self._paths[name].name}: keep one of them"
                    )
                self._files[name], self._paths[name] = shard, path
        for name, file_name in index.items():
            if name not in self._files or self._paths[name].name != file_name:
                raise CheckpointError(
                    f"{model_path / file_name}: tensor {name} is missing, though {INDEX_FILE} names it"
                )

    def _rename(self) -> None:
        """Rename the tensors as tensor_names.py says; leave out those that nothing uses."""
        files, paths = self._files, self._paths
        self._files, self._paths = {}, {}
        for stored, shard in files.items():
            name = own_name(self.spec, stored)
            if name is None:
                continue
            if name in self._files:
                raise CheckpointError(
                    f"{paths[stored]}: tensor {stored} is also {self._stored[name]}: keep one of them"
                )
            self._files[name], self._paths[name], self._stored[name] = shard, paths[stored], stored

    def _tie(self) -> None:
        """Tie the head to the embeddings where the config says so, as transformers' `tie_weights` does: either stands
        for both, two that are equal are one, and two that are not stay two."""
        if not self.spec.tie_word_embeddings or HEAD not in self._files:
            return
        if EMBED not in self._files:
            self._files[EMBED], self._paths[EMBED] = self._files[HEAD], self._paths[HEAD]
            self._stored[EMBED] = self._stored[HEAD]
        elif not self._are_equal(EMBED, HEAD):
            log.warning(
                "%s: %s differs from %s, though config.json ties them: both are used, as transformers does",
                self._paths[HEAD],
                self._stored[HEAD],
                self._stored[EMBED],
            )
            self.spec = replace(self.spec, tie_word_embeddings=False)
            return
        del self._files[HEAD]

    def _are_equal(self, *names: str) -> bool:
        one, other = (self._slice(name) for name in names)
        if (one.get_shape(), one.get_dtype()) != (other.get_shape(), other.get_dtype()):
            return False
        first, second = ((self._paths[name], self._stored[name]) for name in names)
        return have_equal_bytes(first, second)

    def _check(self, model_path: Path) -> None:
        expected = expected_tensors(self.spec)
        used = self._find_quantised(expected)
        spare = spare_tensors(self.spec, self._files) - used
        if self._format is not None:
            others = self._files.keys() - used - expected.keys()
            spare |= {name for name in others if self._format.is_spare(self, name)}
        for name, shape in expected.items():
            if name in self._quantised:
                continue
            if name not in self._files:
                raise CheckpointError(f"{model_path}: tensor {name} of shape {list(shape)} is in none of its files")
            self._check_tensor(name, shape)
        for name in sorted(self._files.keys() - expected.keys() - spare - used):
            raise CheckpointError(
                f"{self._paths[name]}: tensor {name} is unexpected: {self.spec.architecture} as in config.json has none"
            )
        of_kv = sorted(name for name in spare if name.endswith(OF_KV))
        if of_kv:
            log.info(
                "%s has %d scales of KV (%s, ...), which are not used: KV at full width needs none, and in few bits "
                "(kv_dtype) each vector has its own",
                model_path,
                len(of_kv),
                self._stored[of_kv[0]],
            )
        for name in spare:
            del self._files[name]

    def _find_quantised(self, expected: dict[str, Shape]) -> set[str]:
        """Find what quantised weights are stored as. Returns the names of those tensors."""
        if self._format is not None:
            for name, shape in expected.items():
                found = self._format.find(self, name, shape)
                if found is not None:
                    self._quantised[name] = found
        return {name for of in self._quantised.values() for name in of.names}

    def _check_tensor(self, name: str, shape: Shape) -> None:
        stored = self._slice(name)
        found, dtype = list(stored.get_shape()), stored.get_dtype()
        if found != list(shape):
            raise CheckpointError(f"{self._paths[name]}: tensor {name} must have shape {list(shape)}, found {found}")
        if dtype not in STORED_BYTES:
            raise CheckpointError(
                f"{self._paths[name]}: tensor {name} must have dtype {', '.join(STORED_BYTES)}, found {dtype}"
            )
