"""Copies between addresses of a device by one kernel, in place of a call of the driver for each.

Scattered blocks of 2 MiB took 6.6 us each one by one on an H200, of which the memory takes 1 us; by the kernel 1.8 us.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from ...kernels.common.lang import tl
from ...kernels.kv.run_copy import ALIGNED_BYTES, TILES, RunTile, copy_runs, list_of
from ..kv.device_kv import LISTED_BYTES, CopyList

_GAP = ALIGNED_BYTES  # between runs that are written to check the kernel
_UNWRITTEN = 255

log = logging.getLogger("diptych.worker")
assert LISTED_BYTES == ALIGNED_BYTES


class RunCopier:
    """Its device is the calling thread's; what it copies is copied on that one's current lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def checked(cls, device: torch.device) -> "RunCopier | None":
        """Make one once all its kernels are compiled, and have copied as they are to. None, and the log says why: they
        cannot be had here."""
        if tl is None and device.type != "cpu":
            log.info("without Triton, scattered KV blocks are copied one by one")
            return None
        made = cls(device)
        try:
            wrong = [tile for tile in TILES if not made._is_right(tile)]
        except Exception:
            # Whatever a compiler and its tools may raise: the driver copies without them. Where the device has failed,
            # or is full, whoever uses it next is told so.
            log.warning("scattered KV blocks are copied one by one: their kernel does not run", exc_info=True)
            return None
        if wrong:
            log.warning("scattered KV blocks are copied one by one: their kernel copies wrongly (%s)", wrong)
            return None
        return made

    def copy(self, copies: CopyList) -> None:
        listed = list_of(*copies)
        # torch keeps pinned memory until the lane has copied it.
        pinned = torch.empty(listed.numbers.shape, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        pinned.numpy()[:] = listed.numbers
        copy_runs(pinned.to(self._device, non_blocking=True), listed.tile, listed.num_chunks)

    def _is_right(self, tile: RunTile) -> bool:
        """Copy one run more than two tiles have, in the reverse order, and look at every byte. Waits."""
        num, size = 2 * tile.rows + 1, tile.chunk_bytes
        place = np.arange(num, dtype=np.int64)
        lengths = np.full(num, size, dtype=np.int64)
        lengths[-1] -= ALIGNED_BYTES
        source = (torch.arange(num * size, dtype=torch.int64) * 2_654_435_761 >> 13).to(torch.uint8) % _UNWRITTEN
        expected = torch.full((num, size + _GAP), _UNWRITTEN, dtype=torch.uint8)
        expected[:, :size] = source.view(num, size).flip(0)
        expected[-1, size - ALIGNED_BYTES :] = _UNWRITTEN
        read, written = source.to(self._device), self._filled(expected)
        targets, sources = written.data_ptr() + place * (size + _GAP), read.data_ptr() + (num - 1 - place) * size
        self.copy(CopyList(targets, sources, lengths))
        return torch.equal(written.cpu(), expected)

    def _filled(self, like: Tensor) -> Tensor:
        return torch.full(like.shape, _UNWRITTEN, dtype=like.dtype, device=self._device)
