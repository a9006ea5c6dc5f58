"""Buffers that steps share: two sets on the host, written by turns; one set on the device, at fixed addresses.

    host 0, host 1 (pinned)  ──one copy──>  columns ──> ... ──> logits ──> tokens  ──one copy──>  host 0, host 1

A step's host buffers are written while the previous step is computed; they are reused once that step was waited for.
The device has one set: on the main lane, steps are in order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.elementwise.step_inputs import DecodeRows
from ...device.device import Device, Event
from .step_plan import CONTEXT, FEED, KNOWN, TABLE, TOKEN, Ints

NUM_HOST_BUFFERS = 2
_IDLE = {TOKEN: 0, FEED: KNOWN, CONTEXT: 0, TABLE: 0}  # a row that decodes nothing


@dataclass(slots=True, eq=False)
class HostBuffers:
    columns: Tensor  # [4, max_rows] int32, pinned: see StepPlan.decodes
    tokens: Tensor  # [max_rows] int64, pinned: the tokens of the step
    used: Event | None = None  # until then

    def wait(self) -> None:
        if self.used is not None:
            self.used.wait()
            self.used = None

    def write(self, decodes: Ints, bucket: int) -> None:
        """decodes: see StepPlan; and idle rows up to `bucket`."""
        columns, num_rows = self.columns.numpy(), decodes.shape[1]
        columns[:, :num_rows] = decodes
        columns[:, num_rows:bucket] = np.array(list(_IDLE.values()), dtype=np.int32)[:, None]


class StepBuffers:
    def __init__(self, device: Device, max_rows: int, max_blocks: int, vocab_size: int) -> None:
        """max_blocks: of a sequence. vocab_size: 0 on a rank that does not sample. Raises torch.OutOfMemoryError."""
        on, padded = device.torch_device, -(-max_rows // 4) * 4  # kernels like addresses that are multiples of 16
        self.max_rows = max_rows
        self.host = [
            HostBuffers(device.pinned((4, padded), torch.int32), device.pinned((max_rows,), torch.int64))
            for _ in range(NUM_HOST_BUFFERS)
        ]
        self._columns = torch.zeros(4, padded, dtype=torch.int32, device=on)
        self._columns[FEED] = KNOWN
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=on)
        self.query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=on)  # of rows that decode
        self.logits = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=on)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=on)

    def upload(self, host: HostBuffers) -> None:
        """Device work."""
        self._columns.copy_(host.columns, non_blocking=True)

    def gather_tables(self, tables: Tensor, bucket: int) -> None:
        """Device work. tables: [rows, max_blocks] int32, of which the host buffers name some."""
        torch.index_select(tables, 0, self._columns[TABLE, :bucket], out=self.block_tables[:bucket])

    def read_back(self, host: HostBuffers) -> None:
        """Device work."""
        host.tokens.copy_(self.tokens, non_blocking=True)

    def rows(self, bucket: int) -> DecodeRows:
        columns = self._columns[:, :bucket]
        return DecodeRows(columns[TOKEN], columns[FEED], columns[CONTEXT], self.block_tables[:bucket], self.tokens)
