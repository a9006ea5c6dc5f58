"""Descriptors of the pieces of a KV pool that lies in the memory of several devices, for other processes. No torch."""

import os
import socket
import weakref
from collections.abc import Sequence


class PoolPieces:
    """Owner of one descriptor for each rank's piece, in the order in which the pool has them. A descriptor keeps its
    piece's memory: all are closed with this object."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: of each piece."""
        self.num_bytes = num_bytes
        self._descriptors: list[int] = []
        weakref.finalize(self, close_all, self._descriptors)

    @property
    def descriptors(self) -> Sequence[int]:
        return self._descriptors

    def add(self, descriptor: int) -> None:
        """Take over the descriptor of the next piece."""
        self._descriptors.append(descriptor)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def make_link() -> tuple[socket.socket, socket.socket]:
    """Return the first rank's end and another rank's; whoever has an end alone hears of it when the other is closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
