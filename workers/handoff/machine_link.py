"""Rank 0's end of the connection to another machine of its worker, whose part of the KV pool it reads and writes so.

    rank 0    MachineLink ──commands, parts of segments──> first rank of the machine    machine_server.py
                          <──answers, bytes of the pool──

A command is answered when all of it is done. A link that fails stays lost, and with it that part of the pool; what it
was asked for may still be going on there. Then the worker must end, so that no block is used again: see `lost`.
"""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np
from google.protobuf.message import DecodeError

from ...proto import kv_pb2
from ..common.errors import ERRORS, TransportError
from ..kv.layout import Runs
from ..parallel.groups import STALL
from ..transport.runs import in_parts
from .machine_stream import MachineStream, StreamEnded

READ_BYTES = 4 << 20  # that a command asks for at most
OFFSET = np.dtype("<i8")  # of its runs


class MachineLink:
    """Every method may be called on any thread; one command is under way at a time."""

    def __init__(self, link: socket.socket, ranks: range, timeout_s: float = STALL.total_seconds()) -> None:
        """`link`: to the `serve_machine_kv` of the first of `ranks`, which are those of its machine. Takes it over.
        timeout_s: for which nothing may come of an answer."""
        self.ranks = ranks
        self.lost: Future[TransportError] = Future()  # why no command is answered any more, unless `close` was called
        self._stream = MachineStream(link, timeout_s)
        self._lock = threading.RLock()  # whoever waits for `lost` may call `close` at once
        self._error = ""  # why it cannot be used
        self._num_commands = 0

    def read(self, runs: Runs) -> bytes:
        """A copy of these runs of the machine's part of the pool, one after the other. Raises TransportError."""
        found = [self._read(part) for part in in_parts(runs, READ_BYTES)]
        return found[0] if len(found) == 1 else b"".join(found)

    def convert(self, part: kv_pb2.StagedPart, payload: Sequence[memoryview]) -> None:
        """Write a part of a segment into the machine's part of the pool. payload: of its bytes those that
        `Bridge.used_slices_of` names there. Raises TransportError."""
        self._ask(kv_pb2.MachineCommand(convert=part), payload)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within the machine's part of the pool, as KVCache.copy_blocks does. Raises TransportError."""
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        self._ask(kv_pb2.MachineCommand(copy=kv_pb2.BlockCopies(sources=sources, targets=targets)))

    def close(self) -> None:
        """End the connection, and with it what is under way. Idempotent."""
        self.lost.cancel()
        self._stream.interrupt()
        with self._lock:
            self._end("it was closed")

    def _read(self, runs: Runs) -> bytes:
        offsets, lengths = (of.astype(OFFSET).tobytes() for of in (runs.offsets, runs.lengths))
        command = kv_pb2.MachineCommand(read=kv_pb2.PartRuns(offsets=offsets, lengths=lengths))
        return self._ask(command, num_bytes=runs.num_bytes)

    def _ask(self, command: kv_pb2.MachineCommand, payload: Sequence[memoryview] = (), num_bytes: int = 0) -> bytes:
        """Send a command and receive its answer, whose payload has `num_bytes`."""
        with self._lock:
            if self._error:
                raise TransportError(self._error)
            self._num_commands += 1
            command.number = self._num_commands
            command.payload_bytes = sum(len(piece) for piece in payload)
            try:
                self._stream.send(command.SerializeToString(), payload)
                answer = kv_pb2.MachineAnswer.FromString(self._stream.receive())
                due = 0 if answer.error else num_bytes
                if (answer.number, answer.payload_bytes) != (command.number, due):
                    raise StreamEnded("an answer came that nobody asked for")
                found = self._stream.receive_bytes(due)
            except (StreamEnded, DecodeError) as e:
                raise self._end(str(e)) from e
        if answer.error:
            kind = ERRORS.get(answer.kind, TransportError)
            made = kind if issubclass(kind, TransportError) else TransportError
            raise made(f"rank {self.ranks.start}, on another machine: {answer.error}")
        return found

    def _end(self, cause: str) -> TransportError:
        """Close the connection. Returns the error to raise."""
        self._error = f"the connection to the KV of rank {self.ranks.start}, on another machine, is lost: {cause}"
        self._stream.close()
        with suppress(InvalidStateError):
            self.lost.set_result(TransportError(self._error))
        return TransportError(self._error)
