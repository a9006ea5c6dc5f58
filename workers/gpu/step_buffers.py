"""Memory that steps share: what the host writes, in two rooms; what the device computes with, at fixed addresses.

    room 0, room 1 (pinned)  ──one copy──>  words ──> ... ──> logits ──> tokens  ──one copy──>  room 0, room 1

A step's room is written while the step before it is computed, and again once it was waited for. The device's buffers
are there once: on the main lane, steps are in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.step_inputs import DecodeRows
from .device import Device, Event

NUM_ROOMS = 2
_TOKEN, _FEED, _CONTEXT, _TABLE = range(4)  # rows of `words`
KNOWN = -1  # as a feed: the host knows the token


@dataclass(slots=True, eq=False)
class Room:
    words: Tensor  # [4, max_rows] int32, pinned
    tokens: Tensor  # [max_rows] int64, pinned: what the step yielded
    used: Event | None = None  # until then

    def wait(self) -> None:
        if self.used is not None:
            self.used.wait()
            self.used = None

    def write(
        self,
        token_ids: Sequence[int],
        feeds: Sequence[int],
        context_lens: Sequence[int],
        table_rows: Sequence[int],
        bucket: int,
    ) -> None:
        """Rows that decode, and idle ones up to `bucket`."""
        words, num_rows = self.words.numpy(), len(token_ids)
        words[_TOKEN, :num_rows], words[_FEED, :num_rows] = token_ids, feeds
        words[_CONTEXT, :num_rows], words[_TABLE, :num_rows] = context_lens, table_rows
        words[:, num_rows:bucket] = np.array([[0], [KNOWN], [0], [0]], dtype=np.int32)


class StepBuffers:
    def __init__(self, device: Device, max_rows: int, max_blocks: int, vocab_size: int) -> None:
        """max_blocks: of a sequence. Raises torch.OutOfMemoryError."""
        on, padded = device.torch_device, -(-max_rows // 4) * 4  # kernels like addresses that are multiples of 16
        self.max_rows = max_rows
        self.rooms = [
            Room(device.pinned((4, padded), torch.int32), device.pinned((max_rows,), torch.int64))
            for _ in range(NUM_ROOMS)
        ]
        self._words = torch.zeros(4, padded, dtype=torch.int32, device=on)
        self._words[_FEED] = KNOWN
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=on)
        self.query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=on)  # of rows that decode
        self.logits = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=on)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=on)

    def upload(self, room: Room) -> None:
        """Device work."""
        self._words.copy_(room.words, non_blocking=True)

    def gather_tables(self, tables: Tensor, bucket: int) -> None:
        """Device work. tables: [rows, max_blocks] int32, of which the room names some."""
        torch.index_select(tables, 0, self._words[_TABLE, :bucket], out=self.block_tables[:bucket])

    def read_back(self, room: Room) -> None:
        """Device work."""
        room.tokens.copy_(self.tokens, non_blocking=True)

    def rows(self, bucket: int) -> DecodeRows:
        words = self._words[:, :bucket]
        return DecodeRows(words[_TOKEN], words[_FEED], words[_CONTEXT], self.block_tables[:bucket], self.tokens)
