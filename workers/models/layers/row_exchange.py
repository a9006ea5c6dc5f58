"""Exchange of rows between workers that share experts and compute on devices: no device is waited for, so that a graph
may hold it.

    rows and their choices of each worker, R of each -> all_gather -> n R rows -> the experts held here, -1 elsewhere
        -> reduce_scatter -> the sums of a worker's own R rows

R is the same for all: the host knows it before the step (ranks/agreed_step.py). Rows beyond a worker's own are idle:
they have no expert. A worker receives (n - 1) R (H + 2 top_k) numbers and sends (n - 1) R H back. Two all-to-alls move
min(n - 1, top_k (n - 1) / n) R H each way at best, but who gets how many rows is known to devices alone: their buffers
would have room for all rows of all workers, and NCCL would send all of that.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...device.device_group import DeviceGroup
from .turns import InTurns

MOST_ROWS = 8192  # of all workers at once: each of a row's choices has a row of what experts give
_ALIGNED = 64  # bytes: then the stride of rows is a multiple of 16 numbers, as kernels are compiled for
_NO_EXPERT = 255  # of each byte of -1


class RowExchange:
    """Exchange of one worker, for all its layers. Until `join` the other workers have no rows, and nothing waits for
    them: so kernels are compiled, and memory is measured."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: DeviceGroup | None = None
        self._num_rows: int | None = None
        self._num_parts = 1

    def join(self, group: DeviceGroup) -> None:
        """Exchange rows with the others from now on."""
        assert (group.rank, group.size) == (self.rank, self.size)
        self._group = group

    def agree(self, num_rows: int | None, num_parts: int = 1) -> None:
        """Set how many rows each worker has in what a lane computes next. None: as many as it computes, which is the
        same number everywhere. num_parts: of a step, which are under way at once and share the memory of pieces."""
        self._num_rows, self._num_parts = num_rows, num_parts

    def pieces(self, num_own: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces of R rows that are exchanged one after the other, [start, end). num_own: rows that are this
        worker's."""
        num_rows = num_own if self._num_rows is None else self._num_rows
        assert num_own <= num_rows
        most = self._most(self._num_parts)
        for start in range(0, num_rows, most):
            yield start, min(start + most, num_rows)

    def num_pieces(self, num_rows: int, num_parts: int) -> int:
        """Number of pieces of one of so many parts, which has `num_rows` rows of each worker."""
        return -(-num_rows // self._most(num_parts))

    def _most(self, num_parts: int) -> int:
        """Rows of each worker in a piece."""
        return max(MOST_ROWS // (self.size * num_parts), 1)

    def gather(self, rows: Tensor, gates: Tensor, experts: Tensor, num: int) -> InTurns[tuple[Tensor, Tensor, Tensor]]:
        """rows: [T, H] contiguous; gates: [T, top_k] float32; experts: [T, top_k] int32, -1 is none. num: T or more,
        of each worker. Gives the same of all workers, in their order: [n num, H], whose last axis is contiguous, and
        [n num, top_k] twice."""
        own, top_k, width = len(rows), experts.shape[1], rows.shape[1] * rows.element_size()
        parts = [part.view(torch.uint8) for part in (rows, gates, experts)]
        if num_idle := -(8 * top_k) % _ALIGNED:
            parts.append(parts[0].new_zeros(own, num_idle))
        message = torch.cat(parts, dim=1)
        starts = width, width + 4 * top_k, width + 8 * top_k
        if own < num:
            padded = _idle(message.new_zeros(num, message.shape[1]), starts)
            padded[:own] = message
            message = padded
        received = yield partial(self._gathered, message, starts)
        return (
            received[:, :width].view(rows.dtype),
            received[:, starts[0] : starts[1]].contiguous().view(torch.float32),
            received[:, starts[1] : starts[2]].contiguous().view(torch.int32),
        )

    def scatter(self, given: Tensor, num_own: int) -> InTurns[Tensor]:
        """given: [n R, H], what the experts here give to the rows of all. Gives the sums of this worker's first rows,
        [num_own, H]."""
        summed = yield partial(self._summed, given)
        return summed[:num_own]

    def _summed(self, given: Tensor) -> Tensor:
        """given: [n R, H]. Returns the sums of this worker's rows, [R, H]."""
        if self._group is None:
            return given.chunk(self.size)[self.rank]
        return self._group.reduce_scatter(given)

    def _gathered(self, message: Tensor, starts: tuple[int, int, int]) -> Tensor:
        """message: [R, W] uint8. Returns those of all workers, [n R, W]."""
        if self._group is not None:
            return self._group.all_gather(message)
        alone = _idle(message.new_zeros(self.size * len(message), message.shape[1]), starts)
        alone[self.rank * len(message) :][: len(message)] = message
        return alone


def _idle(messages: Tensor, starts: tuple[int, int, int]) -> Tensor:
    """Let no row of `messages`, [N, W] uint8, have an expert."""
    messages[:, starts[1] : starts[2]] = _NO_EXPERT
    return messages
