"""Messages with payloads over the stream socket between two machines of one worker. Knows bytes alone.

message   framed as multiprocessing.connection does it
payload   as many bytes as the message says, not framed: sent out of the memory that has them, and received into the
          memory that is to have them
"""

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection

MOST_MESSAGE_BYTES = 16 << 20
DRAINED_BYTES = 1 << 16  # at once
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


class StreamEnded(Exception):
    """Error: the other end is gone, or nothing has come from it, or been taken by it, for too long. The stream is not
    usable any more."""


class MachineStream:
    """One thread at a time sends and receives."""

    def __init__(self, link: socket.socket, timeout_s: float | None = None) -> None:
        """Takes `link` over. timeout_s: for which nothing may come, or be taken, while this end waits; None: for
        ever."""
        link.settimeout(None)
        if timeout_s is not None:  # by the kernel, for whoever reads or writes the descriptor
            bound = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        if link.family in (socket.AF_INET, socket.AF_INET6):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message's end waits for no acknowledgement
        self._timeout_s, self._link = timeout_s, link
        self._connection = Connection(link.dup().detach())

    def send(self, message: bytes, payload: Iterable[bytes | memoryview] = ()) -> None:
        """Raises StreamEnded."""
        try:
            self._connection.send_bytes(message)
            for piece in payload:
                self._link.sendall(piece)
        except OSError as e:
            raise self._ended(e) from e

    def receive(self) -> bytes:
        """Receive a message. Raises StreamEnded."""
        try:
            return self._connection.recv_bytes(MOST_MESSAGE_BYTES)
        except (EOFError, OSError) as e:
            raise self._ended(e) from e

    def receive_bytes(self, num_bytes: int) -> bytes:
        """Receive so much of a payload. Raises StreamEnded."""
        chunks: list[bytes] = []
        while num_bytes:
            try:
                chunks.append(self._link.recv(num_bytes, socket.MSG_WAITALL))  # usually all of it
            except OSError as e:
                raise self._ended(e) from e
            if not chunks[-1]:
                raise self._ended(EOFError())
            num_bytes -= len(chunks[-1])
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def receive_into(self, view: memoryview) -> None:
        """Receive as much of a payload as `view` holds. Raises StreamEnded."""
        while view:
            try:
                num_bytes = self._link.recv_into(view, len(view), socket.MSG_WAITALL)
            except OSError as e:
                raise self._ended(e) from e
            if not num_bytes:
                raise self._ended(EOFError())
            view = view[num_bytes:]

    def drain(self, num_bytes: int) -> None:
        """Receive so much of a payload, and keep nothing. Raises StreamEnded."""
        while num_bytes:
            num_bytes -= len(self.receive_bytes(min(num_bytes, DRAINED_BYTES)))

    def interrupt(self) -> None:
        """End both directions; whoever waits here or at the other end hears of it. From any thread."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. Call when no other thread sends or receives."""
        self._connection.close()
        self._link.close()

    def _ended(self, error: EOFError | OSError) -> StreamEnded:
        if isinstance(error, BlockingIOError):
            return StreamEnded(f"nothing came, or was taken, for {self._timeout_s:g} s")
        return StreamEnded("the other end has closed it" if isinstance(error, EOFError) else str(error))
