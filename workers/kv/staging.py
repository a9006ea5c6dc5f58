"""A buffer that transports read KV into before it is converted, handed out in slices: first come, first served.

A pull that finds no room waits, and so begins no read: the source's lease is renewed meanwhile. A slice comes back only
when nothing can land in it any more. One event loop, no torch.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..common.errors import TransportError
from ..common.memory import huge_page_mapping
from .layout import Region

STAGING_BYTES = 64 << 20  # reserved; unused parts cost no memory
GRAIN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    start: int
    num_bytes: int  # whole grains


class Staging:
    """Every method runs on the worker's event loop."""

    def __init__(
        self, num_bytes: int = STAGING_BYTES, memory: memoryview | None = None, on_device: Region | None = None
    ) -> None:
        """`memory`: where it is; of its own where there is none. `on_device`: a buffer of the same size, of which a
        slice is always given out with ours."""
        assert num_bytes % GRAIN_BYTES == 0
        self.view = memoryview(huge_page_mapping(num_bytes)) if memory is None else memory
        address = np.frombuffer(self.view, np.uint8).ctypes.data
        self.region = Region(address, num_bytes, self.view)
        self.on_device = on_device
        assert len(self.view) == num_bytes and (on_device is None or on_device.num_bytes == num_bytes)
        self._holes = [Slice(0, num_bytes)]  # in order of their start; no two touch
        self._waiting: deque[tuple[int, asyncio.Future[Slice]]] = deque()

    @property
    def regions(self) -> list[Region]:
        """The regions that transports must register."""
        return [self.region] if self.on_device is None else [self.region, self.on_device]

    @property
    def num_free(self) -> int:
        return sum(hole.num_bytes for hole in self._holes)

    async def take(self, num_bytes: int) -> Slice:
        """Wait for a free slice, first come, first served. Raises TransportError for more than the whole buffer."""
        needed = -(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES
        if needed > self.region.num_bytes:
            raise TransportError(
                f"{num_bytes:,} bytes of one block exceed the staging buffer of {self.region.num_bytes:,} bytes: "
                "lower the source's block_size"
            )
        turn: asyncio.Future[Slice] = asyncio.get_running_loop().create_future()
        self._waiting.append((needed, turn))
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(turn.result())
            self._serve()
            raise

    def give_back(self, piece: Slice) -> None:
        holes = sorted([*self._holes, piece], key=lambda hole: hole.start)
        self._holes = []
        for hole in holes:
            last = self._holes[-1] if self._holes else None
            if last is not None and last.start + last.num_bytes == hole.start:
                self._holes[-1] = Slice(last.start, last.num_bytes + hole.num_bytes)
            else:
                self._holes.append(hole)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            needed, turn = self._waiting[0]
            if not turn.done():
                hole = next((hole for hole in self._holes if hole.num_bytes >= needed), None)
                if hole is None:
                    return
                at = self._holes.index(hole)
                rest = hole.num_bytes - needed
                self._holes[at : at + 1] = [Slice(hole.start + needed, rest)] if rest else []
                turn.set_result(Slice(hole.start, needed))
            self._waiting.popleft()
