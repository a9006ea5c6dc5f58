"""Sampling parameters of each row as columns of numbers at a fixed place on the device, where graphs read them.

SamplingRows  what does not change from one token of a request to the next: SamplingColumns
DrawColumns   that, and the key of each row's noise: written on the host, uploaded in one copy
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.sampling.sampling import Draws
from ...common.request import SamplingParams
from ...device.device import Device
from ...sampling.choice import MIN_TEMPERATURE, log_of
from ...sampling.noise import stream_keys
from ...sampling.sampler import is_plain

_ROW_BYTES = 24  # one int64, four of 32 bits
_MULTIPLE = 4  # of rows: columns begin at multiples of 16 bytes
_FEW = 64  # rows that are kept without a look at which of them are gone
_RECORD = np.dtype(  # the fields of SamplingColumns, of one row
    [
        ("temperature", np.float32),
        ("log_min_p", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("seeds", np.uint64),
        ("is_plain", np.bool_),
    ]
)
_PACKED = Struct("=fffiQ?")  # the same


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Sampling parameters of R rows, on the host."""

    samplings: list[SamplingParams]
    temperature: NDArray[np.float32]  # 0: greedy
    log_min_p: NDArray[np.float32]  # -inf: off
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seeds: NDArray[np.uint64]
    is_plain: bool  # all of them are


class SamplingRows:
    """Parameters as records of numbers, each made once while its request is sampled."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[SamplingParams, bytes]] = {}  # by the id of the parameters, which are kept for that

    def columns(self, samplings: list[SamplingParams]) -> SamplingColumns:
        rows = [known[1] if (known := self._rows.get(id(s))) is not None else self._add(s) for s in samplings]
        if len(self._rows) > 2 * len(samplings) + _FEW:
            self._rows = {id(s): (s, row) for s, row in zip(samplings, rows, strict=True)}
        records = np.frombuffer(b"".join(rows), dtype=_RECORD)
        return SamplingColumns(
            samplings,
            records["temperature"],
            records["log_min_p"],
            records["top_p"],
            records["top_k"],
            records["seeds"],
            bool(records["is_plain"].all()),
        )

    def _add(self, of: SamplingParams) -> bytes:
        temperature = 0.0 if of.temperature == 0.0 else max(of.temperature, MIN_TEMPERATURE)
        row = _PACKED.pack(temperature, log_of(of.min_p), of.top_p, of.top_k, of.seed, is_plain(of))
        self._rows[id(of)] = of, row
        return row


class DrawColumns:
    def __init__(self, max_rows: int, device: Device) -> None:
        """Rows that nobody has written are greedy."""
        rows = -(-max_rows // _MULTIPLE) * _MULTIPLE
        self._host = device.pinned((rows * _ROW_BYTES,), torch.uint8).zero_()
        self._device = torch.zeros(rows * _ROW_BYTES, dtype=torch.uint8, device=device.torch_device)
        on_host = _columns(self._host, rows)
        self._temperature, self._log_min_p, self._top_p, self._top_k, self._keys = (t.numpy() for t in on_host)
        self._on_device = _columns(self._device, rows)
        self._written: SamplingColumns | None = None

    def write(self, settings: SamplingColumns, positions: SequenceOf[int]) -> None:
        """positions: of the tokens to be drawn, one a row. What was uploaded before has reached the device."""
        num = len(settings.samplings)
        assert num == len(positions) <= len(self._keys)
        if settings is not self._written:
            self._temperature[:num] = settings.temperature
            self._temperature[num:] = 0.0
            self._log_min_p[:num] = settings.log_min_p
            self._top_p[:num] = settings.top_p
            self._top_k[:num] = settings.top_k
            self._written = settings
        self._keys[:num] = stream_keys(settings.seeds, np.array(positions, dtype=np.uint64))

    def upload(self) -> None:
        """Device work, which may be captured. All rows: they are few bytes, and one copy."""
        self._device.copy_(self._host, non_blocking=True)

    def draws(self, num_rows: int) -> Draws:
        """Return the draws of the first rows, on the device; in the same memory each time."""
        return Draws(*(column[:num_rows] for column in self._on_device))


def _columns(block: Tensor, rows: int) -> list[Tensor]:
    """Return the columns in the order of the fields of Draws."""
    keys, narrow = block[: 8 * rows].view(torch.int64), block[8 * rows :].view(4, 4 * rows)
    dtypes = (torch.float32, torch.float32, torch.float32, torch.int32)
    return [*(narrow[i].view(dtype) for i, dtype in enumerate(dtypes)), keys]
