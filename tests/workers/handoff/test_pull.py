"""Pulls that our own engine, its caller or a transport ends early: blocks come back, or wait until nothing lands."""

import asyncio

import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import OutOfBlocks, RequestAborted, TransportError
from diptych.workers.common.timings import PullTimes
from diptych.workers.handoff.types import Seal
from diptych.workers.kv.layout import Copies, Region
from diptych.workers.transport.base import KVReader, Source, Transport
from diptych.workers.transport.grpc import GrpcTransport
from diptych.workers.transport.loopback import LoopbackTransport

from ...support.handoff_pair import (
    BEGIN,
    COMMIT,
    RESERVE,
    SMALL,
    SinkEngine,
    failure,
    make_memory,
    piece,
    receive,
    seal_event,
    serve,
    start,
    until_quiet,
)


class Stuck(Transport):
    """Reads never end, and may land until it is quiet."""

    name = "stuck"

    def __init__(self, error: TransportError | None = None) -> None:
        self.is_reading, self.is_quiet = asyncio.Event(), asyncio.Event()
        self.error = error

    async def connect(self, source: Source) -> KVReader:
        return StuckReader(self)


class StuckReader(KVReader):
    def __init__(self, transport: Stuck) -> None:
        self._transport = transport

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        self._transport.is_reading.set()
        if self._transport.error is not None:
            raise self._transport.error
        await asyncio.Event().wait()

    async def settled(self) -> None:
        await self._transport.is_quiet.wait()


@pytest.mark.parametrize("may_still_land", [False, True])
async def test_a_failed_read_fails_the_pull_and_quarantines_what_it_must(may_still_land: bool) -> None:
    engine = SinkEngine()
    stuck = Stuck(TransportError("broken", may_still_land=may_still_land))
    async with (
        serve(transports={"stuck": Stuck()}) as served,
        receive(engine, transports={"stuck": stuck}) as (sink, _),
    ):
        served.hand_off()
        assert await failure(start(sink, served)) is stuck.error
        assert engine.calls == [RESERVE, ("fail", "k", may_still_land)]
        stuck.is_quiet.set()
        await until_quiet(sink)
        assert engine.calls[2:] == ([("settle", "k")] if may_still_land else [])


class Unreachable(Transport):
    name = "nixl"

    async def connect(self, source: Source) -> KVReader:
        raise TransportError("no route")


async def test_where_the_chosen_transport_cannot_connect_grpc_steps_in(caplog: pytest.LogCaptureFixture) -> None:
    engine = SinkEngine()
    both: dict[str, Transport] = {"nixl": Unreachable(), "grpc": GrpcTransport()}
    async with serve(transports=both) as served, receive(engine, transports=both) as (sink, memory):
        served.hand_off()
        result = await sink.pull("k", served.named(), 15.0)
        assert result.transport == "grpc" and piece(memory, 0) == piece(served.memory, 5)
    assert "no route" in caplog.text


async def test_without_another_transport_a_failed_connection_fails_the_pull() -> None:
    engine = SinkEngine()
    only: dict[str, Transport] = {"nixl": Unreachable()}
    async with serve(transports=only) as served, receive(engine, transports=only) as (sink, _):
        served.hand_off()
        error = await failure(start(sink, served))
        assert isinstance(error, TransportError) and "no route" in error.message
        assert engine.calls[0] == RESERVE and engine.calls[1][:2] == ("fail", "k")  # type: ignore[index]
        await until_quiet(sink)


async def test_over_loopback_too() -> None:
    engine = SinkEngine()
    theirs = make_memory(SMALL, 8, seed=2)
    registry = {"source-incarnation": theirs}
    near, far = LoopbackTransport(registry), LoopbackTransport(registry)
    async with (
        serve(transports={"loopback": far}, memory=theirs) as served,
        receive(engine, transports={"loopback": near}) as (sink, memory),
    ):
        served.hand_off()
        result = await sink.pull("k", served.named(), 15.0)
        assert result.transport == "loopback" and piece(memory, 1) == piece(theirs, 6)


async def test_no_blocks_means_no_pull_and_the_next_sink_may_come() -> None:
    poor, rich = SinkEngine(reserve_error=OutOfBlocks("none")), SinkEngine()
    async with serve() as served, receive(poor) as (first, _), receive(rich) as (second, memory):
        served.hand_off()
        assert isinstance(await failure(start(first, served)), OutOfBlocks)
        await until_quiet(first)
        assert poor.calls == [RESERVE, ("fail", "k", False)]
        await start(second, served)
        assert rich.calls == [RESERVE, BEGIN, COMMIT]
        assert piece(memory, 0) == piece(served.memory, 5)


async def test_a_commit_that_is_refused_gives_the_blocks_back() -> None:
    engine = SinkEngine(commit_error=RequestAborted("gone meanwhile"))
    async with serve() as served, receive(engine) as (sink, _):
        served.hand_off()
        assert isinstance(await failure(start(sink, served)), RequestAborted)
        assert engine.calls == [RESERVE, BEGIN, COMMIT, ("fail", "k", False)]


class Bug(SinkEngine):
    async def commit(self, key: str, seal: Seal, times: PullTimes) -> None:
        raise ZeroDivisionError


async def test_our_own_fault_is_an_error_not_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as served, receive(Bug()) as (sink, _):
        served.hand_off()
        error = await failure(start(sink, served))
        assert "ZeroDivisionError" in error.message
        await until_quiet(sink)
    assert "our own fault" in caplog.text


@pytest.mark.parametrize("moment", ["at once", "opened", "reserving", "reading"])
async def test_cancelling_cleans_up_and_another_sink_takes_over(moment: str) -> None:
    engine, other = SinkEngine(never_reserves=moment == "reserving"), SinkEngine()
    stuck = Stuck()
    transports: dict[str, Transport] = {"stuck": stuck} if moment == "reading" else {"grpc": GrpcTransport()}
    both: dict[str, Transport] = {"stuck": Stuck(), "grpc": GrpcTransport()}
    async with serve(transports=both) as served, receive(engine, transports=transports) as (sink, _):
        served.source.offer("h", 11)
        if moment in ("reserving", "reading"):
            served.announce([5])
        pull = start(sink, served)
        machine = served.source._open["h"].machine  # pyright: ignore[reportPrivateUsage]
        match moment:
            case "opened":
                while machine.sink is None:
                    await asyncio.sleep(0)
            case "reserving":
                await engine.until("reserve")
            case "reading":
                await stuck.is_reading.wait()
            case _:
                await asyncio.sleep(0)  # it has begun, and heard nothing yet
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        await engine.until("fail")
        assert ("fail", "k", moment == "reading") in engine.calls
        stuck.is_quiet.set()
        await until_quiet(sink)
        assert (("settle", "k") in engine.calls) == (moment == "reading")
        while machine.sink is not None:
            await asyncio.sleep(0)
        async with receive(other) as (second, _):
            if moment in ("reserving", "reading"):
                served.announce([6, 2], first_block=1)
            else:
                served.announce([5, 6, 2])
            served.source.on_event(seal_event("h", 11, [7]))
            await start(second, served)
        assert other.calls == [RESERVE, BEGIN, COMMIT]
