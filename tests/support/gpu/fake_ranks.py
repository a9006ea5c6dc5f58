"""KV pools of ranks on GPUs, without GPUs: each rank's piece is a memory file, which rank 0 and other processes map."""

import ctypes
import gc
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.workers.device import kv_cache
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.joined_memory import Joining
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.kv.layout import KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.pool_pieces import make_link

from .fake_libcuda import PIECE, FakeLibCuda, make_virtual_memory


class FakeRanks:
    """The ranks of a worker, of one process each, but for being threads of this one."""

    def __init__(self, size: int = 3) -> None:
        self.libcudas = [FakeLibCuda() for _ in range(size)]
        self.ends = [make_link() for _ in range(size - 1)]
        self.memories = [make_virtual_memory(libcuda) for libcuda in self.libcudas]
        links: list[Sequence[socket.socket]] = [[ours for ours, _ in self.ends], *([its] for _, its in self.ends)]
        self.joinings = [Joining(memory, of) for memory, of in zip(self.memories, links, strict=True)]

    def pools(self, num_bytes: int) -> list[Tensor]:
        with ThreadPoolExecutor(len(self.joinings)) as threads:
            made = threads.map(lambda rank: self.joinings[rank].pool(rank, num_bytes)[0], range(len(self.joinings)))
            return [*made]

    def caches(self, layout: KVLayout, num_blocks: int) -> list[KVCache]:
        device = FakeDevice()

        def make(rank: int) -> KVCache:
            shared = self.joinings[rank] if len(self.joinings) > 1 else None
            return KVCache(layout, num_blocks, torch.device("cpu"), rank=rank, shared=shared, gpu=device)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(self.joinings)) as threads:
            patch.setattr(kv_cache, "driver_of", lambda _: self.memories[0])
            return [*threads.map(make, range(len(self.joinings)))]

    def close(self) -> None:
        for pair in self.ends:
            for end in pair:
                end.close()

    def check_nothing_is_left(self) -> None:
        """Check that nothing is mapped, and no handle and no descriptor held, once nobody holds the pools."""
        gc.collect()  # what errors hold
        assert all(libcuda.is_idle for libcuda in self.libcudas), "something is left"
        assert not num_descriptors(PIECE)


def make_pieces(
    layout: KVLayout, num_blocks: int, content: bytes | None = None, *, ranks: FakeRanks | None = None
) -> KVMemory:
    """The pool of all ranks, as rank 0 sees it, of zeros unless `content` is given."""
    ranks = ranks or FakeRanks(layout.tensor_parallel)
    memory = ranks.caches(layout, num_blocks)[0].memory
    ranks.close()
    if content is not None:
        ctypes.memmove(memory.region.address, content, memory.region.num_bytes)
    return memory


def num_descriptors(of: str) -> int:
    """Descriptors of this process with this name; one may be closed while they are listed."""
    num = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            num += of in str(entry.readlink())
    return num
