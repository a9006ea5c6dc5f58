"""Serves a machine's part of a worker's KV pool to rank 0 on another machine, as machine_link.py asks. It runs in the
process of the machine's first rank.

    receive a command ─ check all that it says ─ do it ─ answer, or say the error by name ─ the next

What a command says is used once it is checked: an error leaves the pool as it is, and the connection in order.
"""

import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from ...proto import kv_pb2
from ..common.errors import DiptychError, TransportError
from ..kv.bridge import Bridge
from ..kv.device_kv import Staged
from ..kv.layout import KVLayout, Runs
from ..kv.memory import KVMemory
from ..kv.segment import Segment
from ..kv.staging import STAGING_BYTES
from ..transport.runs import gather
from .machine_link import OFFSET, READ_BYTES
from .machine_stream import MachineStream, StreamEnded

NUM_BRIDGES = 16  # that are kept, by the source's layout
MOST_POSITIONS = 1 << 32  # of a sequence's table
GATHERED_BYTES = 1 << 18  # copied and sent at once

log = logging.getLogger("diptych.handoff")


def serve_machine_kv(
    link: socket.socket, memory: KVMemory, copy_blocks: Callable[[Sequence[tuple[int, int]]], object]
) -> None:
    """Serve the commands of rank 0's MachineLink until its end of `link` closes; takes that over. memory: this
    machine's part of the pool; nobody else uses the staging buffers of its device, where it has one. copy_blocks:
    copies within it, as KVCache.copy_blocks does."""
    with closing(MachineStream(link)) as stream:
        _MachineServer(stream, memory, copy_blocks).run()


class _Payload(NamedTuple):
    num_bytes: int
    pieces: Iterable[bytes]


_NOTHING = _Payload(0, ())


class _MachineServer:
    def __init__(
        self,
        stream: MachineStream,
        memory: KVMemory,
        copy_blocks: Callable[[Sequence[tuple[int, int]]], object],
    ) -> None:
        self._stream, self._memory, self._copy_blocks = stream, memory, copy_blocks
        self._bridge = lru_cache(NUM_BRIDGES)(partial(Bridge, memory))
        self._left_bytes = 0  # of the command's payload, that are not received yet
        self._buffer = memoryview(b"")  # of parts to convert; without a device, grown as needed
        self._most_bytes = STAGING_BYTES  # that it may have
        if memory.device is not None:
            self._buffer = memory.device.staging.view
            self._most_bytes = len(self._buffer)

    def run(self) -> None:
        try:
            while True:
                self._answer(self._stream.receive())
        except StreamEnded as e:
            log.debug("rank 0 has closed the connection to the KV of this machine: %s", e)

    def _answer(self, message: bytes) -> None:
        answer, payload = kv_pb2.MachineAnswer(), _NOTHING
        try:
            command = kv_pb2.MachineCommand.FromString(message)
            answer.number, self._left_bytes = command.number, command.payload_bytes
            payload = self._carried_out(command)
        except StreamEnded:
            raise
        except Exception as e:  # the top loop of this thread: rank 0 is told, and may ask for something else
            if not isinstance(e, DiptychError | DecodeError):
                log.exception("a command of rank 0 for the KV of this machine failed by our own fault")
            answer.error, answer.kind = str(e) or repr(e), type(e).__name__
        self._stream.drain(self._left_bytes)
        self._left_bytes = 0
        answer.payload_bytes = payload.num_bytes
        self._stream.send(answer.SerializeToString(), payload.pieces)

    def _carried_out(self, command: kv_pb2.MachineCommand) -> _Payload:
        """Do what a command says. Returns the payload of the answer."""
        match command.WhichOneof("command"):
            case "read":
                return self._read(command.read)
            case "convert":
                self._convert(command.convert)
            case "copy":
                self._copy(command.copy)
            case _:
                raise TransportError("the command is unknown: all ranks must run one version of Diptych")
        return _NOTHING

    def _read(self, asked: kv_pb2.PartRuns) -> _Payload:
        sizes = len(asked.offsets), len(asked.lengths)
        if sizes[0] != sizes[1] or sizes[0] % OFFSET.itemsize:
            raise TransportError(f"{sizes[0]:,} bytes of offsets and {sizes[1]:,} of lengths are no runs")
        runs = Runs(*(np.frombuffer(of, OFFSET) for of in (asked.offsets, asked.lengths)))
        most = self._memory.region.num_bytes
        are_within = (runs.lengths > 0) & (runs.lengths <= READ_BYTES) & (runs.offsets >= 0)
        if not (are_within & (runs.offsets <= most - runs.lengths)).all() or runs.num_bytes > READ_BYTES:
            raise TransportError(
                f"runs are not within the {most:,} bytes of this machine's KV, or have more than {READ_BYTES:,}"
            )
        if self._memory.device is not None:
            return _Payload(runs.num_bytes, [self._memory.device.read(runs)])
        assert self._memory.region.view is not None
        return _Payload(runs.num_bytes, gather(self._memory.region.view, runs, GATHERED_BYTES))

    def _convert(self, asked: kv_pb2.StagedPart) -> None:
        bridge = self._bridge(KVLayout.from_proto(asked.layout), asked.num_pool_blocks, asked.wire_dtype)
        part = Segment.from_proto(asked.part, asked.num_pool_blocks)
        if not part.is_well_formed(MOST_POSITIONS, bridge.num_layers):
            raise TransportError("a part of a segment is malformed")
        num_blocks, table = self._memory.num_blocks, tuple(asked.table)
        if len(table) > num_blocks or max(table, default=0) >= num_blocks:
            raise TransportError(f"a table has blocks beyond the {num_blocks:,} of the pool, or some twice")
        num_bytes, used = bridge.num_bytes(part), [of.used for of in bridge.used_slices_of(part)]
        due = sum(place.stop - place.start for place in used)
        if num_bytes > self._most_bytes or due != self._left_bytes:
            raise TransportError(
                f"{self._left_bytes:,} bytes came of a part of {num_bytes:,}, of which {due:,} were due and at most "
                f"{self._most_bytes:,} fit"
            )
        if len(self._buffer) < num_bytes:
            self._buffer = memoryview(bytearray(num_bytes))
        for place in used:
            self._stream.receive_into(self._buffer[place])
            self._left_bytes -= place.stop - place.start
        if self._memory.device is not None:
            staged = Staged(part, 0, num_bytes, is_on_device=False)
            self._memory.device.convert(bridge, staged, table, asked.first_token)
        else:
            bridge.convert(self._buffer[:num_bytes], part, table, asked.first_token)

    def _copy(self, asked: kv_pb2.BlockCopies) -> None:
        sources, targets = list(asked.sources), list(asked.targets)
        written = set(targets)
        if len(sources) != len(targets) or len(written) != len(targets) or not written.isdisjoint(sources):
            raise TransportError("blocks to copy are not in pairs, or some are written twice, or read and written")
        if max([0, *sources, *targets]) >= self._memory.num_blocks:
            raise TransportError(f"blocks to copy are beyond the {self._memory.num_blocks:,} of the pool")
        self._copy_blocks(list(zip(sources, targets, strict=True)))
