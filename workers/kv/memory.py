"""Memory of a worker's KV pool, as hand-offs read and write it."""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .device_kv import DeviceKV
from .layout import PoolMemory, Runs


@dataclass(frozen=True, slots=True)
class KVMemory(PoolMemory):
    """Memory of a pool, and the device that copies it where host code cannot."""

    device: DeviceKV | None = None  # where the pool is in device memory, or on several machines
    on_first_use: Callable[[int], object] | None = None  # as BlockManager calls it
    # To what reads into the other ranks' pieces of the pool (transport/rank_agent.py), where each is on its own device.
    rank_links: Sequence[socket.socket] = ()

    def read(self, runs: Runs) -> Iterator[memoryview | bytes]:
        return PoolMemory.read(self, runs) if self.device is None else iter([self.device.read(runs)])
