"""A quantised weight of a checkpoint: the tensors that it is stored as, and the numbers that they mean.

    check (when the checkpoint is opened: shapes and dtypes alone)  ->  while it is loaded, part (some rows, as
    float32), or numbers.read (some rows as they are stored, where the compiled kernels can compute with those)

Each format is a WeightFormat: given a weight, it says what that is stored as. CheckpointFiles asks it, and knows no
format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ....kernels.cpu.formats import NumberLayout
from ....kernels.cpu.linear import WeightNumbers
from ...common.errors import CheckpointError
from ..plan.tensor_names import Shape

PIECE_NUMBERS = 1 << 18  # that are decoded at once: they stay in a core's cache
FLOATS = ("BF16", "F16", "F32")


class Header(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: Shape
    dtype: str  # safetensors' name


class StoredTensors(Protocol):
    """Tensors of a checkpoint's files, by name."""

    def header(self, name: str) -> Header | None: ...

    def raw(self, name: str, part: tuple[int | slice, ...]) -> Tensor: ...

    def where(self, name: str) -> str:
        """Return the file that a tensor is in, or the folder, for errors."""
        ...

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in its file."""
        ...


Rows = Callable[[slice], Tensor]  # some rows of a weight, of the first axis: float32


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """Numbers of a weight as it is stored."""

    layout: NumberLayout  # of whole rows
    # Of whole rows, that is outputs; of a weight that stands with others in one tensor, its index there comes first.
    read: Callable[[tuple[int, ...], slice], WeightNumbers]
    order: Callable[[], Tensor | None] = lambda: None  # int64 [k]: the input of each place; None: they are in order


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight that is quantised."""

    shape: Shape  # of the weight
    names: tuple[str, ...]  # of its tensors
    rows: Rows
    numbers: StoredNumbers | None = None  # None: it can only be decoded

    def part(self, part: tuple[int | slice, ...]) -> Tensor:
        """part: an index or a range for each axis. Returns float32."""
        first, *others = part
        if isinstance(first, int):
            return self.rows(slice(first, first + 1))[(0, *others)]
        chosen = range(self.shape[0])[first]
        low, high = min(chosen, default=0), max(chosen, default=-1) + 1
        row_numbers = max(torch.Size(self.shape[1:]).numel(), 1)
        step = max(PIECE_NUMBERS // row_numbers, 1)
        ranges = [slice(start, min(start + step, high)) for start in range(low, high, step)]
        if len(ranges) == 1:
            found = self.rows(ranges[0])[(slice(None), *others)]
        else:  # in one place: pieces and what they are put together to would be twice the memory
            sizes = [len(range(n)[of]) for n, of in zip(self.shape[1:], others, strict=True) if isinstance(of, slice)]
            found = torch.empty((high - low, *sizes))
            for of in ranges:
                found[of.start - low : of.stop - low] = self.rows(of)[(slice(None), *others)]
        return found if first.step in (None, 1) else found[:: first.step]


class WeightFormat(Protocol):
    """Format of a checkpoint's quantised weights."""

    def find(self, tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
        """Find what weight `name` of that shape is stored as; None: it is not quantised. Raises CheckpointError for
        tensors that contradict the format."""
        ...

    def is_spare(self, tensors: StoredTensors, name: str, /) -> bool:
        """Return whether a tensor that belongs to no weight is one that the format has besides: scales of activations
        or of KV, which nothing here computes with."""
        ...


def need(tensors: StoredTensors, name: str, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Header:
    """Return the header of a tensor that must be there. Raises CheckpointError naming it, with what is expected."""
    header = tensors.header(name)
    expected = f"{' or '.join(str(list(shape)) for shape in shapes)} and dtype {' or '.join(dtypes)}"
    if header is None:
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} of shape {expected} is in none of its files")
    if header.shape not in shapes or header.dtype not in dtypes:
        raise CheckpointError(
            f"{tensors.where(name)}: tensor {name} must have shape {expected}, as config.json says, found "
            f"{list(header.shape)} and {header.dtype}"
        )
    return header


def whole(tensors: StoredTensors, name: str) -> Tensor:
    header = tensors.header(name)
    assert header is not None
    return tensors.raw(name, (slice(None),) * len(header.shape))


def some_rows(tensors: StoredTensors, name: str, rows: slice) -> Tensor:
    header = tensors.header(name)
    assert header is not None
    return tensors.raw(name, (rows, *(slice(None),) * (len(header.shape) - 1)))


def checked_scales(tensors: StoredTensors, name: str, scales: Tensor) -> Tensor:
    """scales: as stored or of a tensor that stands for them. Returns them as float32. Raises CheckpointError for one
    that is no finite number."""
    found = scales.float()
    if not torch.isfinite(found).all():
        raise CheckpointError(
            f"{tensors.where(name)}: tensor {name} has a scale that is no finite number: fetch it again"
        )
    return found


def bytes_of_fp8(tensors: StoredTensors, name: str, numbers: Tensor) -> Tensor:
    """numbers: e4m3, as stored. Returns their bits, int8. Raises CheckpointError where one is NaN."""
    found = numbers.view(torch.int8)
    if ((found & 127) == 127).any():
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} has a number that is NaN: fetch it again")
    return found


def floats_of_fp8(tensors: StoredTensors, name: str, numbers: Tensor) -> Tensor:
    """numbers: e4m3, as stored. Returns them as float32. Raises CheckpointError where one is NaN."""
    bytes_of_fp8(tensors, name, numbers)
    return numbers.float()


def in_bytes(rows: slice, num_inputs: int, read: Callable[[slice], Tensor]) -> Tensor:
    """read: returns whole numbers of some rows [n, k] that fit in int8. Returns those of `rows`, int8 [n, k]; some at a
    time, for what they are made of takes several times their memory."""
    found = torch.empty(rows.stop - rows.start, num_inputs, dtype=torch.int8)
    step = max(PIECE_NUMBERS // num_inputs, 1)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        found[start - rows.start : stop - rows.start] = read(slice(start, stop))
    return found


def scaled(numbers: Tensor, scales: Tensor, group: int) -> Tensor:
    """numbers: float32 [n, k]; overwritten. scales: [n, k / group]. Returns the products."""
    return numbers.unflatten(1, (-1, group)).mul_(scales[:, :, None]).flatten(1)


def order_of_groups(groups: Tensor, group: int) -> Tensor | None:
    """groups: int64 [k], the group of each input. Returns the inputs in the order of their groups, int64 [k]; None: not
    every group has `group` inputs."""
    sizes = torch.bincount(groups, minlength=len(groups) // group)
    return None if (sizes != group).any() else torch.argsort(groups, stable=True)


def check_divides(tensors: StoredTensors, name: str, group: int, num_inputs: int) -> None:
    """Raise CheckpointError where groups of inputs do not fill a weight's rows."""
    if num_inputs % group:
        raise CheckpointError(
            f"{tensors.where(name)}: weight {name} has {num_inputs} inputs, which groups of {group} (group_size in "
            "config.json) do not divide"
        )
