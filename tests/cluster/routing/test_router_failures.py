"""The router over scripted workers on real sockets: workers that are lost, fail or drain."""

import asyncio
from dataclasses import replace

import pytest

from diptych.workers.common.errors import (
    InvalidRequest,
    OutOfBlocks,
    TransportError,
    Unavailable,
    WorkerDraining,
)
from diptych.workers.common.request import FinishReason

from ...support.routing import CONFIG, reading, request, routing, settled
from ...support.scripted_worker import scripted


async def test_a_decode_worker_killed_mid_stream_is_replaced() -> None:
    async with (
        scripted("prefill", "decode", "decode") as (prefill, first, second),
        routing(prefill, first, second) as router,
    ):
        answer = reading(router.stream(request()))
        prefill.tokens((await prefill.submitted()).handle, [50])
        first.tokens((await first.submitted()).handle, [51], start=1)
        await settled(router, lambda: b"generation_tokens_total 2.0" in router.metrics())
        await first.kill()
        again, rest = await prefill.submitted(), await second.submitted()
        assert list(again.output_token_ids) == list(rest.output_token_ids) == [50, 51]
        assert rest.source.handoff_id == again.offer.handoff_id
        prefill.tokens(again.handle, [52], start=2)
        second.tokens(rest.handle, [53], start=3, finish=FinishReason.LENGTH)
        assert await answer == [50, 51, 52, 53]
        assert b"diptych_request_resumes_total 1.0" in router.metrics()


async def test_a_sink_lost_before_its_pull_is_replaced_at_the_same_offer() -> None:
    async with (
        scripted("prefill", "decode", "decode") as (prefill, first, second),
        routing(prefill, first, second) as router,
    ):
        answer = reading(router.stream(request()))
        source = await prefill.submitted()
        await first.submitted()
        await first.kill()
        sink = await second.submitted()
        assert sink.source.handoff_id == source.offer.handoff_id
        prefill.tokens(source.handle, [50])
        second.tokens(sink.handle, [51], start=1, finish=FinishReason.STOP)
        assert await answer == [50, 51]


async def test_without_another_worker_the_one_left_does_it_all() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        answer = reading(router.stream(request()))
        source, sink = await prefill.submitted(), await decode.submitted()
        decode.fail(sink.handle, TransportError("the pull failed"), handoff=True)
        prefill.tokens(source.handle, [50])
        assert await prefill.aborted() == source.handle
        alone = await prefill.submitted()
        assert list(alone.output_token_ids) == [50]
        assert not (alone.HasField("offer") or alone.HasField("source"))
        prefill.tokens(alone.handle, [51], start=1, finish=FinishReason.STOP)
        assert await answer == [50, 51]


async def test_a_draining_worker_is_left_before_its_report_says_so() -> None:
    async with scripted("mixed", "mixed", "mixed", "mixed", "mixed") as workers:
        config = replace(CONFIG, max_attempts=1)
        async with routing(*workers, config=config) as router:
            answer = reading(router.stream(request()))
            for worker in workers[:4]:
                worker.fail((await worker.submitted()).handle, WorkerDraining("draining"))
            workers[4].tokens((await workers[4].submitted()).handle, [50], finish=FinishReason.STOP)
            assert await answer == [50]
            assert [w.is_draining for w in router.workers()] == [True] * 4 + [False]


async def test_failures_are_bounded() -> None:
    async with scripted("mixed") as (worker,), routing(worker) as router:
        answer = reading(router.stream(request()))
        for _ in range(3):
            worker.fail((await worker.submitted()).handle, OutOfBlocks("full"))
        with pytest.raises(Unavailable, match=r"3 attempts.*OutOfBlocks: full"):
            await answer


async def test_connections_that_all_break_at_once_end_no_request() -> None:
    """As where the network between machines is set up anew. Each loss is noticed at once, and costs an attempt until
    the worker answers again."""
    config = replace(CONFIG, hello_timeout_s=0.2, worker_timeout_s=60.0)
    async with scripted("mixed", "mixed", "mixed") as workers, routing(*workers, config=config) as router:
        answer = reading(router.stream(request()))
        asked = {asyncio.create_task(worker.submitted()): worker for worker in workers}
        hellos = [worker.hello for worker in workers]
        for worker in workers:
            worker.hello = None  # out of reach
        while asked:
            for task in (await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED))[0]:
                asked.pop(task).end_stream()
        await settled(router, lambda: not any(worker.is_up for worker in router.workers()))
        assert not answer.done()
        workers[1].hello = hellos[1]
        again = await workers[1].submitted()
        workers[1].tokens(again.handle, [50], finish=FinishReason.STOP)
        assert await answer == [50]


async def test_workers_that_do_not_answer_again_are_not_awaited_for_ever() -> None:
    config = replace(CONFIG, worker_timeout_s=0.5)
    async with scripted("mixed", "mixed", "mixed") as workers, routing(*workers, config=config) as router:
        answer = reading(router.stream(request()))
        asked = {asyncio.create_task(worker.submitted()): worker for worker in workers}
        while asked:
            for task in (await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED))[0]:
                await asked.pop(task).kill()
        with pytest.raises(Unavailable, match=r"3 attempts.*WorkerLost: worker mixed"):
            await answer


async def test_an_error_of_the_client_is_told_as_it_is() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        answer = reading(router.stream(request()))
        sink = await decode.submitted()
        prefill.fail((await prefill.submitted()).handle, InvalidRequest("bad"))
        with pytest.raises(InvalidRequest, match="bad"):
            await answer
        assert await decode.aborted() == sink.handle
        assert b'diptych_requests_total{outcome="invalid_request_error"} 1.0' in router.metrics()
