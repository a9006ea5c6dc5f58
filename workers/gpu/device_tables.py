"""The block tables of running sequences in the device's memory: what changed since the last step is sent.

update (host): which rows the sequences have      ->   send: the changes, in one copy, on a lane
"""

from functools import partial

import torch
from torch import Tensor

from ..batch_tables import FIRST_ROWS, TableRows
from ..errors import InternalError
from .device import Device, Lane


class DeviceTables(TableRows):
    def __init__(self, device: Device, block_size: int, max_blocks: int, max_sequences: int) -> None:
        """max_sequences: of a step."""
        # Rows are forgotten when there are twice as many as a step has, and FIRST_ROWS; then a step's own are new.
        num_rows = 3 * max_sequences + FIRST_ROWS
        super().__init__(block_size, num_rows)
        self._device = device
        self.tensor = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device.torch_device)
        self._places: list[int] = []
        self._blocks: list[int] = []

    def send(self, lane: Lane) -> bool:
        """Whether there was something to send: then what was gathered from `tensor` before is old."""
        if not self._places:
            return False
        changes = self._device.pinned((2, len(self._places)), torch.int64)
        changes[0] = torch.tensor(self._places)
        changes[1] = torch.tensor(self._blocks)
        self._places, self._blocks = [], []
        lane.run(partial(_change, self.tensor.view(-1), changes))
        return True

    def forget_all(self) -> None:
        super().forget_all()
        self._places, self._blocks = [], []

    def _store(self, row: int, first: int, blocks: list[int]) -> None:
        place = row * self.tensor.shape[1] + first
        self._places += range(place, place + len(blocks))
        self._blocks += blocks

    def _grow(self) -> list[int]:
        raise InternalError("a step has more sequences than the GPU's buffers were made for (max_running)")


def _change(numbers: Tensor, changes: Tensor) -> None:
    places, values = changes.to(numbers.device, non_blocking=True)
    numbers.index_copy_(0, places, values.int())
