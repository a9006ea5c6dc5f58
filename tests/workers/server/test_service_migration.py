"""Running sequences and cached prefixes move between two worker services, over real sockets."""

import grpc.aio
import pytest

from diptych.proto import kv_pb2, kv_pb2_grpc, worker_pb2
from diptych.workers.common.channel import open_channel
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner, fake_output

from ...support.sequences import make_request
from .test_service import TIMEOUT_S, Router, assert_clean, worker

PROMPT = [1, 2, 3, 5, 7, 11] * 3  # no sum on its way is a multiple of 1000: only max_tokens ends it
STEP_S = 0.003


def source_of(service: WorkerService, address: str, handoff_id: str) -> worker_pb2.HandoffSource:
    return worker_pb2.HandoffSource(handoff_id=handoff_id, address=address, incarnation=service.incarnation)


async def some_tokens(router: Router, handle: int, num: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while len(found) < num:
        found += await router.tokens(handle, until_finished=False)
    return found


async def until_handed_off(router: Router, handle: int) -> tuple[list[tuple[int, int]], int]:
    """Tokens until the source hands off, and the number of tokens that it reports."""
    found: list[tuple[int, int]] = []
    while True:
        message = await router.next()
        match message.WhichOneof("message"):
            case "step":
                step = message.step
                found += [
                    (p, t) for h, p, t in zip(step.handles, step.positions, step.token_ids, strict=True) if h == handle
                ]
            case "handed_off":
                assert (message.handed_off.handle, message.handed_off.handoff_id) == (handle, "h")
                return found, message.handed_off.num_output_tokens
            case "failed":
                raise AssertionError(message)


@pytest.mark.parametrize("draining", [False, True])
async def test_a_running_sequence_moves_to_another_worker(draining: bool) -> None:
    async with worker(step_s=STEP_S) as (source, source_at), worker() as (_, sink_at):
        here, there = Router(source_at), Router(sink_at)
        request, expected = make_request(PROMPT, 200), list(enumerate(fake_output(PROMPT, 200)))
        await here.submit(1, request)
        made = await some_tokens(here, 1, 5)
        if draining:
            await here.send(drain=worker_pb2.Drain())
        await here.send(offer=worker_pb2.Offer(handle=1, handoff_id="h"))
        await there.submit(7, request, [t for _, t in made], source=source_of(source, source_at, "h"))
        more, num_outputs = await until_handed_off(here, 1)
        made += more
        assert len(made) == num_outputs < 200
        assert made + await there.tokens(7) == expected
        states = [await here.idle_state(), await there.idle_state()]
        for state in states:
            assert_clean(state)
        assert states[0].load.num_migrated_out == states[1].load.num_handoffs_received == 1
        assert states[0].load.prefill_s > 0
        await here.close()
        await there.close()


async def test_a_sink_that_fails_costs_the_source_nothing() -> None:
    """A sink that closes the stream after blocks were announced, never catches up, or never subscribes."""
    async with worker(step_s=STEP_S, lease_s=3.0) as (source, source_at), open_channel(source_at) as channel:
        router, stub = Router(source_at), kv_pb2_grpc.KVHandoffStub(channel)
        expected = list(enumerate(fake_output(PROMPT, 200)))
        await router.submit(1, make_request(PROMPT, 200))
        made = await some_tokens(router, 1, 3)
        for number, fate in enumerate(("hangs up", "lags", "never comes")):
            await router.send(offer=worker_pb2.Offer(handle=1, handoff_id=fate))
            request = kv_pb2.SubscribeRequest(
                handoff_id=fate,
                source_incarnation=source.incarnation,
                sink_incarnation=f"sink-{number}",
                layout=FakeRunner().layout.to_proto(),
                transports=["grpc"],
                wait_s=TIMEOUT_S,
            )
            if fate == "never comes":
                made += await router.tokens(1)
            else:
                stream = stub.Subscribe(request)
                assert (await stream.read()).opened.is_live
                assert (await stream.read()).segment.first_block == 0
            if fate == "hangs up":
                stream.cancel()
                made += await some_tokens(router, 1, 20)  # more than were offered
            elif fate == "lags":
                while not (said := await stream.read()).HasField("aborted"):
                    assert said.HasField("segment")
                assert said.aborted.error == "HandoffError" and "catch up" in said.aborted.message
            with pytest.raises(grpc.aio.AioRpcError, match="aborted"):
                await stub.Subscribe(request).read()
        assert made == expected
        state = await router.idle_state()
        assert_clean(state)
        assert state.load.num_migrated_out == 0
        await router.close()


async def test_what_cannot_be_handed_off_is_told_to_the_sink_at_once() -> None:
    async with worker(step_s=STEP_S) as (source, source_at), worker() as (_, sink_at):
        here, there = Router(source_at), Router(sink_at)
        await here.send(offer=worker_pb2.Offer(handle=1, handoff_id="unknown"))
        await here.send(offer_prefix=worker_pb2.OfferPrefix(handoff_id="cold", token_ids=PROMPT))
        await there.submit(1, make_request(PROMPT, 9), [5], source=source_of(source, source_at, "unknown"))
        failed = (await there.read("failed")).failed
        assert (failed.handle, failed.handoff, failed.retryable) == (1, True, True)
        await there.submit(2, make_request(PROMPT, 9), prefix=source_of(source, source_at, "cold"))
        assert await there.tokens(2) == list(enumerate(fake_output(PROMPT, 9)))
        for router in (here, there):
            assert_clean(await router.idle_state())
            await router.close()


async def test_a_sequence_that_ends_before_its_sink_comes_is_no_failed_handoff() -> None:
    """What really fails counts."""
    async with worker(step_s=STEP_S) as (source, source_at), worker() as (_, sink_at):
        here, there = Router(source_at), Router(sink_at)
        await here.submit(1, make_request(PROMPT, 9))
        made = await here.tokens(1)
        await here.send(offer=worker_pb2.Offer(handle=1, handoff_id="late"))
        await here.submit(2, make_request(PROMPT, 1), offer=worker_pb2.HandoffOffer(handoff_id="one token"))
        made += await here.tokens(2)
        assert [t for _, t in made] == fake_output(PROMPT, 9) + fake_output(PROMPT, 1)
        for handle, handoff_id in ((1, "late"), (2, "one token")):
            await there.submit(handle, make_request(PROMPT, 9), [5], source=source_of(source, source_at, handoff_id))
            assert (await there.read("failed")).failed.error == "SequenceEnded"
        load = (await there.idle_state()).load
        assert (load.num_handoffs_failed, [link.num_failed for link in load.links]) == (0, [0])
        gone = worker_pb2.HandoffSource(handoff_id="x", address=source_at, incarnation="another")
        await there.submit(3, make_request(PROMPT, 9), [5], source=gone)
        assert (await there.read("failed")).failed.error == "WorkerLost"
        load = (await there.idle_state()).load
        assert (load.num_handoffs_failed, [link.num_failed for link in load.links]) == (1, [0, 1])
        assert_clean(await here.idle_state())
        await here.close()
        await there.close()


async def test_a_cached_prefix_moves_to_another_worker() -> None:
    async with worker() as (source, source_at), worker() as (_, sink_at):
        here, there = Router(source_at), Router(sink_at)
        turn = PROMPT + fake_output(PROMPT, 9)
        await here.submit(1, make_request(PROMPT, 9))
        await here.tokens(1)
        prompt = [*turn, 9, 9, 9, 9, 9]
        await here.send(offer_prefix=worker_pb2.OfferPrefix(handoff_id="p", token_ids=prompt))
        await there.submit(2, make_request(prompt, 9), prefix=source_of(source, source_at, "p"))
        assert await there.tokens(2) == list(enumerate(fake_output(prompt, 9)))
        state = await there.idle_state()
        assert (state.load.num_prefixes_pulled, state.load.num_prefill_tokens) == (1, len(prompt) - 24)
        assert_clean(state)
        assert_clean(await here.idle_state())
        await here.close()
        await there.close()


@pytest.mark.parametrize("by", ["abandoning", "hanging up"])
async def test_a_prefix_that_its_sink_drops_is_free_at_once(by: str) -> None:
    """Long before its lease lapses."""
    async with worker(lease_s=10 * TIMEOUT_S) as (source, source_at), open_channel(source_at) as channel:
        router, stub = Router(source_at), kv_pb2_grpc.KVHandoffStub(channel)
        await router.submit(1, make_request(PROMPT, 9))
        await router.tokens(1)
        await router.send(offer_prefix=worker_pb2.OfferPrefix(handoff_id="p", token_ids=PROMPT))
        stream = stub.Subscribe(
            kv_pb2.SubscribeRequest(
                handoff_id="p",
                source_incarnation=source.incarnation,
                sink_incarnation="sink",
                layout=FakeRunner().layout.to_proto(),
                transports=["grpc"],
                wait_s=TIMEOUT_S,
            )
        )
        assert (await stream.read()).opened.num_tokens == len(PROMPT) // 4 * 4
        if by == "abandoning":
            await stub.Abandon(kv_pb2.AbandonRequest(handoff_id="p", sink_incarnation="sink"))
        else:
            stream.cancel()
        assert_clean(await router.idle_state())
        await router.close()


async def test_a_prefix_whose_source_is_gone_is_computed() -> None:
    async with worker() as (_, address):
        router = Router(address)
        where = worker_pb2.HandoffSource(handoff_id="x", address="127.0.0.1:1", incarnation="nobody")
        await router.submit(1, make_request(PROMPT, 9), prefix=where)
        assert await router.tokens(1) == list(enumerate(fake_output(PROMPT, 9)))
        await router.submit(2, make_request(PROMPT, 9), prefix=where, source=where)
        failed = (await router.read("failed")).failed
        assert (failed.handle, failed.error) == (2, "InvalidRequest")
        assert_clean(await router.idle_state())
        await router.close()
