"""The source's servicer, asked over real sockets by hand-written sinks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc
from diptych.workers.common.channel import ERROR_KEY, open_channel
from diptych.workers.common.errors import HandoffError, RequestAborted
from diptych.workers.handoff import source as handoff_source
from diptych.workers.handoff.types import HandoffRefused, HandoffSealed
from diptych.workers.kv.layout import KVLayout
from diptych.workers.transport.grpc import GrpcTransport
from diptych.workers.transport.loopback import LoopbackTransport

from ...support.handoff_pair import (
    LARGE,
    SMALL,
    Served,
    make_memory,
    piece,
    seal_event,
    segment_event,
    serve,
)


class Sink:
    """A sink's calls, by hand."""

    def __init__(self, served: Served, channel: grpc.aio.Channel, name: str) -> None:
        self.served, self.name = served, name
        self.stub = kv_pb2_grpc.KVHandoffStub(channel)

    def subscribe(
        self,
        layout: KVLayout = SMALL,
        incarnation: str | None = None,
        transports: tuple[str, ...] = ("grpc",),
        wait_s: float = 0.0,
        handoff_id: str = "h",
    ) -> "grpc.aio.UnaryStreamCall[kv_pb2.SubscribeRequest, kv_pb2.Announcement]":
        return self.stub.Subscribe(
            kv_pb2.SubscribeRequest(
                handoff_id=handoff_id,
                source_incarnation=self.served.incarnation if incarnation is None else incarnation,
                sink_incarnation=self.name,
                layout=layout.to_proto(),
                transports=transports,
                wait_s=wait_s,
            )
        )

    async def renew(self) -> bool:
        return (await self.stub.Renew(kv_pb2.RenewRequest(handoff_id="h", sink_incarnation=self.name))).held

    async def release(self) -> bool:
        return (await self.stub.Release(kv_pb2.ReleaseRequest(handoff_id="h", sink_incarnation=self.name))).held

    async def abandon(self) -> None:
        await self.stub.Abandon(kv_pb2.AbandonRequest(handoff_id="h", sink_incarnation=self.name))

    def pull(
        self, position: int, block: int, generation: int = 1, first_layer: int = 0, num_layers: int = 3
    ) -> "grpc.aio.UnaryStreamCall[kv_pb2.PullRequest, kv_pb2.PullChunk]":
        segment = kv_pb2.Segment(
            first_block=position,
            block_ids=[block],
            generations=[generation],
            first_layer=first_layer,
            num_layers=num_layers,
        )
        return self.stub.Pull(kv_pb2.PullRequest(handoff_id="h", sink_incarnation=self.name, segment=segment))


@asynccontextmanager
async def sink(served: Served, name: str = "sink/1") -> AsyncIterator[Sink]:
    async with open_channel(served.address) as channel:
        yield Sink(served, channel, name)


async def refusal(call: object) -> tuple[grpc.StatusCode, str, str]:
    """Code, error name and details with which a stream was refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:  # type: ignore[attr-defined]
            pass
    metadata = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), str(metadata.get(ERROR_KEY)), caught.value.details() or ""


async def test_announcements_before_and_after_the_subscription_until_the_release() -> None:
    async with serve() as served, sink(served) as it:
        served.source.offer("h", 11)
        served.announce([5, 6])
        stream = it.subscribe()
        opened = (await stream.read()).opened
        assert (opened.source_incarnation, opened.transport, opened.lease_s) == (served.incarnation, "grpc", 10.0)
        assert (opened.num_tokens, opened.num_blocks) == (11, 3)
        assert KVLayout.from_proto(opened.layout) == SMALL
        segment = (await stream.read()).segment
        assert (segment.first_block, list(segment.block_ids), list(segment.generations)) == (0, [5, 6], [1, 1])
        served.announce([2], first_block=2)
        assert list((await stream.read()).segment.block_ids) == [2]
        served.source.on_event(seal_event("h", 11, [7]))
        sealed = (await stream.read()).sealed
        assert (sealed.num_segments, sealed.num_computed_tokens, list(sealed.output_token_ids)) == (2, 11, [7])
        assert await it.renew()
        assert served.engine.ended == [] and served.source.num_open == 1
        assert await it.release()
        assert await stream.read() is grpc.aio.EOF
        assert await it.release(), "its answer may have been lost"
        assert served.engine.ended == ["h"] and served.source.num_open == 0
        served.announce([1])
        served.source.on_event(seal_event("h", 11, [7]))
        served.source.abort("h", RequestAborted("late"))
        assert served.engine.ended == ["h"]


async def test_a_sink_may_come_before_the_offer() -> None:
    async with serve() as served, sink(served) as it:
        stream = it.subscribe(wait_s=15.0)
        reading = asyncio.create_task(stream.read())
        while not served.source._expected:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
        served.hand_off()
        assert (await reading).opened.num_blocks == 3
        assert not served.source._expected  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("wait_s", [0.0, 0.01, -1.0, float("nan"), float("inf")])
async def test_an_unknown_id_is_not_waited_for_long(wait_s: float) -> None:
    async with serve() as served, sink(served) as it:
        code, name, _ = await refusal(it.subscribe(wait_s=wait_s))
        assert (code, name) == (grpc.StatusCode.NOT_FOUND, "UnknownHandoff")


async def test_what_does_not_fit_is_refused_with_both_sides_named() -> None:
    other = KVLayout("bfloat16", 16, 3, 2, 8, "n")
    async with serve() as served, sink(served) as it:
        served.hand_off()
        code, name, details = await refusal(it.subscribe(layout=other))
        assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "LayoutMismatch")
        assert "float32" in details and "bfloat16" in details and "model_id: m here, n there" in details
        code, name, _ = await refusal(it.subscribe(incarnation="an earlier process"))
        assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "WorkerLost")
        code, name, details = await refusal(it.subscribe(transports=("nixl", "pigeon")))
        assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "TransportError")
        assert "source has grpc, the sink nixl, pigeon" in details
        assert served.engine.ended == [], "the hand-off stands"


async def test_a_sink_hears_why_what_it_comes_for_is_not_offered() -> None:
    async with serve() as served, sink(served) as it:
        served.source.on_event(
            HandoffRefused("h", HandoffError("the prefix is not, or no longer, in this worker's cache"))
        )
        code, name, details = await refusal(it.subscribe())
        assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "LeaseLost")
        assert "aborted, the prefix is not, or no longer, in this worker's cache" in details


async def test_the_first_of_the_sinks_transports_that_the_source_has_is_taken() -> None:
    transports = {"grpc": GrpcTransport(), "loopback": LoopbackTransport({})}
    async with serve(transports=transports) as served, sink(served) as it:
        served.hand_off()
        stream = it.subscribe(transports=("nixl", "loopback", "grpc"))
        assert (await stream.read()).opened.transport == "loopback"


async def test_a_second_sink_waits_for_the_first_ones_end() -> None:
    async with serve() as served, sink(served, "one/1") as one, sink(served, "two/1") as two:
        served.hand_off()
        first = one.subscribe()
        await first.read()
        code, name, _ = await refusal(two.subscribe())
        assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "HandoffError")
        assert not await two.renew() and not await two.release()
        first.cancel()
        machine = served.source._open["h"].machine  # pyright: ignore[reportPrivateUsage]
        while machine.sink is not None:
            await asyncio.sleep(0)
        second = two.subscribe()
        kinds = [(await second.read()).WhichOneof("event") for _ in range(3)]
        assert kinds == ["opened", "segment", "sealed"]
        assert not await one.release(), "it holds nothing any more"
        await two.abandon()
        assert await second.read() is grpc.aio.EOF
        third = one.subscribe()
        assert (await third.read()).WhichOneof("event") == "opened"
        assert await one.release()


async def test_an_abort_reaches_the_sink_by_name() -> None:
    async with serve() as served, sink(served) as it:
        served.source.offer("h", 11)
        stream = it.subscribe()
        await stream.read()
        served.source.abort("h", RequestAborted("the client left"))
        aborted = (await stream.read()).aborted
        assert (aborted.error, aborted.message) == ("RequestAborted", "the client left")
        assert await stream.read() is grpc.aio.EOF
        assert served.engine.ended == ["h"]
        code, name, details = await refusal(it.subscribe())
        assert (code, name) == (grpc.StatusCode.FAILED_PRECONDITION, "SequenceEnded") and "aborted" in details


async def test_an_offer_that_no_sink_takes_expires_by_itself() -> None:
    async with serve(lease_s=0.1) as served:
        served.hand_off()
        assert served.source.leases() == (1, 0, 0)
        await served.engine.until_ended()
        assert served.engine.ended == ["h"]
        assert served.source.leases() == (0, 0, 1)


async def test_a_lease_is_late_in_the_second_half_of_its_time_and_aborts_do_not_count_as_expired() -> None:
    async with serve() as served:
        served.source.offer("h", 11)
        machine = served.source._open["h"].machine  # pyright: ignore[reportPrivateUsage]
        machine._deadline -= 0.6 * machine._lease_s  # pyright: ignore[reportPrivateUsage]
        assert served.source.leases() == (1, 1, 0)
        served.source.abort("h", RequestAborted("the client left"))
        assert served.source.leases() == (0, 0, 0)


async def test_a_sink_whose_lease_lapsed_is_told() -> None:
    async with serve() as served, sink(served) as it:
        served.source.offer("h", 11)
        stream = it.subscribe()
        await stream.read()
        outgoing = served.source._open["h"]  # pyright: ignore[reportPrivateUsage]
        outgoing.machine._deadline = 0.0  # pyright: ignore[reportPrivateUsage]
        served.source._on_timer(outgoing)  # pyright: ignore[reportPrivateUsage]
        assert (await stream.read()).aborted.error == "LeaseLost"
        assert not await it.renew() and not await it.release()
        assert served.engine.ended == ["h"]


async def test_renewals_move_the_deadline_and_the_timer_follows() -> None:
    async with serve() as served, sink(served) as it:
        served.hand_off()
        stream = it.subscribe()
        await stream.read()
        outgoing = served.source._open["h"]  # pyright: ignore[reportPrivateUsage]
        before = outgoing.machine.wake_at
        assert before is not None and await it.renew()
        assert outgoing.machine.wake_at is not None and outgoing.machine.wake_at > before
        assert outgoing.timer is not None
        outgoing.timer.cancel()
        served.source._on_timer(outgoing)  # as set before the renewal  # pyright: ignore[reportPrivateUsage]
        assert outgoing.timer.when() == outgoing.machine.wake_at
        assert await it.release()
        assert outgoing.timer.cancelled()


async def test_ids_are_single_use() -> None:
    async with serve() as served:
        served.source.offer("h", 11)
        with pytest.raises(HandoffError, match="single-use"):
            served.source.offer("h", 11)
        served.source.abort("h", RequestAborted("x"))
        with pytest.raises(HandoffError, match="single-use"):
            served.source.offer("h", 11)


async def test_closing_ends_every_lease() -> None:
    async with serve() as served, sink(served) as it:
        served.source.offer("h", 11)
        served.source.offer("other", 11)
        stream = it.subscribe()
        await stream.read()
        await served.source.close()
        assert (await stream.read()).aborted.error == "Unavailable"
        assert sorted(served.engine.ended) == ["h", "other"]


async def test_pulls_give_announced_blocks_to_their_sink_and_nothing_else() -> None:
    async with serve() as served, sink(served) as it, sink(served, "other/1") as other:
        served.source.offer("h", 11)
        served.source.on_event(segment_event("h", 0, [5, 6], [1, 3], 0, 2))
        early = await refusal(it.pull(0, 5, num_layers=2))
        stream = it.subscribe()
        await stream.read()
        data = b"".join([chunk.data async for chunk in it.pull(1, 6, generation=3, first_layer=1, num_layers=1)])
        assert data == piece(served.memory, 6, 1, 1)
        bad = [
            other.pull(0, 5, num_layers=2),  # another sink
            it.pull(0, 6, generation=3, num_layers=2),  # another position
            it.pull(0, 5, generation=2, num_layers=2),  # another generation
            it.pull(0, 5),  # a layer not announced
            it.pull(0, 5, num_layers=0),
            it.pull(0, 5, first_layer=1, num_layers=1 << 31),
            it.pull(1 << 31, 5, num_layers=2),
            it.pull(0, 4, num_layers=2),  # a block that is not in this hand-off
            it.pull(0, 1 << 31, num_layers=2),
        ]
        refusals = [early, *[await refusal(call) for call in bad]]
        assert {(code, name) for code, name, _ in refusals} == {(grpc.StatusCode.FAILED_PRECONDITION, "HandoffError")}
        served.source.abort("h", RequestAborted("x"))
        assert (await refusal(it.pull(0, 5, num_layers=2)))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_pull_stops_when_its_hand_off_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed is another sequence's a moment later: not one byte of it may be sent."""
    monkeypatch.setattr(handoff_source, "CHUNK_BYTES", 1000)
    memory = make_memory(LARGE, 64, seed=1)
    async with serve(LARGE, memory=memory) as served, sink(served) as it:
        served.source.offer("h", 64 * LARGE.block_size)
        served.announce(range(64), layout=LARGE)
        stream = it.subscribe(layout=LARGE)
        await stream.read()
        segment = kv_pb2.Segment(block_ids=range(64), generations=[1] * 64, num_layers=3)
        request = kv_pb2.PullRequest(handoff_id="h", sink_incarnation="sink/1", segment=segment)
        call = it.stub.Pull(request)
        received = bytearray((await call.read()).data)
        before = bytes(memory.region.view or b"")
        served.source.abort("h", RequestAborted("x"))
        assert memory.region.view is not None
        memory.region.view[:] = b"\0" * memory.region.num_bytes
        with pytest.raises(grpc.aio.AioRpcError):
            while True:
                received += (await call.read()).data
        assert len(received) < memory.region.num_bytes
        assert received == before[: len(received)]


@pytest.mark.parametrize("end", ["released", "aborted before", "lapsed at the seal"])
async def test_a_running_sequence_that_is_sealed_is_forgotten_when_its_hand_off_has_ended(end: str) -> None:
    """Its router is informed once, however the hand-off ends."""
    async with serve() as served, sink(served) as it:
        source, requests = served.source, served.engine
        source.offer("h", 11, "1/1", is_live=True)
        if end == "aborted before":
            source.abort("h", RequestAborted("x"))
        elif end == "lapsed at the seal":
            later = asyncio.get_running_loop().time() + 11.0
            source._now = lambda: later  # type: ignore[method-assign]
        assert requests.forgotten == []
        source.on_event(HandoffSealed("h", "1/1", 11, (7,), is_live=True))
        assert requests.handed_off_keys == ["1/1"]
        if end == "released":
            assert requests.forgotten == []
            stream = it.subscribe()
            await stream.read()
            assert await it.release()
        assert (requests.forgotten, requests.ended) == (["1/1"], ["h"])
