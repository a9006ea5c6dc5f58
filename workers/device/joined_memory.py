"""A KV pool of several ranks on GPUs: each rank's piece is on its own GPU, and rank 0 sees them all, side by side.

    rank k   create a piece ─ map it ─ zeros ─ send its descriptor to rank 0          [1, bytes]
    rank 0   create a piece ─ receive the others' ─ map all, one after the other      [ranks, bytes]
             keep their descriptors, for other workers to map the pool (transport/cuda_ipc.py)
             send all of them to every rank, which may map the pool, too: `all_pieces`, `whole`

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
from ..parallel.stores import STALL
from .device_errors import LESS_KV
from .virtual_memory import VirtualMemory

_MESSAGE = struct.Struct("<IQ")  # rank, bytes of its piece
_MOST_DESCRIPTORS = 253  # of one message: Linux's SCM_MAX_FD


@dataclass(frozen=True, slots=True)
class Joining:
    """Connection of a rank to the joint memory."""

    memory: VirtualMemory
    links: Sequence[socket.socket]  # rank 0: to each other rank, in order; other ranks: only to rank 0

    def pool(self, rank: int, num_bytes: int) -> tuple[Tensor, PoolPieces | None]:
        """rank: counted from the machine's first one. num_bytes: of each rank, a multiple of the memory's granularity.
        Returns zeros, uint8, and the pieces that they consist of: [ranks, num_bytes] at rank 0, [1, num_bytes] and None
        elsewhere. Raises ConfigError, or RankLost where another rank does not do its part."""
        assert num_bytes % self.memory.granularity == 0
        with ExitStack() as stack:
            with _needing(f"{num_bytes:,} bytes of KV", LESS_KV):
                own = self.memory.create(num_bytes)
            stack.callback(self.memory.release, own)
            if rank == 0:
                return self._all(own, num_bytes, stack)
            return self._own(own, rank, num_bytes), None

    def all_pieces(self, num_ranks: int, num_bytes: int) -> PoolPieces:
        """Receive the descriptors of all ranks' pieces, of `num_bytes` each, at another rank than 0. Waits until rank 0
        has mapped them. Raises RankLost."""
        [to_first] = self.links
        pieces = PoolPieces(num_bytes)
        for descriptor in receive_pieces(to_first, 0, num_bytes, num_ranks):
            pieces.add(descriptor)
        return pieces

    def whole(self, pieces: PoolPieces) -> Tensor:
        """Map what `all_pieces` gave. Returns [ranks, bytes] uint8. Raises TransportError where our device does not
        reach the others' memory."""
        with ExitStack() as stack:
            handles: list[int] = []
            for descriptor in pieces.descriptors:
                handles.append(self.memory.imported(descriptor))
                stack.callback(self.memory.release, handles[-1])
            return self.memory.tensor(self.memory.map(handles, pieces.num_bytes)).view(-1, pieces.num_bytes)

    def _own(self, handle: int, rank: int, num_bytes: int) -> Tensor:
        with _needing("this rank's KV", "use tensor_parallel 1"):
            pool = self.memory.tensor(self.memory.map([handle], num_bytes)).view(1, num_bytes)
            pool.zero_()
            self.memory.synchronize()  # before rank 0 may write
            descriptor = self.memory.descriptor_of(handle)
        try:
            [to_first] = self.links
            send_pieces(to_first, rank, num_bytes, [descriptor])
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
            [descriptor] = receive_pieces(link, rank, num_bytes)
            pieces.add(descriptor)
            with _needing(f"the KV of rank {rank} at rank 0", reach):
                handles.append(self.memory.imported(descriptor))
            stack.callback(self.memory.release, handles[-1])
        with _needing("the KV of all ranks at rank 0", reach):
            pool = self.memory.tensor(self.memory.map(handles, num_bytes)).view(-1, num_bytes)
        pool[0].zero_()  # the others' are
        for link in self.links:
            send_pieces(link, 0, num_bytes, pieces.descriptors)
        return pool, pieces


def granularity_of(shared: PoolFile | Joining) -> int:
    """Bytes of which each rank's piece must be a multiple. shared: as KVCache takes it."""
    return shared.memory.granularity if isinstance(shared, Joining) else 1


def send_pieces(link: socket.socket, rank: int, num_bytes: int, descriptors: Sequence[int]) -> None:
    """rank: ours. num_bytes: of each piece. Raises RankLost."""
    link.settimeout(STALL.total_seconds())
    try:
        socket.send_fds(link, [_MESSAGE.pack(rank, num_bytes)], descriptors)
    except OSError as e:  # a time-out too
        raise RankLost(f"rank {rank} could not send KV memory to another: {e}") from e


def receive_pieces(link: socket.socket, rank: int, num_bytes: int, num_pieces: int = 1) -> list[int]:
    """Descriptors of pieces that this rank sends, which must have `num_bytes` each. Raises RankLost."""
    link.settimeout(STALL.total_seconds())
    try:
        message, descriptors, _, _ = socket.recv_fds(link, _MESSAGE.size, _MOST_DESCRIPTORS)
    except OSError as e:
        raise RankLost(f"the KV memory of rank {rank} did not arrive: {e}") from e
    if message == _MESSAGE.pack(rank, num_bytes) and len(descriptors) == num_pieces:
        return descriptors
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
