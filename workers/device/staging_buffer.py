"""Arrays of the host, others each step, that go to the device in one copy.

pack (host)  ->  unpack (device work): tensors with the arrays' numbers
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .device import Device

_ALIGNED = 16  # bytes: kernels are compiled for addresses that are multiples of it
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Place:
    start: int  # bytes
    end: int
    dtype: torch.dtype


class StagingBuffer:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = device.pinned((_FIRST_BYTES,), torch.uint8)
        self._places: list[_Place] = []

    def pack(self, arrays: SequenceOf[NDArray[Any]]) -> None:
        """arrays: [n] each. What was packed before has reached the device. The memory grows to the largest staging."""
        starts = np.cumsum([0, *(_aligned(array.nbytes) for array in arrays)]).tolist()
        if starts[-1] > len(self._host):
            self._host = self._device.pinned((1 << (starts[-1] - 1).bit_length(),), torch.uint8)
        block = self._host.numpy()
        self._places = []
        for start, array in zip(starts, arrays, strict=False):
            end = start + array.nbytes
            block[start:end].view(array.dtype)[:] = array
            self._places.append(_Place(start, end, _torch_dtype(array.dtype)))

    def unpack(self) -> list[Tensor]:
        """Device work, which is not captured: it allocates."""
        size = _aligned(self._places[-1].end)
        block = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        block.copy_(self._host[:size], non_blocking=True)
        return [block[place.start : place.end].view(place.dtype) for place in self._places]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
