"""Receives the segments of one source into our pool: directly, or through the staging buffer. One event loop, no torch.

    direct   read into the pool -> check
    staged   for each part: slice -> read -> (on a thread) check, convert into the pool -> slice back; while one part is
             converted the next is read. Where other ranks receive too (rank_receiver.py), parts are dealt in turn

A pool in device memory is read into directly by those alone who reach it; what comes from others is always staged, in
host memory, and goes to the device when it is converted.

A read that failed or was cancelled keeps its slice, and a conversion that has begun ends, until `settled` returns: only
then does nothing write into the pool, nor into a slice that another pull may get.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...proto import kv_pb2
from ..common.errors import ChecksumMismatch, DiptychError, TransportError
from ..kv.bridge import Bridge
from ..kv.device_kv import Staged
from ..kv.memory import KVMemory
from ..kv.segment import CHECKSUM_BYTES, Read, Segment
from ..kv.staging import Slice, Staging
from ..transport.base import KVReader


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Settings of a worker's pulls."""

    wire_dtype: str = ""  # dtype over gRPC with fewer bits than the source's cache; "": unchanged
    verify: bool = False  # compare what arrived with the source's checksums


DEFAULT_PULL_SETTINGS = PullSettings()


class SegmentReceiver:
    """Receives from one source. `memory`: ours, as the bridge knows it."""

    def __init__(self, reader: KVReader, bridge: Bridge, memory: KVMemory, staging: Staging, *, verify: bool) -> None:
        self._reader = reader
        self._bridge = bridge
        self._pool, self._device = memory.region, memory.device
        self._staging = staging
        self._lands_on_device = self._device is not None and reader.lands_on_device
        self._verify = verify
        self._source_layout = bridge.source.to_proto()
        self._next_rank = reader.first_rank  # that receives the next part
        self._converting: set[asyncio.Future[None]] = set()
        self._loose: list[Slice] = []  # bytes may land there yet

    async def receive(self, read: Read) -> None:
        """Read every byte into our pool. Raises TransportError or WorkerLost: from `reader`, or a
        ChecksumMismatch."""
        if self._verify and len(read.segment.checksum) != CHECKSUM_BYTES * len(read.segment.block_ids):
            raise TransportError("the source announced a segment without the requested checksums")
        if self._bridge.is_direct(read) and (self._device is None or self._lands_on_device):
            await self._receive_direct(read)
        else:
            await self._receive_staged(read)

    async def settled(self) -> None:
        """Return once no byte of failed or cancelled calls can arrive any more."""
        if self._converting:
            await asyncio.wait(self._converting)
        await self._reader.settled()
        while self._loose:
            self._staging.give_back(self._loose.pop())

    async def _receive_direct(self, read: Read) -> None:
        await self._reader.read(read.segment.to_proto(), self._bridge.direct(read), self._pool)
        if self._verify:
            _compare(read.segment, await asyncio.to_thread(self._bridge.direct_checksums, read))

    async def _receive_staged(self, read: Read) -> None:
        """Divide the parts among this rank and the others that receive. Returns, or raises, when all have ended."""
        parts = [replace(read, segment=part) for part in self._bridge.parts(read.segment, whole_blocks=self._verify)]
        num_ranks = 1 + (self._reader.num_receivers if self._lands_on_device else 0)
        own, *others = (parts[(rank - self._next_rank) % num_ranks :: num_ranks] for rank in range(num_ranks))
        self._next_rank += len(parts)
        receiving = (self._receive_by(rank, of) for rank, of in enumerate(others, 1) if of)
        results = await asyncio.gather(self.receive_parts(own), *receiving, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if errors:  # of several, one that says that bytes may land yet
            raise max(errors, key=lambda error: isinstance(error, TransportError) and error.may_still_land)

    async def _receive_by(self, rank: int, parts: Sequence[Read]) -> None:
        message = kv_pb2.RankParts(
            layout=self._source_layout,
            num_pool_blocks=self._bridge.num_pool_blocks,
            parts=[part.segment.to_proto() for part in parts],
            table=parts[0].table,
            first_token=parts[0].first_token,
            verify=self._verify,
        )
        await self._reader.receive(rank, message, sum(self._bridge.num_bytes(part.segment) for part in parts))

    async def receive_parts(self, parts: Sequence[Read]) -> None:
        """Read and convert parts, each of which fits the staging buffer. As `receive`."""
        last: asyncio.Future[None] | None = None
        landing = self._staging.on_device if self._lands_on_device else self._staging.region
        assert landing is not None
        try:
            for part in parts:
                slice_ = await self._staging.take(self._bridge.num_bytes(part.segment))
                try:
                    copies = self._bridge.staged(part.segment, slice_.start)
                    await self._reader.read(part.segment.to_proto(), copies, landing)
                except BaseException:
                    self._loose.append(slice_)
                    raise
                before, last = last, self._start_conversion(part, slice_)
                if before is not None:
                    await asyncio.shield(before)
            if last is not None:
                await asyncio.shield(last)
        except DiptychError:
            if self._converting:
                await asyncio.wait(self._converting)  # so that from here on nothing writes into the pool
            raise

    def _start_conversion(self, part: Read, slice_: Slice) -> "asyncio.Future[None]":
        staged = Staged(part.segment, slice_.start, self._bridge.num_bytes(part.segment), self._lands_on_device)
        conversion = asyncio.get_running_loop().run_in_executor(None, self._convert, staged, part)
        self._converting.add(conversion)

        def end(conversion: "asyncio.Future[None]") -> None:
            self._converting.discard(conversion)
            self._staging.give_back(slice_)
            if not conversion.cancelled():
                conversion.exception()  # a waiter raises it; after a failure there is no waiter

        conversion.add_done_callback(end)
        return conversion

    def _convert(self, staged: Staged, read: Read) -> None:
        """Convert a part into our pool; called on a thread."""
        if self._verify:
            _compare(staged.part, self._bridge.staged_checksums(self._bytes_of(staged), staged.part))
        if self._device is not None:
            self._device.convert(self._bridge, staged, read.table, read.first_token)
        else:
            self._bridge.convert(self._bytes_of(staged), staged.part, read.table, read.first_token)

    def _bytes_of(self, staged: Staged) -> memoryview:
        if staged.is_on_device and self._device is not None:
            return self._device.fetch(staged)
        return self._staging.view[staged.start : staged.start + staged.num_bytes]


def _compare(segment: Segment, found: bytes) -> None:
    for i, block in enumerate(segment.block_ids):
        place = slice(i * CHECKSUM_BYTES, (i + 1) * CHECKSUM_BYTES)
        if found[place] != segment.checksum[place]:
            last = segment.first_layer + segment.num_layers - 1
            raise ChecksumMismatch(
                f"block {block} (position {segment.first_block + i}, layers {segment.first_layer}..{last}) arrived "
                "with bytes that differ from the source's: the pulled KV is discarded"
            )
