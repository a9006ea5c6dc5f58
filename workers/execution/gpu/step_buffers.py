"""Memory that steps share: what the host writes, in two rooms; what the device computes with, at fixed addresses.

    room 0, room 1 (pinned)  ──one copy──>  words ──> ... ──> logits ──> tokens  ──one copy──>  room 0, room 1

A step's room is written while the step before it is computed, and again once it was waited for. The device's buffers
are there once: on the main lane, steps are in order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.elementwise.step_inputs import DecodeRows
from ...device.device import Device, Event
from .step_plan import CONTEXT, FEED, KNOWN, TABLE, TOKEN, Ints

NUM_ROOMS = 2
_IDLE = {TOKEN: 0, FEED: KNOWN, CONTEXT: 0, TABLE: 0}  # a row that decodes nothing


@dataclass(slots=True, eq=False)
class Room:
    words: Tensor  # [4, max_rows] int32, pinned: see StepPlan.decodes
    tokens: Tensor  # [max_rows] int64, pinned: what the step yielded
    used: Event | None = None  # until then

    def wait(self) -> None:
        if self.used is not None:
            self.used.wait()
            self.used = None

    def write(self, decodes: Ints, bucket: int) -> None:
        """decodes: see StepPlan; and idle rows up to `bucket`."""
        words, num_rows = self.words.numpy(), decodes.shape[1]
        words[:, :num_rows] = decodes
        words[:, num_rows:bucket] = np.array(list(_IDLE.values()), dtype=np.int32)[:, None]


class StepBuffers:
    def __init__(self, device: Device, max_rows: int, max_blocks: int, vocab_size: int) -> None:
        """max_blocks: of a sequence. vocab_size: 0 on a rank that does not sample. Raises torch.OutOfMemoryError."""
        on, padded = device.torch_device, -(-max_rows // 4) * 4  # kernels like addresses that are multiples of 16
        self.max_rows = max_rows
        self.rooms = [
            Room(device.pinned((4, padded), torch.int32), device.pinned((max_rows,), torch.int64))
            for _ in range(NUM_ROOMS)
        ]
        self._words = torch.zeros(4, padded, dtype=torch.int32, device=on)
        self._words[FEED] = KNOWN
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=on)
        self.query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=on)  # of rows that decode
        self.logits = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=on)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=on)

    def upload(self, room: Room) -> None:
        """Device work."""
        self._words.copy_(room.words, non_blocking=True)

    def gather_tables(self, tables: Tensor, bucket: int) -> None:
        """Device work. tables: [rows, max_blocks] int32, of which the room names some."""
        torch.index_select(tables, 0, self._words[TABLE, :bucket], out=self.block_tables[:bucket])

    def read_back(self, room: Room) -> None:
        """Device work."""
        room.tokens.copy_(self.tokens, non_blocking=True)

    def rows(self, bucket: int) -> DecodeRows:
        words = self._words[:, :bucket]
        return DecodeRows(words[TOKEN], words[FEED], words[CONTEXT], self.block_tables[:bucket], self.tokens)
