"""Weights of compressed-tensors of which two of four neighbours are zero (`sparse-24-bitmask`), quantised besides or
not. They are expanded: what reads them sees dense ones.

    {module}.compressed  [n, k / 2]: the two numbers of each four, in order
    {module}.bitmask     uint8 [n, k / 8]: 1 for each number that is there, lowest bits first
    {module}.shape       int64 [2, 1]: n, k
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..plan.tensor_names import Shape
from .stored_weight import FLOATS, Header, StoredTensors, StoredWeight, WeightFormat, need, some_rows, whole

PARTS = ("compressed", "bitmask", "shape")
DTYPES = (*FLOATS, "I8", "F8_E4M3")


@dataclass(frozen=True, slots=True)
class Sparse24Format:
    """A WeightFormat."""

    inner: WeightFormat  # of the weights, once they are dense

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        view = ExpandedTensors(tensors)
        found = self.inner.find(view, name, shape)
        module = name.removesuffix(".weight")
        if not view.is_sparse(name):
            return found
        if found is None:
            need(view, name, [shape], FLOATS)
            found = StoredWeight(shape, (name,), lambda of: some_rows(view, name, of).float())
        others = tuple(of for of in found.names if of != name)
        return replace(found, names=(*others, *(f"{module}.{part}" for part in PARTS)))

    def is_spare(self, tensors: StoredTensors, name: str, /) -> bool:
        return self.inner.is_spare(tensors, name)


class ExpandedTensors:
    """StoredTensors that shows a sparse weight as a dense one."""

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors

    def is_sparse(self, name: str) -> bool:
        return name.endswith(".weight") and self._tensors.header(self._part(name, "compressed")) is not None

    def header(self, name: str) -> Header | None:
        """Raises CheckpointError for parts of a sparse weight that contradict one another."""
        found = self._tensors.header(self._part(name, "compressed")) if name.endswith(".weight") else None
        if found is None:
            return self._tensors.header(name)
        compressed = self._part(name, "compressed")
        if len(found.shape) != 2 or found.shape[1] % 2 or found.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.where(name)}: tensor {compressed} must have two numbers of each four, of dtype "
                f"{' or '.join(DTYPES)}, found {list(found.shape)} and {found.dtype}"
            )
        n, k = found.shape[0], 2 * found.shape[1]
        need(self._tensors, self._part(name, "bitmask"), [(n, -(-k // 8))], ["U8"])
        need(self._tensors, self._part(name, "shape"), [(2, 1), (2,)], ["I64", "I32"])
        if whole(self._tensors, self._part(name, "shape")).flatten().tolist() != [n, k]:
            raise CheckpointError(f"{self.where(name)}: tensor {self._part(name, 'shape')} must say {[n, k]}")
        return Header((n, k), found.dtype)

    def raw(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        if not self.is_sparse(name):
            return self._tensors.raw(name, part)
        rows, columns = part
        assert isinstance(rows, slice)
        return self._expanded(name, rows)[:, columns]

    def where(self, name: str) -> str:
        return self._tensors.where(self._part(name, "compressed") if self.is_sparse(name) else name)

    def stored_name(self, name: str) -> str:
        return self._tensors.stored_name(name)

    def _expanded(self, name: str, rows: slice) -> Tensor:
        numbers = some_rows(self._tensors, self._part(name, "compressed"), rows)
        n, k = len(numbers), 2 * numbers.shape[1]
        bits = some_rows(self._tensors, self._part(name, "bitmask"), rows)
        mask = ((bits[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)[:, :k].bool()
        if not (mask.unflatten(1, (-1, 4)).sum(-1) == 2).all():
            raise CheckpointError(
                f"{self.where(name)}: tensor {self._part(name, 'bitmask')} must have two of each four: fetch it again"
            )
        whole_numbers = numbers.view(torch.int8) if numbers.element_size() == 1 else numbers  # masks know no FP8
        dense = torch.zeros(n, k, dtype=whole_numbers.dtype)
        dense[mask] = whole_numbers.reshape(-1)
        return dense.view(numbers.dtype)

    @staticmethod
    def _part(name: str, part: str) -> str:
        return f"{name.removesuffix('.weight')}.{part}"
