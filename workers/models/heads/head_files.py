"""The tensors of a draft head in a folder of safetensors files: opened, renamed, checked, read.

A head's layers have the names that plan/tensor_names.py gives to a decoder's. Whatever is wrong with a folder is found
before a weight is read, and named.
"""

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..checkpoint.weights import Checkpoint, LayerWeights
from ..families.spec import ModelSpec
from ..head_specs.head_fields import Fields
from ..plan.sharding import WHOLE
from ..plan.tensor_names import Pieces

INTEGERS = ("I64", "I32", "BOOL", "U8")  # safetensors' names of the dtypes of vocabulary maps


class HeadFiles(Checkpoint):
    """An opened folder that holds a head, and perhaps more. Use as a context manager: it holds file mappings."""

    def __init__(
        self, folder: Path, spec: ModelSpec, renamed: Callable[[str], str | None], maps: tuple[str, ...] = ()
    ) -> None:
        """spec: of the head's layers. renamed: a stored name -> this package's; None: no tensor of the head. maps:
        names of tensors of integers. Raises CheckpointError."""
        self.folder = folder
        self._renamed, self._maps = renamed, maps
        super().__init__(folder, spec)

    def has(self, name: str) -> bool:
        """Return whether a tensor exists, or any of those that a quantised weight is stored as."""
        return name in self._files or any(of.startswith(_module(name)) for of in self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that exists."""
        return tuple(self._slice(name).get_shape())

    def error(self, name: str, need: str, found: object) -> CheckpointError:
        """Error of a tensor that exists."""
        return CheckpointError(f"{self._paths[name]}: tensor {self._stored[name]} {need}, found {found}")

    def check_fields(self, layers: list[Fields], outer: Fields, optional: Set[str]) -> None:
        """Compare all names and shapes with what the head needs. optional: fields of `outer` that may be absent; they
        are removed from it. Raises CheckpointError."""
        for field in sorted(optional & outer.keys()):
            if not all(self.has(piece.name) for piece in outer[field]):
                del outer[field]
        expected = {p.name: p.shape for of in (*layers, outer) for pieces in of.values() for p in pieces}
        used = self._find_quantised(expected)
        others = self._files.keys() - used - expected.keys() - set(self._maps)
        if self._format is not None:
            for name in [of for of in others if self._format.is_spare(self, of)]:
                del self._files[name]
        for name, shape in expected.items():
            if name in self._quantised:
                continue
            if name not in self._files:
                raise CheckpointError(f"{self.folder}: tensor {name} of shape {list(shape)} is in none of its files")
            self._check_tensor(name, shape)
        for name in sorted(self._files.keys() - used - expected.keys() - set(self._maps)):
            raise CheckpointError(
                f"{self._paths[name]}: tensor {self._stored[name]} is unexpected: a head as in config.json has none"
            )

    def layer(self, fields: Fields, dtype: torch.dtype, device: torch.device) -> LayerWeights:
        loaded: dict[str, Any] = {field: self.tensor(pieces, dtype, device) for field, pieces in fields.items()}
        return LayerWeights(**loaded)

    def tensor(self, pieces: Pieces, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Copy of a field's pieces, one below the other; those of experts along a first axis of their own."""
        shapes = [piece.own_shape for piece in pieces]
        rows = sum(shape[0] for shape in shapes)
        own_dtype = torch.float32 if pieces[0].is_wide else dtype
        target = torch.empty((rows, *shapes[0][1:]), dtype=own_dtype, device=device)
        start = 0
        for piece, shape in zip(pieces, shapes, strict=True):
            target[start : start + shape[0]].copy_(self.read(piece, WHOLE))
            start += shape[0]
        num_experts = len({piece.expert for piece in pieces})
        return target if pieces[0].expert is None else target.unflatten(0, (num_experts, -1))

    def integers(self, name: str, length: int) -> Tensor:
        """Return a vocabulary map, [length] int64, or bool where it is stored so; on CPU. Raises CheckpointError."""
        found, dtype = self.shape(name), self._slice(name).get_dtype()
        if found != (length,) or dtype not in INTEGERS:
            need = f"must be {length} integers (as config.json says)"
            raise self.error(name, need, f"{dtype} of shape {list(found)}")
        stored = self.stored(name, (slice(None),)).clone()
        return stored if stored.dtype == torch.bool else stored.long()

    @property
    def num_bytes(self) -> int:
        """Bytes of the head's weights as stored, without its maps."""
        return sum(self.stored_bytes(name) for name in self._files if name not in self._maps)

    def _rename(self) -> None:
        files, paths = self._files, self._paths
        self._files, self._paths = {}, {}
        for stored, shard in files.items():
            name = self._renamed(stored)
            if name is None:
                continue
            if name in self._files:
                raise CheckpointError(
                    f"{paths[stored]}: tensor {stored} is also {self._stored[name]}: keep one of them"
                )
            self._files[name], self._paths[name], self._stored[name] = shard, paths[stored], stored

    def _tie(self) -> None:
        """Do nothing: whether a head's matrices are the target's is decided by which of them exist."""

    def _check(self, model_path: Path) -> None:
        """Do nothing yet: see `check_fields`."""


def _module(name: str) -> str:
    """Beginning of the names of a weight's tensors."""
    return f"{name.removesuffix('.weight')}."
