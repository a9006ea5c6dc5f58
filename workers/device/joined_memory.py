"""A KV pool of several ranks on GPUs: each rank's piece is on its own GPU, and rank 0 sees them all, side by side.

    rank k   create a piece ─ map it ─ zeros ─ send its descriptor to rank 0          [1, bytes]
    rank 0   create a piece ─ receive the others' ─ map all, one after the other      [ranks, bytes]
             keep their descriptors, for other workers to map the pool (transport/cuda_ipc.py)

Every rank says `pool` once, when all know how large it is. What is sent goes over a pair of Unix sockets for each rank,
made before its process: the kernel tells us there when that ends.
"""

import os
import socket
import struct
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from ..common.errors import ConfigError, RankLost, TransportError
from ..kv.pool_file import PoolFile
from ..kv.pool_pieces import PoolPieces
from ..parallel.groups import STALL
from .virtual_memory import VirtualMemory

_MESSAGE = struct.Struct("<IQ")  # rank, bytes of its piece
_MOST_DESCRIPTORS = 2  # of which one is right


@dataclass(frozen=True, slots=True)
class Joining:
    """Connection of a rank to the joint memory."""

    memory: VirtualMemory
    links: Sequence[socket.socket]  # rank 0: to each other rank, in order; other ranks: only to rank 0

    def pool(self, rank: int, num_bytes: int) -> tuple[Tensor, PoolPieces | None]:
        """num_bytes: of each rank, a multiple of the memory's granularity. Returns zeros, uint8, and the pieces that
        they consist of: [ranks, num_bytes] at rank 0, [1, num_bytes] and None elsewhere. Raises ConfigError, or
        RankLost where another rank does not do its part."""
        assert num_bytes % self.memory.granularity == 0
        with ExitStack() as stack:
            with _needing(f"{num_bytes:,} bytes of KV", "lower kv_memory_fraction (or kv_memory_bytes)"):
                own = self.memory.create(num_bytes)
            stack.callback(self.memory.release, own)
            if rank == 0:
                return self._all(own, num_bytes, stack)
            return self._own(own, rank, num_bytes), None

    def _own(self, handle: int, rank: int, num_bytes: int) -> Tensor:
        with _needing("this rank's KV", "use tensor_parallel 1"):
            pool = self.memory.tensor(self.memory.map([handle], num_bytes)).view(1, num_bytes)
            pool.zero_()
            self.memory.synchronize()  # before rank 0 may write
            descriptor = self.memory.descriptor_of(handle)
        try:
            [to_first] = self.links
            send_piece(to_first, rank, num_bytes, descriptor)
        finally:
            os.close(descriptor)
        return pool

    def _all(self, own: int, num_bytes: int, stack: ExitStack) -> tuple[Tensor, PoolPieces]:
        """Map the memory of all ranks. What `stack` undoes may be undone once all is mapped."""
        handles, pieces = [own], PoolPieces(num_bytes)
        with _needing("a descriptor of rank 0's KV", "use tensor_parallel 1"):
            pieces.add(self.memory.descriptor_of(own))
        reach = "choose GPUs that reach each other's memory (nvidia-smi topo -p2p r), or tensor_parallel 1"
        for rank, link in enumerate(self.links, 1):
            pieces.add(receive_piece(link, rank, num_bytes))
            with _needing(f"the KV of rank {rank} at rank 0", reach):
                handles.append(self.memory.imported(pieces.descriptors[rank]))
            stack.callback(self.memory.release, handles[-1])
        with _needing("the KV of all ranks at rank 0", reach):
            pool = self.memory.tensor(self.memory.map(handles, num_bytes)).view(-1, num_bytes)
        pool[0].zero_()  # the others' are
        return pool, pieces


def granularity_of(shared: PoolFile | Joining) -> int:
    """Bytes of which each rank's piece must be a multiple. shared: as KVCache takes it."""
    return shared.memory.granularity if isinstance(shared, Joining) else 1


def make_link() -> tuple[socket.socket, socket.socket]:
    """Rank 0's end and another rank's; whose end is nobody else's hears of it when the other is closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_piece(to_first: socket.socket, rank: int, num_bytes: int, descriptor: int) -> None:
    """Raises RankLost."""
    to_first.settimeout(STALL.total_seconds())
    try:
        socket.send_fds(to_first, [_MESSAGE.pack(rank, num_bytes)], [descriptor])
    except OSError as e:  # a time-out too
        raise RankLost(f"rank {rank} could not send its KV memory to rank 0: {e}") from e


def receive_piece(link: socket.socket, rank: int, num_bytes: int) -> int:
    """The descriptor of that rank's piece, which has to have `num_bytes`. Raises RankLost."""
    link.settimeout(STALL.total_seconds())
    try:
        message, descriptors, _, _ = socket.recv_fds(link, _MESSAGE.size, _MOST_DESCRIPTORS)
    except OSError as e:
        raise RankLost(f"the KV memory of rank {rank} did not arrive: {e}") from e
    if message == _MESSAGE.pack(rank, num_bytes) and len(descriptors) == 1:
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    if not message:
        raise RankLost(f"rank {rank} ended before it allocated its KV memory")
    raise RankLost(
        f"rank {rank} sent {len(descriptors)} descriptors and {message.hex()} for its {num_bytes:,} bytes of KV: "
        "all ranks must run one version of Diptych"
    )


@contextmanager
def _needing(what: str, remedy: str) -> Generator[None]:
    try:
        yield
    except TransportError as e:
        raise ConfigError(f"the GPU cannot allocate {what} ({e}): {remedy}") from e
