"""The router moves KV: running sequences away from workers that drain or are full, cached prefixes to where they are
needed; and what it does where that fails. Over scripted workers on real sockets."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2
from diptych.workers.common.errors import OutOfBlocks, TransportError, WorkerDraining
from diptych.workers.common.request import FinishReason
from diptych.workers.core.prefix_cache import block_hashes

from ...support.routing import CONFIG, PROMPT, reading, request, routing, settled
from ...support.scripted_worker import NUM_BLOCKS, ScriptedWorker, scripted

SLOW = {"num_prefill_tokens": 1000, "prefill_s": 10.0}  # 100 tokens/s: pulling is cheaper
UNREACHABLE = TransportError("the source cannot be reached")


async def running_at(worker: ScriptedWorker, router: Router, **fields: Any) -> tuple[int, "asyncio.Task[list[int]]"]:
    """A request that only `worker` runs, long enough to move: it has generated the tokens 50 and 51."""
    answer = reading(router.stream(request(**({"max_tokens": 20} | fields))))
    handle = (await worker.submitted()).handle
    worker.tokens(handle, [50, 51])
    return handle, answer


async def offered(worker: ScriptedWorker) -> worker_pb2.Offer:
    message = await worker.received.get()
    assert message.WhichOneof("message") == "offer", message
    return message.offer


def hand_off(worker: ScriptedWorker, offer: worker_pb2.Offer, num_output_tokens: int) -> None:
    message = worker_pb2.HandedOff(
        handle=offer.handle, num_output_tokens=num_output_tokens, handoff_id=offer.handoff_id
    )
    worker.send(handed_off=message)


def metric(router: Router, line: str) -> bool:
    return line.encode() in router.metrics()


async def test_a_worker_that_drains_hands_its_request_over() -> None:
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        handle, answer = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        old.load(draining=True, num_running=1)
        offer = await offered(old)
        assert offer.handle == handle
        submit = await new.submitted()
        assert list(submit.output_token_ids) == [50, 51]
        assert submit.source == worker_pb2.HandoffSource(
            handoff_id=offer.handoff_id, address=old.info.address, incarnation=old.incarnation
        )
        old.tokens(handle, [52], start=2)
        hand_off(old, offer, 3)
        new.tokens(submit.handle, [53], start=3, finish=FinishReason.LENGTH)
        assert await answer == [50, 51, 52, 53]
        assert old.received.empty()
        assert [await old.drains_seen.get() for _ in range(2)] == [False, True]
        assert metric(router, "diptych_request_migrations_total 1.0")
        assert metric(router, "diptych_request_resumes_total 0.0")
        assert router.num_moves == {"drain": 1} and router.totals.num_migrations == 1


async def test_a_worker_whose_budget_becomes_a_whole_steps_gives_away_what_decodes_there() -> None:
    """Not what comes later: that was routed there as it is."""
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        old.load(num_running=1)
        handle, answer = await running_at(old, router)
        old.role = "prefill"
        old.load(num_running=1)
        await settled(router, lambda: router.health().num_prefill_workers == 1)
        late_handle, late = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        await settled(router, lambda: router.health().num_mixed_workers == 1)
        old.load(num_running=2)
        offer = await offered(old)
        assert offer.handle == handle
        submit = await new.submitted()
        hand_off(old, offer, 2)
        new.tokens(submit.handle, [52], start=2, finish=FinishReason.LENGTH)
        assert await answer == [50, 51, 52]
        for _ in range(2):
            old.load(num_running=1)
        old.tokens(late_handle, [60], start=2, finish=FinishReason.LENGTH)
        assert await late == [50, 51, 60]
        assert old.received.empty()
        assert metric(router, "diptych_request_migrations_total 1.0")
        assert router.num_moves == {"budget": 1}


async def test_a_router_is_done_with_a_worker_that_drains_when_it_has_heard_all_it_waited_for() -> None:
    """Not before the worker's last words have come, however late; and once on each stream."""
    async with scripted("mixed", "mixed") as (old, idle), routing(old) as router:
        first, second = [await running_at(old, router) for _ in range(2)]
        router.update_fleet([old.info, idle.info])
        await settled(router, lambda: router.health().num_mixed_workers == 2)
        idle.load(draining=True)
        assert await idle.drains_seen.get(), "nothing was there"
        old.load(draining=True)
        assert not await old.drains_seen.get()
        old.tokens(first[0], [52], start=2, finish=FinishReason.STOP)
        assert await first[1] == [50, 51, 52]
        old.load(draining=True)
        assert old.drains_seen.empty()
        old.tokens(second[0], [52], start=2, finish=FinishReason.STOP)
        assert await second[1] == [50, 51, 52]
        assert await old.drains_seen.get()
        old.load(draining=True)
        await settled(router, lambda: not any(w.num_in_flight for w in router.workers()))
        assert old.drains_seen.empty() and idle.drains_seen.empty()


async def test_a_worker_that_drains_is_emptied_a_few_at_a_time() -> None:
    config = replace(CONFIG, max_migrations=2)
    async with scripted("mixed", "mixed") as (old, new), routing(old, config=config) as router:
        started = [await running_at(old, router) for _ in range(5)]
        await settled(router, lambda: metric(router, "generation_tokens_total 10.0"))
        router.update_fleet([old.info, new.info])
        old.load(draining=True, num_running=5)
        moved = 0
        while moved < 5:
            for _ in range(min(2, 5 - moved)):
                offer, submit = await offered(old), await new.submitted()
                assert submit.source.handoff_id == offer.handoff_id
                moved += 1
                hand_off(old, offer, 2)
                new.tokens(submit.handle, [52], start=2, finish=FinishReason.STOP)
        assert [await answer for _, answer in started] == [[50, 51, 52]] * 5
        assert old.received.empty()


async def test_where_no_other_worker_is_left_the_request_ends_where_it_is() -> None:
    async with scripted("mixed", "prefill") as (old, other), routing(old, other) as router:
        other.load(num_waiting_tokens=9999, num_running=99)
        await settled(router, lambda: any(w.load.num_running for w in router.workers()))
        handle, answer = await running_at(old, router)
        old.load(draining=True)
        await settled(router, lambda: any(w.is_draining for w in router.workers()))
        old.tokens(handle, [52], start=2, finish=FinishReason.STOP)
        assert await answer == [50, 51, 52]
        assert old.received.empty()
        assert other.received.empty()


@pytest.mark.parametrize("error", [OutOfBlocks("full"), WorkerDraining("draining"), UNREACHABLE])
async def test_a_target_that_fails_leaves_the_request_where_it_runs(
    error: OutOfBlocks | WorkerDraining | TransportError,
) -> None:
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        handle, answer = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        old.load(draining=True)
        await offered(old)
        submit = await new.submitted()
        new.fail(submit.handle, error, handoff=error is UNREACHABLE)
        await settled(router, lambda: not any(driver.state.moving() for driver in router._drivers))
        old.tokens(handle, [52], start=2)
        old.tokens(handle, [53], start=3, finish=FinishReason.LENGTH)
        assert await answer == [50, 51, 52, 53]
        assert metric(router, "diptych_request_migrations_total 0.0")
        assert new.received.empty()


async def test_a_target_that_dies_after_the_seal_is_replaced() -> None:
    async with scripted("mixed", "mixed", "mixed") as (old, new, third), routing(old) as router:
        _, answer = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        old.load(draining=True)
        offer, _ = await offered(old), await new.submitted()
        hand_off(old, offer, 2)
        router.update_fleet([old.info, new.info, third.info])
        await settled(router, lambda: sum(w.is_up for w in router.workers()) == 3)
        old.load(draining=True, num_waiting=7)  # behind the hand-off, on the same stream
        await settled(router, lambda: any(w.load.num_waiting == 7 for w in router.workers()))
        await new.kill()
        submit = await third.submitted()
        assert submit.source.handoff_id == offer.handoff_id
        third.tokens(submit.handle, [52], start=2, finish=FinishReason.STOP)
        assert await answer == [50, 51, 52]


async def test_migration_can_be_switched_off() -> None:
    config = replace(CONFIG, migrate=False)
    async with scripted("mixed", "mixed") as (old, new), routing(old, config=config) as router:
        handle, answer = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        old.load(draining=True, num_free=0, num_running=9)
        await settled(router, lambda: any(w.is_draining for w in router.workers()))
        old.tokens(handle, [52], start=2, finish=FinishReason.STOP)
        assert await answer == [50, 51, 52]
        assert old.received.empty()
        assert new.received.empty()


async def test_a_worker_short_of_blocks_is_relieved_of_its_youngest() -> None:
    async with scripted("mixed", "mixed") as (full, free), routing(full) as router:
        first, second = [await running_at(full, router, max_tokens=20) for _ in range(2)]
        await settled(router, lambda: metric(router, "generation_tokens_total 4.0"))
        router.update_fleet([full.info, free.info])
        await settled(router, lambda: router.health().num_mixed_workers == 2)
        full.load(num_free=1, num_running=2, **SLOW)
        full.load(num_free=1, num_running=2, **SLOW)  # one at a time
        offer, submit = await offered(full), await free.submitted()
        assert offer.handle == second[0]
        hand_off(full, offer, 2)
        free.tokens(submit.handle, [52], start=2, finish=FinishReason.STOP)
        assert await second[1] == [50, 51, 52]
        full.tokens(first[0], [52], start=2, finish=FinishReason.STOP)
        assert await first[1] == [50, 51, 52]
        assert full.received.empty()
        assert router.num_moves == {"memory": 1}


async def test_a_prefix_is_pulled_from_the_worker_that_decoded_the_turn_before() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        decode.send(blocks=worker_pb2.BlockEvents(stored=block_hashes(PROMPT, 4), cleared=True))
        prefill.load(**SLOW)
        await settled(router, lambda: any(w.load.prefill_s for w in router.workers()))
        decode.load(num_running=1)
        await settled(router, lambda: any(w.load.num_running for w in router.workers()))
        answer = reading(router.stream(request()))
        message = await decode.received.get()
        assert message.WhichOneof("message") == "offer_prefix"
        assert tuple(message.offer_prefix.token_ids) == PROMPT[:8]
        source, sink = await prefill.submitted(), await decode.submitted()
        assert source.prefix == worker_pb2.HandoffSource(
            handoff_id=message.offer_prefix.handoff_id,
            address=decode.info.address,
            incarnation=decode.incarnation,
        )
        assert source.prefix.handoff_id != source.offer.handoff_id
        assert not sink.HasField("prefix")
        prefill.tokens(source.handle, [50], finish=FinishReason.STOP)
        assert await answer == [50]
        assert await decode.aborted() == sink.handle


async def test_a_pair_that_cannot_reach_each_other_is_not_tried_again() -> None:
    """The router can reach both P and D, but the request ends on P alone."""
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        answer = reading(router.stream(request()))
        source, sink = await prefill.submitted(), await decode.submitted()
        prefill.tokens(source.handle, [50])
        decode.fail(sink.handle, UNREACHABLE, handoff=True)
        assert await prefill.aborted() == source.handle
        alone = await prefill.submitted()
        assert not alone.HasField("offer")
        prefill.tokens(alone.handle, [51], start=1, finish=FinishReason.STOP)
        assert await answer == [50, 51]
        assert decode.received.empty()


async def test_a_prefill_worker_that_nobody_can_reach_ends_the_request_itself() -> None:
    async with (
        scripted("prefill", "decode", "decode", "decode") as (prefill, *decoders),
        routing(prefill, *decoders) as router,
    ):
        answer = reading(router.stream(request()))
        num_pulls = 0
        alone = None
        while alone is None:
            message = await prefill.received.get()
            if message.WhichOneof("message") == "abort":
                continue
            submit = message.submit
            if not submit.HasField("offer"):
                alone = submit
                break
            prefill.tokens(submit.handle, [50 + len(submit.output_token_ids)], start=len(submit.output_token_ids))
            for _ in range(2):  # the first, and the one that is sent to the same offer
                sink, worker = await _any_submitted(decoders)
                num_pulls += 1
                worker.fail(sink.handle, UNREACHABLE, handoff=True)
                if num_pulls == 3:
                    break
        start = len(alone.output_token_ids)
        prefill.tokens(alone.handle, [50 + start], start=start, finish=FinishReason.STOP)
        assert await answer == [50 + i for i in range(start + 1)]
        assert num_pulls == 3


async def _any_submitted(workers: list[ScriptedWorker]) -> tuple[worker_pb2.Submit, ScriptedWorker]:
    """The next Submit to any of `workers`."""
    while True:
        for worker in workers:
            if not worker.received.empty():
                message = worker.received.get_nowait()
                if message.WhichOneof("message") == "submit":
                    return message.submit, worker
        await asyncio.sleep(0.002)


async def test_a_worker_that_came_back_at_the_same_address_is_another_one() -> None:
    """Its KV was lost with the old process: the request is resumed, and nothing is pulled from there."""
    async with scripted("mixed", "mixed") as (old, other), routing(old) as router:
        _, answer = await running_at(old, router)
        await settled(router, lambda: metric(router, "generation_tokens_total 2.0"))
        port = old.port
        await old.kill()
        await settled(router, lambda: not router.health().ready)
        reborn = ScriptedWorker("mixed")
        await reborn.start(port)
        try:
            router.update_fleet([reborn.info])
            again = await reborn.submitted()
            assert list(again.output_token_ids) == [50, 51]
            assert not again.HasField("source")
            reborn.tokens(again.handle, [52], start=2, finish=FinishReason.STOP)
            assert await answer == [50, 51, 52]
            await settled(router, lambda: [w.info for w in router.workers()] == [reborn.info])
        finally:
            await reborn.kill()
        assert other.num_links == 0


async def test_a_broken_stream_between_router_and_source_ends_the_migration_and_not_the_request() -> None:
    """Both workers continue, but the stream's sequences are aborted there: the state resumes them."""
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        _, answer = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        old.load(draining=True)
        await offered(old)
        sink = await new.submitted()
        old.end_stream()
        assert await new.aborted() == sink.handle
        again = await new.submitted()
        assert list(again.output_token_ids) == [50, 51]
        assert not again.HasField("source")
        new.tokens(again.handle, [52], start=2, finish=FinishReason.STOP)
        assert await answer == [50, 51, 52]


async def test_room_counts() -> None:
    """A draining worker hands nothing to a full worker until that worker has room."""
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        handle, answer = await running_at(old, router)
        router.update_fleet([old.info, new.info])
        await settled(router, lambda: router.health().num_mixed_workers == 2)
        new.load(num_free=1, num_waiting=1)
        await settled(router, lambda: any(w.load.num_waiting for w in router.workers()))
        old.load(draining=True)
        await settled(router, lambda: any(w.is_draining for w in router.workers()))
        assert old.received.empty()
        new.load(num_free=NUM_BLOCKS)
        await settled(router, lambda: all(w.load.num_free_blocks == NUM_BLOCKS for w in router.workers()))
        old.load(draining=True)
        offer = await offered(old)
        assert offer.handle == handle
        submit = await new.submitted()
        hand_off(old, offer, 2)
        new.tokens(submit.handle, [52], start=2, finish=FinishReason.STOP)
        assert await answer == [50, 51, 52]
