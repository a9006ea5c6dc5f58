"""The block tables of running sequences in the devices' memory: what changed since the last step is sent.

update (rank 0's host): which rows the sequences have   ->   take: the changes   ->   change (each rank): in one copy
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...common.errors import InternalError
from ...core.batch_tables import FIRST_ROWS, TableRows
from ...device.device import Device, Lane
from .step_plan import Ints


def num_rows_for(max_sequences: int) -> int:
    """max_sequences: of a step. Rows are forgotten when there are twice as many as a step has, and FIRST_ROWS; then a
    step's own are new."""
    return 3 * max_sequences + FIRST_ROWS


class ChangedTables(TableRows):
    """Record of changed block tables, whose rows have `max_blocks`."""

    def __init__(self, block_size: int, max_blocks: int, max_sequences: int) -> None:
        super().__init__(block_size, num_rows_for(max_sequences))
        self._max_blocks = max_blocks
        self._places: list[int] = []
        self._blocks: list[int] = []

    def take(self) -> Ints:
        """Return the changes not taken yet, see StepPlan.tables."""
        changes = np.array((self._places, self._blocks), dtype=np.int32)
        self._places, self._blocks = [], []
        return changes

    def forget_all(self) -> None:
        super().forget_all()
        self._places, self._blocks = [], []

    def _store(self, row: int, first: int, blocks: list[int]) -> None:
        place = row * self._max_blocks + first
        self._places += range(place, place + len(blocks))
        self._blocks += blocks

    def _grow(self) -> list[int]:
        raise InternalError("a step has more sequences than the GPU's buffers can hold (max_running)")


class DeviceTables:
    def __init__(self, device: Device, max_blocks: int, max_sequences: int) -> None:
        """max_sequences: of a step. Raises torch.OutOfMemoryError."""
        shape = num_rows_for(max_sequences), max_blocks
        assert shape[0] * shape[1] < 1 << 31
        self._device = device
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)

    def change(self, lane: Lane, changes: Ints) -> None:
        """changes: see StepPlan.tables; there are some."""
        sent = self._device.pinned(changes.shape, torch.int64)
        sent.numpy()[:] = changes
        lane.run(partial(_change, self.tensor.view(-1), sent))


def _change(numbers: Tensor, changes: Tensor) -> None:
    places, values = changes.to(numbers.device, non_blocking=True)
    numbers.index_copy_(0, places, values.int())
