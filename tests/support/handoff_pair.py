"""A source and sinks of hand-offs in one process, over real sockets: memory to read, and engines that only note."""

import asyncio
import ctypes
import mmap
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from diptych.proto import kv_pb2_grpc, worker_pb2
from diptych.workers.common.channel import bind, make_server
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.timings import PullTimes
from diptych.workers.handoff.ports import EngineCommands
from diptych.workers.handoff.segment_receiver import DEFAULT_PULL_SETTINGS, PullSettings
from diptych.workers.handoff.sink import HandoffSink
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.handoff.types import HandoffSealed, Reservation, Seal, SegmentReady
from diptych.workers.kv.layout import KVLayout, Region, Runs
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.pool_file import PoolFile
from diptych.workers.kv.segment import Segment
from diptych.workers.kv.staging import Staging
from diptych.workers.transport.base import Transport
from diptych.workers.transport.grpc import GrpcTransport
from diptych.workers.transport.runs import gather

SMALL = KVLayout("float32", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, model_id="m")
LARGE = KVLayout("float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=64, model_id="m")
TIMEOUT_S = 20.0
# What a SinkEngine notes of `Served.hand_off`, pulled as "k".
COMMIT = ("commit", "k", 11, [7])
RESERVE = ("reserve", "k", 11)
BEGIN = ("begin", "k", 11, [7])


def make_memory(
    layout: KVLayout,
    num_blocks: int,
    seed: int | None = None,
    *,
    in_file: bool = False,
    content: bytes = b"",
    ranks: range | None = None,
) -> KVMemory:
    """A pool of random bytes, of `content`, or of zeros; `in_file`: one that others can map; of `ranks` alone."""
    num_ranks = layout.tensor_parallel if ranks is None else len(ranks)
    num_bytes, file = num_blocks * layout.rank_block_bytes * num_ranks, None
    if in_file:
        file = PoolFile.make(num_bytes, small_pages=True)
        assert file is not None
        mapping = file.map(num_bytes)
        file.seal()
    else:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if seed is not None or content:
        mapping[:num_bytes] = content or random.Random(seed).randbytes(num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    region = Region(address, num_bytes, memoryview(mapping)[:num_bytes], file=file)
    return KVMemory(layout, num_blocks, region, ranks=ranks)


def piece(memory: KVMemory, block: int, first_layer: int = 0, num_layers: int = SMALL.num_layers) -> bytes:
    return memory_bytes(memory, memory.runs([block], first_layer, num_layers))


def memory_bytes(memory: KVMemory, runs: Runs) -> bytes:
    assert memory.region.view is not None
    return b"".join(gather(memory.region.view, runs, 1 << 20))


@dataclass
class SourceEngine:
    """The engine and the requests of a HandoffSource: notes which leases ended."""

    ended: list[str] = field(default_factory=list[str])
    num_caught_up: int = 0
    handed_off_keys: list[str | None] = field(default_factory=list[str | None])
    forgotten: list[str] = field(default_factory=list[str])
    reads: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, command: Callable[[EngineCommands], object]) -> None:
        command(self)

    def end_lease(self, handoff_id: str, reads: Sequence[tuple[int, float]] = ()) -> None:
        self.ended.append(handoff_id)
        self.reads += reads
        self.changed.set()

    def caught_up(self, handoff_id: str) -> None:
        self.num_caught_up += 1
        self.changed.set()

    def handed_off(self, sealed: HandoffSealed) -> None:
        self.handed_off_keys.append(sealed.key)

    def forget(self, key: str) -> None:
        self.forgotten.append(key)

    async def until_ended(self, count: int = 1) -> None:
        while len(self.ended) < count:
            self.changed.clear()
            await self.changed.wait()


@dataclass
class SinkEngine:
    """SinkPort that records its calls, and gives blocks `table`."""

    table: tuple[int, ...] = (0, 1, 2)
    num_held: int = 0  # blocks of SMALL
    reserve_error: DiptychError | None = None
    commit_error: DiptychError | None = None
    never_reserves: bool = False
    calls: list[object] = field(default_factory=list[object])
    times: PullTimes | None = None  # of the last commit
    seal: Seal | None = None  # of it
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, call: object) -> None:
        self.calls.append(call)
        self.changed.set()

    async def until(self, name: str) -> None:
        while not any(call[0] == name for call in self.calls):  # type: ignore[index]
            self.changed.clear()
            await self.changed.wait()

    async def reserve(self, key: str, num_tokens: int) -> Reservation:
        self.note(("reserve", key, num_tokens))
        if self.never_reserves:
            await asyncio.Event().wait()
        if self.reserve_error is not None:
            raise self.reserve_error
        return Reservation(self.table, self.num_held * SMALL.block_size)

    def begin(self, key: str, seal: Seal) -> None:
        self.note(("begin", key, seal.num_computed, list(seal.output_token_ids)))

    async def commit(self, key: str, seal: Seal, times: PullTimes) -> None:
        self.times, self.seal = times, seal
        self.note(("commit", key, seal.num_computed, list(seal.output_token_ids)))
        if self.commit_error is not None:
            raise self.commit_error

    async def fail(self, key: str, quarantine: bool) -> None:
        self.note(("fail", key, quarantine))

    async def settle(self, key: str) -> None:
        self.note(("settle", key))


def segment_event(
    handoff_id: str,
    first_block: int,
    blocks: Sequence[int],
    generations: Sequence[int],
    first_layer: int,
    num_layers: int,
) -> SegmentReady:
    return SegmentReady(handoff_id, Segment(first_block, tuple(blocks), tuple(generations), first_layer, num_layers))


def seal_event(
    handoff_id: str,
    num_computed: int,
    output_token_ids: Sequence[int],
    num_draft_computed: int = 0,
    num_inexact: int = 0,
) -> HandoffSealed:
    counts = num_draft_computed, num_inexact
    return HandoffSealed(handoff_id, None, num_computed, tuple(output_token_ids), False, *counts)


@dataclass
class Served:
    """A source worker that listens."""

    source: HandoffSource
    engine: SourceEngine
    memory: KVMemory
    address: str
    incarnation: str
    stop: Callable[[], Awaitable[None]]

    def named(self, handoff_id: str = "h", incarnation: str | None = None) -> worker_pb2.HandoffSource:
        name = self.incarnation if incarnation is None else incarnation
        return worker_pb2.HandoffSource(handoff_id=handoff_id, address=self.address, incarnation=name)

    def announce(self, blocks: Sequence[int], first_block: int = 0, layout: KVLayout = SMALL) -> None:
        """All layers; those of a draft in a segment of their own."""
        for layers in (range(layout.num_target_layers), range(layout.num_target_layers, layout.num_layers)):
            if layers:
                generations = [1] * len(blocks)
                event = segment_event("h", first_block, blocks, generations, layers.start, len(layers))
                self.source.on_event(event)

    def hand_off(self, blocks: Sequence[int] = (5, 6, 2), num_tokens: int = 11) -> None:
        """The whole of a prompt at once, as hand-off "h"."""
        self.source.offer("h", num_tokens)
        self.announce(blocks)
        self.source.on_event(seal_event("h", num_tokens, [7]))


@asynccontextmanager
async def serve(
    layout: KVLayout = SMALL,
    num_blocks: int = 8,
    transports: dict[str, Transport] | None = None,
    *,
    memory: KVMemory | None = None,
    lease_s: float = 10.0,
    kind: type[HandoffSource] = HandoffSource,
) -> AsyncIterator[Served]:
    memory = memory or make_memory(layout, num_blocks, seed=1)
    engine = SourceEngine()
    incarnation = "source-incarnation"
    source = kind(incarnation, memory, transports or {"grpc": GrpcTransport()}, engine, engine, lease_s=lease_s)
    server = make_server(None)
    kv_pb2_grpc.add_KVHandoffServicer_to_server(source, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()

    async def stop() -> None:
        await server.stop(None)

    try:
        yield Served(source, engine, memory, f"127.0.0.1:{port}", incarnation, stop)
    finally:
        await stop()
        await source.close()
        assert source.num_open == 0


@asynccontextmanager
async def receive(
    engine: SinkEngine,
    layout: KVLayout = SMALL,
    num_blocks: int = 8,
    transports: dict[str, Transport] | None = None,
    memory: KVMemory | None = None,
    settings: PullSettings = DEFAULT_PULL_SETTINGS,
    staging: Staging | None = None,
) -> AsyncIterator[tuple[HandoffSink, KVMemory]]:
    memory = memory or make_memory(layout, num_blocks)
    transports = transports or {"grpc": GrpcTransport()}
    sink = HandoffSink("sink-incarnation", memory, transports, engine, settings=settings, staging=staging)
    try:
        yield sink, memory
    finally:
        await sink.close()


async def failure(pull: "asyncio.Future[object]") -> DiptychError:
    with pytest.raises(DiptychError) as caught:
        await pull
    return caught.value


def start(sink: HandoffSink, served: Served, timeout_s: float = 15.0, **named: str) -> "asyncio.Task[object]":
    return asyncio.create_task(sink.pull("k", served.named(**named), timeout_s))


async def until_quiet(sink: HandoffSink) -> None:
    """Wait until nothing of any pull is left to clean up."""
    while sink._pulls:  # pyright: ignore[reportPrivateUsage]
        await asyncio.wait(list(sink._pulls))  # pyright: ignore[reportPrivateUsage]
