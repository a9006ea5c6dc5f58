"""Tensors, addresses, shared memory and barriers of Gluon's functions where these are Python (gluon_emulator.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class EmulationError(AssertionError):
    """Error: what the kernel does is not safe on a GPU."""


class Dtype:
    def __init__(self, of: torch.dtype) -> None:
        self.torch, self.element_ty = of, self

    def rounded(self, x: Any) -> "Tile":
        if not self.torch.is_floating_point:
            return Tile.of(np.asarray(x).astype(str(self.torch).removeprefix("torch.")))
        return Tile.of(torch.from_numpy(np.array(x, np.float32)).to(self.torch).float().numpy())


class Tile(np.ndarray):
    """A tensor of a kernel, also of no dimensions. Layouts are not looked at."""

    @staticmethod
    def of(x: Any) -> "Tile":
        return np.asarray(x).view(Tile)

    def __array_wrap__(self, made: Any, context: Any = None, return_scalar: bool = False) -> "Tile":
        return Tile.of(made)

    def __getitem__(self, key: Any) -> "Tile":
        return Tile.of(np.asarray(self)[key])

    def to(self, dtype: Any) -> "Tile":
        return dtype.rounded(self) if isinstance(dtype, Dtype) else Tile.of(self.astype(dtype))

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=LAYOUT)

    def permute(self, order: Sequence[int]) -> "Tile":
        return Tile.of(np.asarray(self).transpose(tuple(order)))

    def split(self) -> "tuple[Tile, Tile]":
        return self[..., 0], self[..., 1]


class Layout:
    """Any layout."""

    def __call__(self, *_: Any, **__: Any) -> "Layout":
        return self

    def __getattr__(self, name: str) -> "Layout":
        return self


LAYOUT = Layout()


@dataclass
class Pointer:
    """Addresses in a tensor's memory, which may be beyond the tensor."""

    flat: Tensor
    at: Any

    @staticmethod
    def to(tensor: Tensor) -> "Pointer":
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(flat, Tile.of(np.int64(tensor.storage_offset())))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, Tile.of(np.asarray(self.at, np.int64) + np.asarray(offset, np.int64)))

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.flat, self.at[key])

    @property
    def dtype(self) -> Dtype:
        return Dtype(self.flat.dtype)

    @property
    def shape(self) -> Any:
        return np.shape(self.at)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=LAYOUT)

    def load(self, mask: Any = None, other: Any = 0) -> Tile:
        at, used = self._used(mask)
        found = np.full(at.shape, other, np.float32 if self.flat.dtype.is_floating_point else np.int64)
        read = self.flat[torch.from_numpy(at[used])]
        found[used] = read.float().numpy() if read.dtype.is_floating_point else read.numpy()
        return Tile.of(found if self.flat.dtype.is_floating_point else found.astype(np.int32))

    def store(self, value: Any, mask: Any = None) -> None:
        at, used = self._used(mask)
        numbers = np.broadcast_to(np.asarray(value), at.shape)[used]
        self.flat[torch.from_numpy(at[used])] = torch.from_numpy(numbers.copy()).to(self.flat.dtype)

    def _used(self, mask: Any) -> tuple[Any, Any]:
        shape = np.shape(self.at) if mask is None else np.broadcast_shapes(np.shape(self.at), np.shape(mask))
        at = np.broadcast_to(np.asarray(self.at), shape)
        used = np.ones(shape, bool) if mask is None else np.broadcast_to(np.asarray(mask), shape).astype(bool)
        if used.any() and (at[used].min() < 0 or at[used].max() >= len(self.flat)):
            raise EmulationError("an address outside of its tensor's memory")
        return at, used


class Shared:
    """Shared memory, or a part of it: as many numbers as `numbers` has, in whatever shape."""

    def __init__(
        self, pause: Callable[[], None], dtype: Dtype, numbers: Any, unfenced: Any, shape: Sequence[int]
    ) -> None:
        """pause: called at each access. unfenced: of each number, whether it was stored without a fence since."""
        self._pause, self.dtype, self.numbers, self.unfenced = pause, dtype, numbers, unfenced
        self.shape = [*shape]

    def _of(self, change: Callable[[Any], Any], shape: Sequence[int] | None = None) -> "Shared":
        numbers, unfenced = change(self.numbers), change(self.unfenced)
        return Shared(self._pause, self.dtype, numbers, unfenced, numbers.shape if shape is None else shape)

    def index(self, place: Any) -> "Shared":
        place = int(place)
        if not 0 <= place < self.shape[0]:
            raise EmulationError(f"place {place} of {self.shape}")
        return self._of(lambda of: of[place], self.shape[1:])

    def permute(self, order: Sequence[int]) -> "Factor":
        return Factor(self, tuple(order))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return self._of(lambda of: of.reshape(tuple(shape)))

    def in_columns(self, shape: Sequence[int]) -> "Shared":
        """Stages of [rows, columns] whose pieces are [page, 64]: page after page, then the next 64 columns."""
        stages, rows, columns = shape
        page = self.numbers.shape[3]
        parts = (stages, columns // 64, rows // page, page, 64)
        return self._of(lambda of: of.reshape(parts).transpose(0, 2, 3, 1, 4), shape)

    def load(self, _: Any = None) -> Tile:
        self._pause()
        return Tile.of(self.numbers.reshape(self.shape).copy())

    def store(self, value: Any) -> None:
        self._pause()
        self.put(value, is_fenced=False)

    def put(self, value: Any, *, is_fenced: bool) -> None:
        if np.shape(value) != tuple(self.shape):
            raise EmulationError(f"{np.shape(value)} into {self.shape}")
        self.numbers[...] = np.reshape(np.asarray(value), self.numbers.shape)
        self.unfenced[...] = not is_fenced

    def as_factor(self) -> Any:
        """Return what matrix units read."""
        if self.unfenced.any():
            raise EmulationError("matrix units read what was stored without a fence")
        return self.numbers.reshape(self.shape)


@dataclass(frozen=True)
class Factor:
    """Shared memory, its axes in another order."""

    of: Shared
    order: tuple[int, ...]

    def as_factor(self) -> Any:
        return self.of.as_factor().transpose(self.order)


@dataclass
class Barrier:
    count: int = 0
    left: int = 0
    num_bytes: int = 0
    num_phases: int = 0  # that have ended

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, count: int = 1, num_bytes: int = 0) -> None:
        self.left -= count
        self.num_bytes += num_bytes
        if self.left < 0:
            raise EmulationError("more arrive at a barrier than it waits for")
        if not self.left and not self.num_bytes:
            self.num_phases, self.left = self.num_phases + 1, self.count

    def is_over(self, phase: int) -> bool:
        """Return what the hardware tells, by the parity of the phase."""
        return self.num_phases & 1 != phase


class Barriers:
    def __init__(self, num: int) -> None:
        self._of = [Barrier() for _ in range(num)]

    def index(self, place: Any) -> Barrier:
        return self._of[int(place)]
