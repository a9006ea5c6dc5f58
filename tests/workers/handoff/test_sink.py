"""Pulls against a real source over real sockets, with an engine that only notes; and all that can end one early."""

import asyncio
from collections.abc import Callable

import pytest

from diptych.proto import kv_pb2, worker_pb2
from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    HandoffError,
    LayoutMismatch,
    LeaseLost,
    RequestAborted,
    SequenceEnded,
    TransportError,
    Unavailable,
    UnknownHandoff,
    WorkerLost,
)
from diptych.workers.handoff import pull as handoff_pull
from diptych.workers.handoff import sink as handoff_sink
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.kv.layout import KVLayout

from ...support.handoff_pair import (
    BEGIN,
    COMMIT,
    RESERVE,
    SMALL,
    SinkEngine,
    failure,
    piece,
    receive,
    seal_event,
    segment_event,
    serve,
    start,
    until_quiet,
)


async def test_a_pull_brings_every_byte_and_commits() -> None:
    engine = SinkEngine(table=(7, 3, 0))
    async with serve() as served, receive(engine) as (sink, memory):
        served.hand_off([5, 6, 2])
        result = await sink.pull("k", served.named(), 15.0)
        assert engine.calls == [RESERVE, BEGIN, COMMIT]
        assert [piece(memory, b) for b in (7, 3, 0)] == [piece(served.memory, b) for b in (5, 6, 2)]
        assert (result.num_bytes, result.transport) == (3 * SMALL.block_bytes, "grpc")
        assert result.waited_s > 0
        times = engine.times
        assert times is not None and (times.num_bytes, times.transport) == (3 * SMALL.block_bytes, "grpc")
        assert 0 < times.pull_s < result.waited_s and 0 <= times.last_segment_s < result.waited_s
        assert served.engine.ended == ["h"]
        [(num_bytes, seconds)] = served.engine.reads  # reported with the release
        assert num_bytes == 3 * SMALL.block_bytes and 0 < seconds <= times.pull_s


async def test_segments_are_pulled_while_the_source_still_computes() -> None:
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, memory):
        pull = start(sink, served)
        served.source.offer("h", 11)
        served.announce([5])
        await engine.until("reserve")
        while piece(memory, 0) != piece(served.memory, 5):
            await asyncio.sleep(0)
        served.announce([6, 2], first_block=1)
        served.source.on_event(seal_event("h", 11, [7]))
        await pull
        assert engine.calls == [RESERVE, BEGIN, COMMIT]
        assert piece(memory, 2) == piece(served.memory, 2)


@pytest.mark.parametrize("num_held", [1, 3])
async def test_what_the_prefix_cache_holds_is_left_alone(num_held: int) -> None:
    engine = SinkEngine(num_held=num_held)
    async with serve() as served, receive(engine) as (sink, memory):
        served.hand_off([5, 6, 2])
        result = await sink.pull("k", served.named(), 15.0)
        assert result.num_bytes == (3 - num_held) * SMALL.block_bytes
        for position, block in enumerate([5, 6, 2]):
            expected = bytes(SMALL.block_bytes) if position < num_held else piece(served.memory, block)
            assert piece(memory, position) == expected


async def test_many_pulls_at_once_share_a_channel() -> None:
    engine = SinkEngine(table=(0,))
    async with serve() as served, receive(engine) as (sink, _):
        for number in range(20):
            served.source.offer(f"h{number}", 4)
            served.source.on_event(segment_event(f"h{number}", 0, [number % 8], [1], 0, 3))
            served.source.on_event(seal_event(f"h{number}", 4, [7]))
        await asyncio.gather(*(sink.pull(f"k{n}", served.named(f"h{n}"), 15.0) for n in range(20)))
        assert len(sink._channels._channels) == 1  # pyright: ignore[reportPrivateUsage]
        assert sum(call[0] == "commit" for call in engine.calls) == 20  # type: ignore[index]


# What the source answers


async def test_a_source_that_was_not_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_pull, "WAIT_FOR_OFFER_S", 0.05)
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, _):
        assert isinstance(await failure(start(sink, served)), UnknownHandoff)
        assert engine.calls == [("fail", "k", False)]


async def test_another_process_at_the_address_is_a_lost_worker() -> None:
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, _):
        served.hand_off()
        error = await failure(start(sink, served, incarnation="an earlier process"))
        assert isinstance(error, WorkerLost) and "another process" in error.message
        assert engine.calls == [("fail", "k", False)]


async def test_an_address_where_nobody_listens_is_a_lost_worker() -> None:
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, _):
        await served.stop()
        assert isinstance(await failure(start(sink, served)), WorkerLost)
        assert not sink._channels._channels, "the next pull dials anew"  # pyright: ignore[reportPrivateUsage]


async def test_another_layout_is_told() -> None:
    engine = SinkEngine()
    other = KVLayout("float32", 8, 4, 2, 8, "m")
    async with serve() as served, receive(engine, layout=other) as (sink, _):
        served.hand_off()
        error = await failure(start(sink, served))
        assert isinstance(error, LayoutMismatch) and "num_target_layers: 3 here, 4 there" in error.message
        assert engine.calls == [("fail", "k", False)]


class Liar(HandoffSource):
    """Opens with another layout, incarnation or transport than was agreed."""

    lie: Callable[[kv_pb2.Opened], None]

    def _opened(self, outgoing: object, transport: str) -> kv_pb2.Opened:
        opened = super()._opened(outgoing, transport)  # type: ignore[arg-type]
        type(self).lie(opened)
        return opened


def other_layout(opened: kv_pb2.Opened) -> None:
    opened.layout.head_dim = 16


def other_incarnation(opened: kv_pb2.Opened) -> None:
    opened.source_incarnation = "x"


def other_transport(opened: kv_pb2.Opened) -> None:
    opened.transport = "pigeon"


def no_tokens(opened: kv_pb2.Opened) -> None:
    opened.num_tokens = 0


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        (other_layout, LayoutMismatch),
        (other_incarnation, WorkerLost),
        (other_transport, TransportError),
        (no_tokens, HandoffError),
    ],
)
async def test_the_opening_is_checked_before_anything_is_reserved(
    lie: Callable[[kv_pb2.Opened], None], kind: type[DiptychError]
) -> None:
    Liar.lie = staticmethod(lie)
    engine = SinkEngine()
    async with serve(kind=Liar) as served, receive(engine) as (sink, _):
        served.hand_off()
        assert isinstance(await failure(start(sink, served)), kind)
        await until_quiet(sink)
        assert engine.calls == [("fail", "k", False)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestAborted("the client left"), SequenceEnded),
        (DeadlineExceeded("the request ran out of time"), SequenceEnded),
        (Unavailable("stopping"), Unavailable),
        (LeaseLost("x"), LeaseLost),
    ],
)
async def test_an_abort_of_the_source_is_passed_on(error: DiptychError, kind: type[DiptychError]) -> None:
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, memory):
        served.source.offer("h", 11)
        pull = start(sink, served)
        served.announce([5])
        while piece(memory, 0) != piece(served.memory, 5):  # else the read may be refused before the abort is known
            await asyncio.sleep(0)
        served.source.abort("h", error)
        failed = await failure(pull)
        assert type(failed) is kind and error.message in failed.message
        await until_quiet(sink)
        assert engine.calls[-1][:2] in [("fail", "k"), ("settle", "k")]  # type: ignore[index]


async def test_traffic_is_counted_by_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_sink, "MAX_PEERS", 2)
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, _):
        for number in range(2):
            served.source.offer(f"h{number}", 5)
            served.source.on_event(segment_event(f"h{number}", 0, [5, 6], [1, 1], 0, SMALL.num_layers))
            served.source.on_event(seal_event(f"h{number}", 5, [7]))
            await sink.pull("k", served.named(f"h{number}"), 15.0)
        assert isinstance(await failure(start(sink, served, incarnation="other")), WorkerLost)
        mine, other = sink.transfer_stats()
        assert (mine.incarnation, mine.transport) == (served.incarnation, "grpc")
        assert (mine.num_bytes, mine.num_reads, mine.num_failed) == (4 * SMALL.block_bytes, 2, 0)
        assert mine.read_s > 0
        assert other == worker_pb2.PeerLink(incarnation="other", num_failed=1)
        await failure(start(sink, served, incarnation="third"))
        await failure(start(sink, served, incarnation="x" * 65))
        assert [link.incarnation for link in sink.transfer_stats()] == ["other", "third"]
        await until_quiet(sink)


# Losses on the way


async def test_a_source_that_dies_is_noticed_at_once() -> None:
    engine = SinkEngine()
    async with serve() as served, receive(engine) as (sink, _):
        served.source.offer("h", 11)
        pull = start(sink, served)
        served.announce([5])
        await engine.until("reserve")
        await served.stop()
        assert isinstance(await failure(pull), WorkerLost)
        await until_quiet(sink)


class Mute(HandoffSource):
    """Stops answering once it has opened, as a stopped process or a cut cable does."""

    async def Renew(self, request: kv_pb2.RenewRequest, context: object) -> kv_pb2.RenewResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def Release(self, request: kv_pb2.ReleaseRequest, context: object) -> kv_pb2.ReleaseResponse:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_source_that_falls_silent_is_noticed_by_its_lease(is_sealed: bool) -> None:
    engine = SinkEngine()
    async with serve(kind=Mute, lease_s=0.5) as served, receive(engine) as (sink, _):
        served.source.offer("h", 11)
        pull = start(sink, served)
        served.announce([5, 6, 2])
        if is_sealed:
            served.source.on_event(seal_event("h", 11, [7]))
        error = await failure(pull)
        # On a slow machine the source may report the expired lease first; otherwise the sink detects the silence.
        assert isinstance(error, WorkerLost | LeaseLost)
        await until_quiet(sink)
        assert not any(call[0] == "commit" for call in engine.calls)  # type: ignore[index]


class Forgetful(HandoffSource):
    async def Release(self, request: kv_pb2.ReleaseRequest, context: object) -> kv_pb2.ReleaseResponse:
        return kv_pb2.ReleaseResponse(held=False)


async def test_without_a_positive_release_nothing_is_committed() -> None:
    engine = SinkEngine()
    async with serve(kind=Forgetful) as served, receive(engine) as (sink, _):
        served.hand_off()
        assert isinstance(await failure(start(sink, served)), LeaseLost)
        assert engine.calls == [RESERVE, BEGIN, ("fail", "k", False)]


async def test_the_whole_ends_in_time() -> None:
    engine = SinkEngine(never_reserves=True)
    async with serve() as served, receive(engine) as (sink, _):
        served.hand_off()
        assert isinstance(await failure(start(sink, served, timeout_s=0.3)), DeadlineExceeded)
        await until_quiet(sink)
        assert engine.calls == [RESERVE, ("fail", "k", False)]


async def test_closing_gives_up_what_is_under_way() -> None:
    engine = SinkEngine(never_reserves=True)
    async with serve() as served, receive(engine) as (sink, _):
        served.hand_off()
        pull = start(sink, served)
        await engine.until("reserve")
        await sink.close()
        assert isinstance(await failure(pull), Unavailable)
        assert engine.calls[-1] == ("fail", "k", False)
        assert isinstance(await failure(start(sink, served)), Unavailable), "nothing begins after it"
        await until_quiet(sink)


async def test_a_malformed_address_is_an_error() -> None:
    engine = SinkEngine()
    async with receive(engine) as (sink, _):
        for address in ["", "nowhere", "127.0.0.1:99999", "no.such.host.invalid:1"]:
            source = worker_pb2.HandoffSource(handoff_id="h", address=address, incarnation="i")
            with pytest.raises(DiptychError):
                await sink.pull("k", source, 10.0)
