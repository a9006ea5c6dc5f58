"""What only NIXL does: endpoints that must be checked, an agent that must be found, a thread that must end."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import TransportError
from diptych.workers.kv.layout import Copies, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport import copy_budget, nixl_thread
from diptych.workers.transport.base import KVReader, Source
from diptych.workers.transport.nixl import NixlTransport
from diptych.workers.transport.nixl_thread import NixlThread

from ...support.handoff_pair import SMALL, make_memory, piece


def source_of(endpoint: kv_pb2.NixlEndpoint) -> Source:
    opened = kv_pb2.Opened(source_incarnation="s", transport="nixl", nixl=endpoint)
    return Source("h", "sink/1", opened, stub=None)  # type: ignore[arg-type]


async def read(
    reader: KVReader, theirs: KVMemory, ours: KVMemory, segment: kv_pb2.Segment, blocks: Sequence[int]
) -> None:
    copies = Copies.of(theirs.runs(segment.block_ids, 0, 3), ours.runs(blocks, 0, 3))
    await reader.read(segment, copies, ours.region)


def garble(endpoint: kv_pb2.NixlEndpoint) -> None:
    endpoint.metadata = bytes(reversed(endpoint.metadata))


def set_field(name: str, value: object) -> Callable[[kv_pb2.NixlEndpoint], None]:
    return lambda endpoint: setattr(endpoint, name, value)


@pytest.mark.parametrize(
    "spoil",
    [
        garble,
        set_field("metadata", b""),
        set_field("metadata", b"x" * (2 << 20)),
        set_field("agent_name", "another"),
        set_field("num_bytes", 0),
        set_field("base_address", (1 << 64) - 1),
        set_field("memory", "FILE"),
    ],
)
async def test_a_bad_endpoint_is_refused_and_a_good_one_then_taken(
    spoil: Callable[[kv_pb2.NixlEndpoint], None],
) -> None:
    theirs, ours = make_memory(SMALL, 4, seed=1), make_memory(SMALL, 4)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region])
    try:
        endpoint = far.endpoint()
        spoil(endpoint)
        with pytest.raises(TransportError):
            await near.connect(source_of(endpoint))
        far.serve(1)
        reader = await near.connect(source_of(far.endpoint()))
        segment = kv_pb2.Segment(first_block=0, block_ids=[2], generations=[1], first_layer=0, num_layers=3)
        await read(reader, theirs, ours, segment, [1])
        size = SMALL.block_bytes
        assert ours.region.view is not None and theirs.region.view is not None
        assert ours.region.view[size : 2 * size] == theirs.region.view[2 * size : 3 * size]
    finally:
        await near.close()
        await far.close()


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 8, 9, 23])
async def test_a_read_ends_only_after_its_last_transfer(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block each, two at a time."""
    monkeypatch.setattr(nixl_thread, "POST_BYTES", SMALL.block_bytes)
    monkeypatch.setattr(nixl_thread, "MAX_POSTED", 2)
    theirs, ours = make_memory(SMALL, num_blocks, seed=1), make_memory(SMALL, num_blocks)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region])
    try:
        far.serve(1)
        reader = await near.connect(source_of(far.endpoint()))
        blocks = range(num_blocks)
        segment = kv_pb2.Segment(block_ids=blocks, generations=[1] * num_blocks, num_layers=3)
        await read(reader, theirs, ours, segment, blocks)
        assert ours.region.view == theirs.region.view
    finally:
        await near.close()
        await far.close()


async def test_its_thread_ends_and_what_comes_later_fails_at_once() -> None:
    ours = make_memory(SMALL, 4)
    transport = NixlTransport([ours.region])
    endpoint = transport.endpoint()
    assert any(thread.name == "diptych-nixl" for thread in threading.enumerate())
    await asyncio.gather(transport.close(), transport.close())
    assert not any(thread.name == "diptych-nixl" for thread in threading.enumerate())
    with pytest.raises(TransportError):
        await transport.connect(source_of(endpoint))


async def test_a_read_that_does_not_end_is_given_up_and_nothing_lands_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a machine that does not answer. (Within a machine a source need not take part.)"""
    monkeypatch.setattr(NixlThread, "_advance_all", lambda _: False)
    monkeypatch.setattr("diptych.workers.transport.tracked_reader.READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr("diptych.workers.transport.tracked_reader.SETTLE_S", 0.05)
    theirs, ours = make_memory(SMALL, 4, seed=1), make_memory(SMALL, 4)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region])
    try:
        reader = await near.connect(source_of(far.endpoint()))
        segment = kv_pb2.Segment(first_block=0, block_ids=[2], generations=[1], first_layer=0, num_layers=3)
        with pytest.raises(TransportError) as caught:
            await read(reader, theirs, ours, segment, [1])
        assert caught.value.may_still_land
        await reader.settled()
        with pytest.raises(TransportError, match="gone"):
            await read(reader, theirs, ours, segment, [1])
        assert ours.region.view == bytes(len(theirs.region.view or b""))
    finally:
        await near.close()
        await far.close()


async def test_a_source_need_not_take_part_in_reads() -> None:
    """Its engine may be stopped, or busy for long: what it was asked is answered by its lease, not by the read."""
    theirs, ours = make_memory(SMALL, 4, seed=1), make_memory(SMALL, 4)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region])
    try:
        reader = await near.connect(source_of(far.endpoint()))
        await read(reader, theirs, ours, kv_pb2.Segment(block_ids=[2], generations=[1], num_layers=3), [1])
        assert piece(ours, 1) == piece(theirs, 2)
    finally:
        await near.close()
        await far.close()


async def test_a_read_goes_into_whichever_region_it_names() -> None:
    """The second of two regions: a buffer beside the pool. Nothing else is written."""
    theirs, ours, buffer = make_memory(SMALL, 4, seed=1), make_memory(SMALL, 4), make_memory(SMALL, 2)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region, buffer.region])
    try:
        far.serve(1)
        reader = await near.connect(source_of(far.endpoint()))
        copies = Copies.of(theirs.runs([3], 0, 3), buffer.runs([1], 0, 3))
        await reader.read(kv_pb2.Segment(), copies, buffer.region)
        assert buffer.region.view is not None and theirs.region.view is not None
        size = SMALL.block_bytes
        assert buffer.region.view[size:] == theirs.region.view[3 * size :]
        assert buffer.region.view[:size] == bytes(size) and ours.region.view == bytes(4 * size)
    finally:
        await near.close()
        await far.close()


async def test_forgetting_one_source_leaves_another_alone() -> None:
    first, second, ours = make_memory(SMALL, 4, seed=1), make_memory(SMALL, 4, seed=2), make_memory(SMALL, 4)
    fars, near = [NixlTransport([first.region]), NixlTransport([second.region])], NixlTransport([ours.region])
    try:
        readers: list[KVReader] = []
        for incarnation, far in zip("ab", fars, strict=True):
            far.serve(1)
            opened = kv_pb2.Opened(source_incarnation=incarnation, transport="nixl", nixl=far.endpoint())
            readers.append(await near.connect(Source("h", "sink/1", opened, stub=None)))  # type: ignore[arg-type]
        copies = Copies.of(first.runs([2], 0, 3), ours.runs([1], 0, 3))
        await readers[0].read(kv_pb2.Segment(), copies, ours.region)
        near.forget("a")
        with pytest.raises(TransportError, match="gone"):
            await readers[0].read(kv_pb2.Segment(), copies, ours.region)
        await readers[1].read(kv_pb2.Segment(), copies, ours.region)
        size = SMALL.block_bytes
        assert ours.region.view is not None and second.region.view is not None
        assert ours.region.view[size : 2 * size] == second.region.view[2 * size : 3 * size]
    finally:
        for transport in (near, *fars):
            await transport.close()


def test_host_and_device_memory_are_told_apart_region_by_region() -> None:
    pool = make_memory(SMALL, 1).region
    assert nixl_thread.memory_type(pool) == "DRAM"
    assert nixl_thread.memory_type(Region(pool.address, pool.num_bytes, None, device_id=1)) == "VRAM"


async def test_a_read_beside_an_engine_that_computes_rests_and_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many rounds, so that it would not if a round were left out."""
    monkeypatch.setattr(nixl_thread, "POST_BYTES", SMALL.block_bytes)
    monkeypatch.setattr(copy_budget, "BURST_S", 1e-5)
    theirs, ours = make_memory(SMALL, 23, seed=1), make_memory(SMALL, 23)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region])
    try:
        far.serve(1)
        near.share_memory(True)
        reader = await near.connect(source_of(far.endpoint()))
        segment = kv_pb2.Segment(block_ids=range(23), generations=[1] * 23, num_layers=3)
        await read(reader, theirs, ours, segment, range(23))
        assert ours.region.view == theirs.region.view
    finally:
        await near.close()
        await far.close()


async def test_what_was_copied_beside_no_engine_is_no_debt_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_budget, "SHARE", 0.0)  # credit does not come back
    monkeypatch.setattr(copy_budget, "BURST_S", 1e-9)
    theirs, ours = make_memory(SMALL, 23, seed=1), make_memory(SMALL, 23)
    far, near = NixlTransport([theirs.region]), NixlTransport([ours.region])
    try:
        far.serve(1)
        reader = await near.connect(source_of(far.endpoint()))
        segment = kv_pb2.Segment(block_ids=range(23), generations=[1] * 23, num_layers=3)
        for _ in range(3):
            await read(reader, theirs, ours, segment, range(23))
        assert near._thread.budget.credit_s == 1e-9  # pyright: ignore[reportPrivateUsage]
    finally:
        await near.close()
        await far.close()
