"""Phases of a request as its router reports them, with scripted workers on real sockets."""

import asyncio
from dataclasses import replace

import pytest

from diptych.cluster.common.timings import RequestJournal
from diptych.workers.common.errors import OutOfBlocks, Unavailable
from diptych.workers.common.request import FinishReason
from diptych.workers.common.timings import HandoffTimings, SequenceTimings

from ...support.routing import request, routing, settled
from ...support.scripted_worker import scripted
from .test_router_migration import hand_off, offered

HANDOFF = HandoffTimings(0, 0, last_segment_s=1e-6, release_s=2e-6, num_bytes=64, transport="grpc")


@pytest.mark.parametrize("is_early", [False, True])
async def test_the_last_delta_tells_where_the_time_went(is_early: bool) -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        stream = router.stream(request(max_tokens=3))
        first = asyncio.create_task(anext(stream))
        source, sink = (await prefill.submitted()).handle, (await decode.submitted()).handle
        second = SequenceTimings(0.5e-6, 4e-6, HANDOFF).to_proto(0)
        if is_early:
            decode.tokens(sink, [51], start=1, timings=[second])
            decode.load(num_running=1)
            await settled(router, lambda: any(w.load.num_running for w in router.workers()))
        prefill.tokens(source, [50], timings=[SequenceTimings(1e-6, 3e-6).to_proto(0)])
        deltas = [await first]
        if not is_early:
            decode.tokens(sink, [51], start=1, timings=[second])
            deltas.append(await anext(stream))
        decode.tokens(sink, [52], start=2, finish=FinishReason.LENGTH)
        deltas.append(await anext(stream))
        await stream.aclose()
        timings = deltas[-1].timings
        assert timings is not None and all(d.timings is not None for d in deltas)
        until_first = timings.queue_s + timings.prefill_s + timings.deliver_first_s
        until_second = timings.last_segment_s + timings.commit_s + timings.first_decode_s + timings.deliver_second_s
        assert until_first == pytest.approx(deltas[0].elapsed_s, abs=1e-9)
        assert until_second == pytest.approx(0 if is_early else deltas[1].elapsed_s - deltas[0].elapsed_s, abs=1e-9)
        assert timings.total_s == pytest.approx(deltas[-1].elapsed_s, abs=1e-9)
        assert timings.prefill_s == pytest.approx(3e-6, abs=1e-9)
        if not is_early:
            phases = timings.last_segment_s, timings.commit_s, timings.first_decode_s
            assert phases == pytest.approx((1e-6, 2.5e-6, 4e-6), abs=1e-9)
        assert (timings.handoff_bytes, timings.transport, timings.num_attempts) == (64, "grpc", 1)
        metrics = router.metrics()
        assert b"diptych_handoff_commit_seconds_count 1.0" in metrics
        assert b"diptych_request_first_decode_seconds_count 1.0" in metrics


async def test_a_resumed_requests_timings_are_of_the_attempt_that_made_its_tokens() -> None:
    async with scripted("mixed", "mixed") as workers, routing(*workers) as router:
        stream = router.stream(request(max_tokens=3))
        first = asyncio.create_task(anext(stream))
        submits = {asyncio.create_task(w.submitted()): w for w in workers}
        done, (other,) = await asyncio.wait(submits, return_when=asyncio.FIRST_COMPLETED)
        lost = done.pop()
        submits[lost].fail(lost.result().handle, OutOfBlocks("full"))
        worker, submit = submits[other], await other
        worker.tokens(submit.handle, [50], timings=[SequenceTimings(1e-6, 3e-6).to_proto(0)])
        timings = (await first).timings
        assert timings is not None and timings.num_attempts == 2
        assert timings.prefill_s == pytest.approx(3e-6, abs=1e-9) and timings.queue_s > 1e-6
        worker.tokens(submit.handle, [51, 52], start=1, finish=FinishReason.LENGTH)
        timings = (await anext(stream)).timings
        assert timings is not None and (timings.last_segment_s, timings.commit_s, timings.transport) == (0, 0, "")
        assert timings.first_decode_s > 0 and timings.deliver_second_s == 0
        await stream.aclose()


@pytest.mark.parametrize("num_before", [1, 2])
async def test_a_migration_is_counted_and_its_pull_told_where_the_second_token_waited_for_it(num_before: int) -> None:
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        stream = router.stream(request(max_tokens=20))
        first = asyncio.create_task(anext(stream))
        handle = (await old.submitted()).handle
        word = SequenceTimings(1e-6, 3e-6).to_proto(0)
        old.tokens(handle, range(50, 50 + num_before), timings=[word])
        deltas = [await first]
        router.update_fleet([old.info, new.info])
        old.load(draining=True, num_running=1)
        offer = await offered(old)
        submit = await new.submitted()
        hand_off(old, offer, num_before)
        word = SequenceTimings(0.5e-6, 4e-6, HANDOFF).to_proto(0)
        rest = range(50 + num_before, 53)
        new.tokens(submit.handle, rest, start=num_before, finish=FinishReason.STOP, timings=[word])
        deltas += [delta async for delta in stream]
        assert [t for d in deltas for t in d.token_ids] == [50, 51, 52]
        timings = deltas[-1].timings
        assert timings is not None and (timings.num_attempts, timings.num_migrations) == (1, 1)
        assert timings.prefill_s == pytest.approx(3e-6, abs=1e-9)
        if num_before == 1:
            assert timings.commit_s > 2.5e-6 and timings.first_decode_s == pytest.approx(4e-6, abs=1e-9)
        assert timings.transport == ("grpc" if num_before == 1 else "")


def told(journal: RequestJournal) -> list[tuple[str, str, str]]:
    return [(event.what, event.worker, event.detail) for event in journal.events]


async def test_a_journal_has_every_attempt_and_workers_get_its_trace() -> None:
    async with scripted("mixed", "mixed") as workers, routing(*workers) as router:
        journal = RequestJournal(traceparent="00-trace-span-01", tracestate="a=1")
        stream = router.stream(replace(request(max_tokens=1), trace=journal))
        first = asyncio.create_task(anext(stream))
        submits = {asyncio.create_task(w.submitted()): w for w in workers}
        done, (other,) = await asyncio.wait(submits, return_when=asyncio.FIRST_COMPLETED)
        asked = done.pop()
        lost, submit = submits[asked], asked.result()
        assert (submit.traceparent, submit.tracestate) == ("00-trace-span-01", "a=1")
        lost.fail(submit.handle, OutOfBlocks("full"))
        again, worker = await other, submits[other]
        assert again.traceparent == "00-trace-span-01"
        assert journal.ended_at is None
        worker.tokens(again.handle, [50], finish=FinishReason.LENGTH)
        delta = await first
        await stream.aclose()
        one, two = (w.info.name or w.incarnation for w in (lost, worker))
        assert told(journal) == [
            ("submitted", one, "alone"),
            ("failed", one, OutOfBlocks.code),
            ("submitted", two, "alone"),
        ]
        assert journal.timings == delta.timings
        assert (journal.error, journal.num_cached) == (None, 0)
        assert journal.times is not None and journal.ended_at is not None
        assert journal.times.started_at <= journal.events[0].at <= journal.events[-1].at <= journal.ended_at


async def test_a_journal_tells_of_a_migration() -> None:
    async with scripted("mixed", "mixed") as (old, new), routing(old) as router:
        journal = RequestJournal()
        stream = router.stream(replace(request(max_tokens=20), trace=journal))
        first = asyncio.create_task(anext(stream))
        submit = await old.submitted()
        assert (submit.traceparent, submit.tracestate) == ("", "")
        old.tokens(submit.handle, [50])
        await first
        router.update_fleet([old.info, new.info])
        old.load(draining=True, num_running=1)
        offer = await offered(old)
        moved = await new.submitted()
        hand_off(old, offer, 1)
        new.tokens(moved.handle, [51], start=1, finish=FinishReason.STOP)
        assert [token async for delta in stream for token in delta.token_ids] == [51]
        assert [(what, detail) for what, _, detail in told(journal)] == [
            ("submitted", "alone"),
            ("migrates from", "alone"),
            ("submitted", "decode"),
        ]
        assert journal.timings is not None and journal.timings.num_migrations == 1


async def test_a_journal_tells_why_a_request_ended() -> None:
    async with scripted("mixed") as (worker,), routing(worker) as router:
        journal = RequestJournal()
        stream = router.stream(replace(request(max_tokens=20), trace=journal))
        first = asyncio.create_task(anext(stream))
        await worker.submitted()
        await router.stop()
        with pytest.raises(Unavailable):
            await first
        assert journal.error is not None and journal.error.code == Unavailable.code
        assert (journal.timings, told(journal)[0][0]) == (None, "submitted")
