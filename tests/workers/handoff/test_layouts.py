"""Pulls between unlike pools over every transport: the KV is the same, token by token; checksums; a narrower wire."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import ChecksumMismatch, LayoutMismatch, TransportError
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.segment_receiver import PullSettings
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.kv.bridge import PART_BYTES
from diptych.workers.kv.layout import LAYER_MAJOR, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.staging import GRAIN_BYTES, Staging
from diptych.workers.transport.base import KVReader, Source, Transport
from diptych.workers.transport.grpc import GrpcTransport
from diptych.workers.transport.loopback import LoopbackTransport
from diptych.workers.transport.nixl import NixlTransport
from diptych.workers.transport.shared_memory import SharedMemoryTransport

from ...support.handoff_pair import (
    SinkEngine,
    failure,
    make_memory,
    receive,
    seal_event,
    serve,
    start,
    until_quiet,
)

THEIRS = KVLayout("float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=8, model_id="m", tensor_parallel=2)
NUM_TOKENS = 70
BLOCKS = (6, 7, 1, 4, 3)  # of the source
PAIRS = {
    "equal": THEIRS,
    "smaller blocks": replace(THEIRS, block_size=4),
    "larger blocks, layer-major": replace(THEIRS, block_size=64, axis_order=LAYER_MAJOR),
    "layer-major": replace(THEIRS, axis_order=LAYER_MAJOR),
    "bfloat16": replace(THEIRS, dtype="bfloat16"),
    "one rank": replace(THEIRS, tensor_parallel=1),
    "replicated heads": replace(THEIRS, tensor_parallel=8, block_size=8),
}
_UNLIKE = replace(THEIRS, layer_shapes=((4, 8), (1, 24), (4, 8)))  # two ranks have the middle layer's only head
UNLIKE = {
    "equal": _UNLIKE,
    "layer-major, one rank": replace(_UNLIKE, axis_order=LAYER_MAJOR, tensor_parallel=1),
    "smaller blocks, four ranks": replace(_UNLIKE, block_size=4, tensor_parallel=4),
}


def fill(memory: KVMemory) -> None:
    """Numbers that bfloat16 can represent; each identifies its position."""
    assert memory.region.view is not None
    numbers = np.frombuffer(memory.region.view, np.float32)
    numbers[:] = np.arange(len(numbers)) % 251


def tokens(memory: KVMemory, table: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> np.ndarray:
    """[token, numbers] float32, layer by layer, by the first rank that has a head."""
    layout, view, positions = memory.layout, memory.region.view, np.arange(num_tokens)
    assert view is not None
    numbers = np.frombuffer(view, np.float32 if layout.dtype == "float32" else np.uint16)
    if layout.dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    ranks, size = numbers.reshape(layout.tensor_parallel, -1), layout.block_size
    shapes = [layout.shape_of(layer) for layer in range(layout.num_layers)]
    inner = [(2, size, max(heads // layout.tensor_parallel, 1), dim) for heads, dim in shapes]
    ends = np.cumsum([np.prod(of) for of in inner])  # of each layer, in a block
    blocks, slots = np.array(table)[positions // size], positions % size
    found: list[np.ndarray] = []
    for (heads, _), of, end in zip(shapes, inner, ends.tolist(), strict=True):
        first = end - int(np.prod(of))
        if layout.axis_order == LAYER_MAJOR:
            pool = ranks[:, first * memory.num_blocks : end * memory.num_blocks]
        else:
            pool = ranks.reshape(layout.tensor_parallel, memory.num_blocks, -1)[:, :, first:end]
        pool = pool.reshape(layout.tensor_parallel, memory.num_blocks, *of)
        distinct = range(0, layout.tensor_parallel, max(layout.tensor_parallel // heads, 1))
        rows = [pool[rank, blocks, :, slots] for rank in distinct]  # of each [token, kv, head, dim]
        found.append(np.concatenate(rows, axis=2).reshape(num_tokens, -1))
    return np.concatenate(found, axis=1)


def ends(
    kind: str, memory: KVMemory, staging: Staging, theirs: KVMemory
) -> tuple[dict[str, Transport], dict[str, Transport]]:
    """The source's transports, and the sink's."""
    if kind == "nixl":
        return {"nixl": NixlTransport([theirs.region])}, {"nixl": NixlTransport([memory.region, staging.region])}
    if kind == "shared_memory":
        far, near = SharedMemoryTransport(theirs.region), SharedMemoryTransport(memory.region)
        return {"shared_memory": far}, {"shared_memory": near}
    if kind == "loopback":
        registry = {"source-incarnation": theirs}
        return {"loopback": LoopbackTransport(registry)}, {"loopback": LoopbackTransport(registry)}
    return {"grpc": GrpcTransport()}, {"grpc": GrpcTransport()}


async def hand_over(
    ours: KVMemory,
    *,
    kind: str = "grpc",
    settings: PullSettings | None = None,
    source: type[HandoffSource] = HandoffSource,
    spoil: Callable[[KVMemory], None] | None = None,
    layout: KVLayout = THEIRS,
) -> tuple[PullResult | TransportError, KVMemory, Staging, SinkEngine]:
    """In two segments; `spoil` changes the source's pool once its content is named. layout: the source's."""
    theirs, staging = make_memory(layout, 8, in_file=True), Staging(1 << 20)
    fill(theirs)
    table = tuple(range(ours.num_blocks - 1, ours.num_blocks - 1 - ours.layout.num_blocks_for(NUM_TOKENS), -1))
    engine = SinkEngine(table=table)
    far, near = ends(kind, ours, staging, theirs)
    async with (
        serve(memory=theirs, transports=far, kind=source) as served,
        receive(engine, memory=ours, transports=near, settings=settings or PullSettings(), staging=staging) as (
            sink,
            _,
        ),
    ):
        served.source.offer("h", NUM_TOKENS)
        served.announce(BLOCKS[:3], layout=THEIRS)
        pull = start(sink, served)
        await engine.until("reserve")
        if spoil is not None:
            spoil(theirs)
        served.announce(BLOCKS[3:], 3, layout=THEIRS)
        served.source.on_event(seal_event("h", NUM_TOKENS, [7]))
        try:
            result = await pull
        except TransportError as e:
            result = e
        await until_quiet(sink)
        assert sink.num_checksum_failures == isinstance(result, ChecksumMismatch)
    for transport in {*far.values(), *near.values()}:
        await transport.close()
    assert staging.num_free == staging.region.num_bytes
    return result, theirs, staging, engine  # type: ignore[return-value]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["grpc", "nixl", "shared_memory", "loopback"])
async def test_tokens_arrive_whatever_the_layout(kind: str, pair: str, verify: bool) -> None:
    ours = make_memory(PAIRS[pair], 20)
    result, theirs, _, engine = await hand_over(ours, kind=kind, settings=PullSettings(verify=verify))
    assert isinstance(result, PullResult) and result.transport == kind
    assert np.array_equal(tokens(ours, engine.table), tokens(theirs, BLOCKS))


@pytest.mark.parametrize("pair", UNLIKE)
@pytest.mark.parametrize(("kind", "wire"), [("grpc", ""), ("nixl", ""), ("shared_memory", ""), ("grpc", "int8")])
async def test_tokens_arrive_where_layers_are_unlike(kind: str, wire: str, pair: str) -> None:
    ours, settings = make_memory(UNLIKE[pair], 20), PullSettings(wire, verify=True)
    result, theirs, _, engine = await hand_over(ours, kind=kind, settings=settings, layout=UNLIKE["equal"])
    assert isinstance(result, PullResult) and result.transport == kind
    exact, found = tokens(theirs, BLOCKS), tokens(ours, engine.table)
    assert exact.shape == (NUM_TOKENS, 2 * (4 * 8 + 24 + 4 * 8))
    assert np.linalg.norm(found - exact) <= (0.01 if wire else 0) * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("wire", "share"), [("bfloat16", 0.5), ("int8", (8 + 2) / 32), ("fp8", (8 + 2) / 32), ("int4", (4 + 2) / 32)]
)
@pytest.mark.parametrize("verify", [False, True])
async def test_a_narrower_wire_carries_less_and_nearly_the_same(wire: str, share: float, verify: bool) -> None:
    ours = make_memory(THEIRS, 8)
    result, theirs, _, engine = await hand_over(ours, settings=PullSettings(wire, verify))
    assert isinstance(result, PullResult)
    assert result.num_bytes == share * len(BLOCKS) * THEIRS.block_bytes
    exact, found = tokens(theirs, BLOCKS), tokens(ours, engine.table)
    assert np.linalg.norm(found - exact) <= {"fp8": 0.03, "int4": 0.15}.get(wire, 0.01) * np.linalg.norm(exact)


@pytest.mark.parametrize(("num_tokens", "num_read"), [(96, 3), (70, 2), (31, 0)])
async def test_a_sink_of_full_blocks_alone_gets_no_others(num_tokens: int, num_read: int) -> None:
    """From a source of full width, which offers its last block, too: the sink computes these tokens again."""
    layout = replace(THEIRS, block_size=32, head_dim=32)
    async with (
        serve(layout) as served,
        receive(SinkEngine(), replace(layout, dtype="kivi"), settings=PullSettings(verify=True)) as (sink, _),
    ):
        served.source.offer("h", num_tokens)
        served.announce(BLOCKS[: layout.num_blocks_for(num_tokens)], layout=layout)
        served.source.on_event(seal_event("h", num_tokens, [7]))
        result = await start(sink, served)
    assert isinstance(result, PullResult) and result.num_bytes == num_read * layout.block_bytes


@pytest.mark.parametrize("transports", [{"nixl"}, {"loopback", "nixl"}])
async def test_a_narrower_wire_needs_grpc_on_both_sides(transports: set[str]) -> None:
    both: dict[str, Transport] = {name: LoopbackTransport({}) for name in transports}
    async with (
        serve(transports=both | {"grpc": GrpcTransport()}) as served,
        receive(SinkEngine(), transports=both, settings=PullSettings("int8")) as (sink, _),
    ):
        served.hand_off()
        error = await failure(start(sink, served))
        assert isinstance(error, TransportError) and "only gRPC can convert" in error.message


async def test_a_wire_dtype_that_nobody_knows_is_refused() -> None:
    async with serve() as served, receive(SinkEngine(), settings=PullSettings("int3")) as (sink, _):
        served.hand_off()
        error = await failure(start(sink, served))
        assert isinstance(error, LayoutMismatch) and "'int3' is unknown" in error.message


class Forgetful(HandoffSource):
    """Names the content, then lets it change."""

    def _checksums(self, segment: kv_pb2.Segment, wire: str) -> bytes:
        named = super()._checksums(segment, wire)
        assert self._memory.region.view is not None
        place = int(self._memory.runs([segment.block_ids[1]], 1, 1).offsets[-1])
        self._memory.region.view[place] ^= 1
        return named


@pytest.mark.parametrize("wire", ["", "int8"])
@pytest.mark.parametrize("pair", ["equal", "smaller blocks"])
async def test_other_bytes_than_were_named_fail_the_pull_and_are_counted(pair: str, wire: str) -> None:
    ours = make_memory(PAIRS[pair], 20)
    settings = PullSettings(wire, verify=True)
    result, _, _, engine = await hand_over(ours, settings=settings, source=Loud if wire else Forgetful)
    assert isinstance(result, ChecksumMismatch)
    assert "block 7 (position 1, layers 0..2)" in result.message or "block 3 (position 4" in result.message
    assert [call for call in engine.calls if call[0] == "commit"] == []  # type: ignore[index]


class Loud(Forgetful):
    """So much that int8 shows it."""

    def _checksums(self, segment: kv_pb2.Segment, wire: str) -> bytes:
        named = HandoffSource._checksums(self, segment, wire)
        assert self._memory.region.view is not None
        runs = self._memory.runs([segment.block_ids[1]], 1, 1)
        start, length = int(runs.offsets[-1]), int(runs.lengths[-1])
        self._memory.region.view[start : start + length] = bytes(length)
        return named


class Silent(HandoffSource):
    def _checksums(self, segment: kv_pb2.Segment, wire: str) -> bytes:
        return b""


async def test_a_source_that_names_nothing_is_not_believed() -> None:
    ours = make_memory(THEIRS, 8)
    result, _, _, _ = await hand_over(ours, settings=PullSettings(verify=True), source=Silent)
    assert isinstance(result, TransportError) and "without the requested checksums" in result.message


class Stuck(Transport):
    """Reads into the staging buffer that may land until it is quiet."""

    name = "grpc"

    def __init__(self) -> None:
        self.is_reading, self.is_quiet = asyncio.Event(), asyncio.Event()

    async def connect(self, source: Source) -> KVReader:
        return StuckReader(self)


class StuckReader(KVReader):
    def __init__(self, transport: Stuck) -> None:
        self._transport = transport

    async def read(self, segment: kv_pb2.Segment, copies: object, into: object) -> None:
        self._transport.is_reading.set()
        await asyncio.Event().wait()

    async def settled(self) -> None:
        await self._transport.is_quiet.wait()


async def test_a_slice_comes_back_only_when_nothing_can_land_in_it() -> None:
    stuck, staging, engine = Stuck(), Staging(1 << 20), SinkEngine(table=tuple(range(18)))
    ours = make_memory(PAIRS["smaller blocks"], 20)
    theirs = make_memory(THEIRS, 8)
    async with (
        serve(memory=theirs) as served,
        receive(engine, memory=ours, transports={"grpc": stuck}, staging=staging) as (sink, _),
    ):
        served.hand_off(BLOCKS, NUM_TOKENS)
        pull = start(sink, served)
        await stuck.is_reading.wait()
        pull.cancel()
        await engine.until("fail")
        assert ("fail", "k", True) in engine.calls
        assert staging.num_free < staging.region.num_bytes
        stuck.is_quiet.set()
        await until_quiet(sink)
        assert ("settle", "k") in engine.calls
        assert staging.num_free == staging.region.num_bytes


async def test_slices_are_handed_out_in_turn() -> None:
    staging = Staging(4 * GRAIN_BYTES)
    first, second = await staging.take(1), await staging.take(2 * GRAIN_BYTES)
    large = asyncio.create_task(staging.take(3 * GRAIN_BYTES))
    small = asyncio.create_task(staging.take(1))
    gone = asyncio.create_task(staging.take(1))
    await asyncio.sleep(0)
    assert not large.done() and not small.done(), "a small one does not overtake"
    gone.cancel()
    staging.give_back(first)
    staging.give_back(second)
    slices = await large, await small
    assert [s.num_bytes for s in slices] == [3 * GRAIN_BYTES, GRAIN_BYTES] and staging.num_free == 0
    for piece in slices:
        staging.give_back(piece)
    assert (await staging.take(4 * GRAIN_BYTES)).start == 0
    with pytest.raises(TransportError, match="lower the source's block_size"):
        await staging.take(4 * GRAIN_BYTES + 1)
    assert Staging().region.num_bytes >= PART_BYTES
