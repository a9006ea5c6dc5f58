"""NIXL agents of ranks that have a device each: real agents in processes of their own, and memory files as devices.

Workers do the same in tests/e2e/test_gpu_ranks.py.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.proto import kv_pb2
from diptych.workers.common.errors import ChecksumMismatch, ConfigError, TransportError
from diptych.workers.kv.layout import LAYER_MAJOR, Copies, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport import rank_agent
from diptych.workers.transport.base import Source
from diptych.workers.transport.nixl import NixlTransport
from diptych.workers.transport.nixl_agent import Endpoint, NixlAgent
from diptych.workers.transport.nixl_thread import NixlThread
from diptych.workers.transport.rank_agent import RankAgent
from diptych.workers.transport.rank_server import serve_rank
from diptych.workers.transport.select import make_transports

from ...support.gpu.fake_cuda import seen_by_host
from ...support.gpu.rank_process import TwoRanks
from ...support.gpu.scripted_rank import ScriptedRank, done, opened, stopped, without_nixl
from ...support.handoff_pair import SMALL, make_memory
from ..device.test_mapped_pieces import BLOCKS, LAYOUT, NUM_BLOCKS, TABLE, content, fill, pulled

TWO = replace(LAYOUT, tensor_parallel=2)
ORDERS = {order: replace(TWO, axis_order=order) for order in (TWO.axis_order, LAYER_MAJOR)}
Asked = list[tuple[int, int, bool]]  # of each read: the rank that reads, the source's piece, whether into the pool


@pytest.fixture(scope="module")
def ranked() -> Iterator[dict[str, KVMemory]]:
    with ExitStack() as stack:
        made = {order: stack.enter_context(closing(TwoRanks(of, NUM_BLOCKS))) for order, of in ORDERS.items()}
        yield {order: each.memory for order, each in made.items()}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Reads that are asked for, by either rank."""
    found: Asked = []

    def noting(rank: int, read: Callable[..., "Future[None]"]) -> Callable[..., "Future[None]"]:
        def noted(agent: object, incarnation: str, piece: int, copies: Copies, into: object = None) -> "Future[None]":
            found.append((rank, piece, into is None))
            return read(agent, incarnation, piece, copies, into)

        return noted

    for rank, kind in enumerate((NixlThread, RankAgent)):
        monkeypatch.setattr(kind, "read", noting(rank, kind.read))
    return found


@pytest.mark.parametrize("orders", [(TWO.axis_order, LAYER_MAJOR), (LAYER_MAJOR, TWO.axis_order)])
async def test_every_rank_reads_into_its_own_piece(
    orders: tuple[str, str], ranked: dict[str, KVMemory], asked: Asked
) -> None:
    """Some of these blocks are at the ends of pieces, and so adjacent to those of the next rank."""
    theirs, ours = (ranked[order] for order in orders)
    fill(theirs)
    clear(ours)
    result = await pulled(theirs, ours, BLOCKS, TABLE, ["nixl"])
    assert (result.transport, result.num_bytes) == ("nixl", len(BLOCKS) * TWO.block_bytes)
    assert torch.equal(content(theirs, BLOCKS), content(ours, TABLE))
    assert sorted(asked) == [(0, 0, True), (1, 1, True)]


async def test_a_read_may_cross_the_ends_of_pieces(ranked: dict[str, KVMemory], asked: Asked) -> None:
    """From a pool in one piece: its one agent has all heads."""
    far, near = make_memory(LAYOUT, NUM_BLOCKS, seed=2), ranked[TWO.axis_order]
    source, sink = NixlTransport([far.region]), NixlTransport([near.region], rank_links=near.rank_links)
    clear(near)
    async with closed(sink, source):
        source.serve(1)
        reader = await sink.connect(source_of(source.endpoint()))
        half = near.region.num_bytes // 2
        copies = Copies(np.array([0, 4096, 1024]), np.array([half - 512, half + 2048, 0]), np.array([1024, 64, 256]))
        await reader.read(kv_pb2.Segment(), copies, near.region)
        assert sorted(asked) == [(0, 0, True), (1, 0, True)]
        seen, view = memory_of(near), far.region.view
        assert view is not None
        for remote, local, length in zip(copies.remote, copies.local, copies.lengths, strict=True):
            assert seen[local : local + length] == view[remote : remote + length]
        with pytest.raises(TransportError, match="a block that it does not have"):
            await reader.read(kv_pb2.Segment(), copies_of(far.region.num_bytes - 1, 0, 2), near.region)
        await reader.read(kv_pb2.Segment(), Copies(*(np.array([], dtype=np.int64),) * 3), near.region)
    assert len(asked) == 2
    assert not any(thread.name.startswith(("diptych-rank", "diptych-nixl")) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: of.pieces.extend([of.pieces[0]] * 300), "302 pieces, more than 256"),
        (lambda of: of.pieces.pop(), "not of one size and kind, or not all of it"),
        (lambda of: setattr(of, "num_bytes", of.num_bytes + 1), "not of one size and kind, or not all of it"),
        (lambda of: setattr(of.pieces[1], "memory", "VRAM"), "not of one size and kind, or not all of it"),
        (lambda of: setattr(of.pieces[1], "metadata", b""), "malformed"),
        (lambda of: setattr(of.pieces[1], "metadata", b"\0" * 64), "cannot be used"),
        (lambda of: setattr(of.pieces[1], "agent_name", "another"), "but its endpoint names 'another'"),
    ],
)
async def test_pieces_that_cannot_be_are_refused_and_good_ones_then_taken(
    change: Callable[[kv_pb2.NixlEndpoint], object], message: str, ranked: dict[str, KVMemory]
) -> None:
    theirs, ours = ranked[TWO.axis_order], make_memory(SMALL, 4)
    source, sink = NixlTransport([theirs.region], rank_links=theirs.rank_links), NixlTransport([ours.region])
    async with closed(sink, source):
        good, bad = source.endpoint(), source.endpoint()
        change(bad)
        with pytest.raises(TransportError, match=message):
            await sink.connect(source_of(bad))
        source.serve(1)
        reader = await sink.connect(source_of(good))
        fill(theirs)
        last = theirs.region.num_bytes - 4
        await reader.read(kv_pb2.Segment(), copies_of(last, 0, 4), ours.region)
        assert ours.region.view is not None and ours.region.view[:4] == memory_of(theirs)[last:]


def test_what_is_under_way_fails_when_the_rank_ends() -> None:
    rank = ScriptedRank(opened)
    agent = RankAgent(1, rank.ours, has_rdma=False)
    assert agent.endpoint.base_address == 4096
    reading = agent.read("s", 0, copies_of(0, 0, 4))
    rank.end()
    commands = agent.read("s", 0, copies_of(0, 0, 4)), agent.connect("s", []), agent.forget("s"), agent.measure("s", 0)
    for future in (reading, *commands):
        with pytest.raises(TransportError, match="the NIXL agent of rank 1 has ended"):
            future.result(10)
    agent.serve(True)
    agent.stop()
    agent.stop()
    rank.ours.close()


def test_a_rank_that_does_not_stop_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agent, "STOP_TIMEOUT_S", 0.01)
    rank = ScriptedRank(opened)
    agent = RankAgent(1, rank.ours, has_rdma=False)
    reading = agent.read("s", 0, copies_of(0, 0, 4))
    agent.stop()
    with pytest.raises(TransportError, match="has ended"):
        reading.result(0)
    rank.end()
    rank.ours.close()


def test_a_rank_that_makes_no_agent_in_time_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPEN_TIMEOUT_S", "STOP_TIMEOUT_S"):
        monkeypatch.setattr(rank_agent, name, 0.01)
    rank = ScriptedRank()
    with pytest.raises(TransportError, match="rank 1 made no NIXL agent within"):
        RankAgent(1, rank.ours, has_rdma=False)
    rank.end()
    rank.ours.close()


class FailingReceiver:
    """A PartsReceiver that fails to receive, each time by another error."""

    regions: Sequence[Region] = ()

    def __init__(self) -> None:
        self.errors: list[Exception] = [ChecksumMismatch("block 7 differs"), ValueError("a bug"), ConfigError("odd")]

    def measure(self, agent: NixlAgent, endpoints: Sequence[Endpoint], link: kv_pb2.RankLink) -> "Future[float]":
        measured: Future[float] = Future()
        measured.set_result(link.piece * 1e9)
        return measured

    def receive(self, agent: NixlAgent, endpoints: Sequence[Endpoint], parts: kv_pb2.RankParts) -> "Future[None]":
        assert agent.endpoint.memory == "DRAM" and not endpoints
        failed: Future[None] = Future()
        failed.set_exception(self.errors.pop(0))
        return failed

    def close(self) -> None:
        assert not self.errors


def test_what_fails_at_another_rank_fails_by_its_name_here(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    receiver, piece = FailingReceiver(), make_memory(SMALL, 4).region
    serving = threading.Thread(target=serve_rank, args=(theirs, piece, None, lambda: receiver))
    serving.start()
    agent = RankAgent(1, ours, has_rdma=False)
    assert agent.can_receive
    with pytest.raises(TransportError, match="rank 1: the connection to the source is gone"):
        agent.receive(kv_pb2.RankParts(incarnation="s")).result(10)
    agent.connect("s", []).result(10)
    assert agent.measure("s", 3).result(10) == 3e9
    with pytest.raises(ChecksumMismatch, match="rank 1: block 7 differs"):
        agent.receive(kv_pb2.RankParts(incarnation="s")).result(10)
    for what in ("a bug", "odd"):
        with pytest.raises(TransportError, match=f"rank 1: {what}"):
            agent.receive(kv_pb2.RankParts(incarnation="s")).result(10)
    assert "failed to receive KV by our own fault" in caplog.text
    agent.forget("s").result(10)
    with pytest.raises(TransportError, match="rank 1: the connection to the source is gone"):
        agent.receive(kv_pb2.RankParts(incarnation="s")).result(10)
    agent.stop()
    ours.close()
    serving.join()


def test_a_rank_that_cannot_convert_leaves_that_to_the_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def make_receiver() -> FailingReceiver:
        raise TransportError("the first rank's memory is out of reach")

    ours, theirs = socket.socketpair()
    piece = make_memory(SMALL, 4).region
    serving = threading.Thread(target=serve_rank, args=(theirs, piece, None, make_receiver))
    serving.start()
    agent = RankAgent(1, ours, has_rdma=False)
    assert not agent.can_receive and agent.endpoint.base_address == piece.address
    assert "must be converted: the first rank's memory is out of reach" in caplog.text
    agent.stop()
    ours.close()
    serving.join()


async def test_where_a_rank_has_no_nixl_the_worker_goes_without(caplog: pytest.LogCaptureFixture) -> None:
    """The agents of the others are ended."""
    caplog.set_level("INFO")
    region = make_memory(SMALL, 4).region
    for names in ("auto", ["nixl"]):
        ranks = [ScriptedRank(opened, stopped), ScriptedRank(without_nixl, stopped)]
        links = [rank.ours for rank in ranks]
        if names == "auto":
            assert "nixl" not in make_transports(names, [region], None, links)
            assert "without the transport nixl: rank 2: No module named 'nixl'" in caplog.text
        else:
            with pytest.raises(ConfigError, match="'nixl' is not usable: rank 2: No module"):
                make_transports(names, [region], None, links)
        for rank in ranks:
            rank.end()
            rank.ours.close()
    assert not any(thread.name.startswith(("diptych-rank", "diptych-nixl")) for thread in threading.enumerate())


async def test_a_rank_that_is_gone_fails_a_read_and_no_byte_lands_later() -> None:
    """What the other rank reads is waited for."""
    far, near = make_memory(SMALL, 4, seed=2), make_memory(SMALL, 4)
    rank = ScriptedRank(opened, done)
    source, sink = NixlTransport([far.region]), NixlTransport([near.region], rank_links=[rank.ours])
    async with closed(sink, source):
        source.serve(1)
        reader = await sink.connect(source_of(source.endpoint()))
        half = near.region.num_bytes // 2
        reading = asyncio.ensure_future(
            reader.read(kv_pb2.Segment(), copies_of(half - 64, half - 64, 128), near.region)
        )
        await asyncio.to_thread(rank.end)
        with pytest.raises(TransportError, match="the NIXL agent of rank 1 has ended") as caught:
            await reading
        assert not caught.value.may_still_land
        view, expected = near.region.view, far.region.view
        assert view is not None and expected is not None and view[half - 64 : half] == expected[half - 64 : half]
        await reader.settled()
    rank.ours.close()


@asynccontextmanager
async def closed(*transports: NixlTransport) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for transport in transports:
            await transport.close()


def source_of(endpoint: kv_pb2.NixlEndpoint) -> Source:
    message = kv_pb2.Opened(source_incarnation="s", transport="nixl", nixl=endpoint)
    return Source("h", "sink/1", message, stub=None)  # type: ignore[arg-type]


def copies_of(remote: int, local: int, length: int) -> Copies:
    return Copies(np.array([remote]), np.array([local]), np.array([length]))


def memory_of(memory: KVMemory) -> memoryview:
    view = seen_by_host(memory).region.view
    assert view is not None
    return view


def clear(memory: KVMemory) -> None:
    view = memory_of(memory)
    view[:] = bytes(len(view))
