"""What every transport does, over real sockets and two pools of memory in one process."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc
from diptych.workers.common.channel import open_channel
from diptych.workers.common.errors import TransportError, WorkerLost
from diptych.workers.kv.layout import Copies, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport.base import KVReader, Source, Transport
from diptych.workers.transport.grpc import GrpcTransport
from diptych.workers.transport.loopback import LoopbackTransport
from diptych.workers.transport.machine import this_machine
from diptych.workers.transport.nixl import NixlTransport
from diptych.workers.transport.shared_memory import SharedMemoryTransport

from ...support.handoff_pair import LARGE, SMALL, Served, make_memory, piece, serve

NAMES = ["loopback", "grpc", "nixl", "shared_memory"]
POISON = 0xA5


@dataclass
class Pair:
    name: str
    layout: KVLayout
    served: Served
    ours: KVMemory
    near: Transport
    far: Transport
    registry: dict[str, KVMemory]
    source: Source
    reader: KVReader

    def segment(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int = 3) -> kv_pb2.Segment:
        """Blocks of the announced segment: position i is block order[i]."""
        first = self.order.index(blocks[0])
        assert list(blocks) == self.order[first : first + len(blocks)]
        return kv_pb2.Segment(
            first_block=first,
            block_ids=blocks,
            generations=[1] * len(blocks),
            first_layer=first_layer,
            num_layers=num_layers,
        )

    order: list[int]

    async def read(self, segment: kv_pb2.Segment, ours: Sequence[int]) -> int:
        """Into blocks `ours`; returns bytes."""
        layers = segment.first_layer, segment.num_layers
        copies = Copies.of(self.served.memory.runs(segment.block_ids, *layers), self.ours.runs(ours, *layers))
        await self.reader.read(segment, copies, self.ours.region)
        return copies.num_bytes

    def poison(self) -> None:
        assert self.ours.region.view is not None
        self.ours.region.view[:] = bytes([POISON]) * self.ours.region.num_bytes

    def check(self, theirs: Sequence[int], ours: Sequence[int], first_layer: int = 0, num_layers: int = 3) -> None:
        """These parts have arrived, and nothing else was touched."""
        assert self.ours.region.view is not None
        expected = bytearray([POISON]) * self.ours.region.num_bytes
        for a, b in zip(theirs, ours, strict=True):
            at = int(self.ours.runs([b], first_layer, num_layers).offsets[0])
            content = piece(self.served.memory, a, first_layer, num_layers)
            expected[at : at + len(content)] = content
        assert self.ours.region.view == expected


def make(name: str, memory: KVMemory, registry: dict[str, KVMemory]) -> Transport:
    if name == "nixl":
        return NixlTransport([memory.region])
    if name == "shared_memory":
        return SharedMemoryTransport(memory.region)
    return GrpcTransport() if name == "grpc" else LoopbackTransport(registry)


@asynccontextmanager
async def pair(name: str, layout: KVLayout = SMALL, num_blocks: int = 16) -> AsyncIterator[Pair]:
    """A source that announced all its blocks in some order, and a reader of it."""
    theirs, ours = make_memory(layout, num_blocks, seed=3, in_file=True), make_memory(layout, num_blocks)
    registry: dict[str, KVMemory] = {}
    far, near = make(name, theirs, registry), make(name, ours, registry)
    order = [*range(num_blocks // 2, num_blocks), *range(num_blocks // 2)]
    try:
        async with serve(layout, transports={name: far}, memory=theirs) as served:
            registry[served.incarnation] = theirs
            served.source.offer("h", num_blocks * layout.block_size)
            served.announce(order)
            async with open_channel(served.address) as channel:
                stub = kv_pb2_grpc.KVHandoffStub(channel)
                call = stub.Subscribe(
                    kv_pb2.SubscribeRequest(
                        handoff_id="h",
                        source_incarnation=served.incarnation,
                        sink_incarnation="sink/1",
                        layout=layout.to_proto(),
                        transports=[name],
                        machine=this_machine(),
                    )
                )
                opened = (await call.read()).opened
                assert opened.transport == name
                source = Source("h", "sink/1", opened, stub)
                reader = await near.connect(source)
                it = Pair(name, layout, served, ours, near, far, registry, source, reader, order)
                it.poison()
                yield it
                call.cancel()
    finally:
        await near.close()
        await far.close()


@pytest.mark.parametrize("name", NAMES)
async def test_contents_are_exact_whatever_the_blocks(name: str) -> None:
    async with pair(name) as it:
        for theirs, ours in [([8], [3]), ([9, 10, 11], [9, 10, 11]), ([14, 15, 0, 1], [7, 6, 0, 15])]:
            it.poison()
            assert await it.read(it.segment(theirs), ours) == len(ours) * SMALL.block_bytes
            it.check(theirs, ours)


@pytest.mark.parametrize("name", NAMES)
async def test_layers_come_alone(name: str) -> None:
    async with pair(name) as it:
        for layers in [(0, 1), (1, 2), (2, 1)]:
            it.poison()
            num_bytes = await it.read(it.segment([8, 9, 10], *layers), [1, 0, 5])
            assert num_bytes == 3 * layers[1] * SMALL.layer_bytes
            it.check([8, 9, 10], [1, 0, 5], *layers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shuffled", [False, True])
async def test_many_blocks_come_in_several_pieces(name: str, shuffled: bool) -> None:
    async with pair(name, LARGE, num_blocks=256) as it:  # 24 MiB
        ours = list(range(256))
        if shuffled:
            random.Random(5).shuffle(ours)
        assert await it.read(it.segment(it.order), ours) == it.ours.region.num_bytes
        it.check(it.order, ours)


@pytest.mark.parametrize("name", NAMES)
async def test_reads_run_at_once(name: str) -> None:
    async with pair(name, num_blocks=64) as it:
        chunks = [it.order[start : start + 4] for start in range(0, 64, 4)]
        await asyncio.gather(*(it.read(it.segment(c), c) for c in chunks))
        it.check(it.order, it.order)


@pytest.mark.parametrize("name", NAMES)
async def test_a_block_that_the_source_does_not_have_is_an_error(name: str) -> None:
    async with pair(name) as it:
        bad = kv_pb2.Segment(first_block=0, block_ids=[16], generations=[1], first_layer=0, num_layers=3)
        with pytest.raises(TransportError) as caught:
            await it.read(bad, [0])
        assert not caught.value.may_still_land
        it.check([], [])
        await it.read(it.segment([8]), [0])
        it.check([8], [0])


# NIXL and shared memory read memory, no agent: their source is dead when its process is, in
# tests/e2e/test_handoff_processes.py.
@pytest.mark.parametrize("name", ["loopback", "grpc"])
async def test_a_dead_source_is_an_error_and_nothing_lands_later(name: str) -> None:
    async with pair(name) as it:
        await it.read(it.segment([8]), [0])
        it.registry.clear()
        await it.served.stop()
        await it.far.close()
        it.poison()
        with pytest.raises((TransportError, WorkerLost)):
            await it.read(it.segment([9, 10]), [1, 2])
        await it.reader.settled()
        it.check([], [])


@pytest.mark.parametrize("name", NAMES)
async def test_a_cancelled_read_settles(name: str) -> None:
    async with pair(name, LARGE, num_blocks=96) as it:
        read = asyncio.create_task(it.read(it.segment(it.order), list(range(96))))
        await asyncio.sleep(0)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        await it.reader.settled()
        it.poison()
        await it.read(it.segment([50]), [50])
        it.check([50], [50])


@pytest.mark.parametrize("name", NAMES)
async def test_a_source_forgotten_by_mistake_is_found_again(name: str) -> None:
    async with pair(name) as it:
        it.near.forget(it.served.incarnation)
        it.reader = await it.near.connect(it.source)
        await it.read(it.segment([8]), [0])
        it.check([8], [0])
