"""The router over scripted workers on real sockets: how a request ends that its workers do not finish."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from diptych.cluster.common.demand import KNOWN_S, ControlReport, ControlSeries
from diptych.cluster.front.generation import Generation
from diptych.cluster.front.text_completion import TextCompletion
from diptych.cluster.routing.router import Router
from diptych.cluster.tokens.stop_strings import StopStrings, StopTable
from diptych.workers.common.errors import (
    DeadlineExceeded,
    Overloaded,
    Unavailable,
)
from diptych.workers.common.request import FinishReason, RequestLevel

from ...support.front import byte_tokenizer
from ...support.routing import CONFIG, reading, request, routing, settled
from ...support.scripted_worker import scripted


async def test_a_client_that_leaves_stops_both_workers() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        async with aclosing(router.stream(request())) as stream:
            first = asyncio.create_task(anext(stream))
            source, sink = await prefill.submitted(), await decode.submitted()
            prefill.tokens(source.handle, [50])
            await first
        assert await prefill.aborted() == source.handle
        assert await decode.aborted() == sink.handle
        waiting = asyncio.create_task(anext(router.stream(request())))
        source, sink = await prefill.submitted(), await decode.submitted()
        waiting.cancel()
        assert await prefill.aborted() == source.handle
        assert await decode.aborted() == sink.handle


async def test_the_deadline_stops_both_workers() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        answer = reading(router.stream(request(timeout_s=0.05)))
        with pytest.raises(DeadlineExceeded, match=r"within its 0\.05 s"):
            await answer
        assert (await prefill.submitted()).handle == await prefill.aborted()
        assert (await decode.submitted()).handle == await decode.aborted()


async def test_a_client_that_does_not_read_neither_stops_a_resume_nor_the_deadline() -> None:
    async with scripted("mixed", "mixed") as (first, second), routing(first, second) as router:
        stream = router.stream(request(timeout_s=0.5))
        reader = asyncio.create_task(anext(stream))
        first.tokens((await first.submitted()).handle, [50])
        assert (await reader).token_ids == (50,)
        await first.kill()
        again = await second.submitted()
        second.tokens(again.handle, [51], start=1)
        assert await second.aborted() == again.handle
        assert (await anext(stream)).token_ids == (51,)
        with pytest.raises(DeadlineExceeded):
            await anext(stream)


async def test_a_request_waits_for_a_worker_to_come() -> None:
    async with scripted("mixed", "mixed") as (first, second), routing(first) as router:
        answer = reading(router.stream(request()))
        first.tokens((await first.submitted()).handle, [50])
        await settled(router, lambda: b"generation_tokens_total 1.0" in router.metrics())
        await first.kill()
        await settled(router, lambda: not router.health().ready)
        router.update_fleet([second.info])
        again = await second.submitted()
        assert list(again.output_token_ids) == [50]
        second.tokens(again.handle, [51], start=1, finish=FinishReason.STOP)
        assert await answer == [50, 51]


async def test_no_worker_comes() -> None:
    router = Router(replace(CONFIG, no_worker_wait_s=0.05))
    await router.start()
    with pytest.raises(Unavailable, match="no worker has joined"):
        router.model()
    with pytest.raises(Unavailable, match="no worker has joined"):
        await reading(router.stream(request()))
    with pytest.raises(DeadlineExceeded):
        await reading(router.stream(request(timeout_s=0.01)))
    assert router.health().num_requests == 0
    await router.stop()


async def test_a_request_is_refused_where_the_worker_that_is_started_for_it_comes_too_late() -> None:
    router = Router(replace(CONFIG, no_worker_wait_s=50.0, may_be_empty=True))
    await router.start()
    assert router.health().ready, "requests must come, for a worker to be started"
    answers = {timeout_s: reading(router.stream(request(timeout_s=timeout_s))) for timeout_s in (5.0, 30.0, 600.0)}
    strict = replace(request(), level=RequestLevel(ttft_s=2.0, refuse=True))
    refused = reading(router.stream(strict))
    await settled(router, lambda: router.waiting.num == 4)
    router.on_control(ControlReport())
    assert router.waiting.num == 4
    router.on_control(ControlReport(20.0))
    for answer in (answers[5.0], refused):
        with pytest.raises(Overloaded, match="expected in 20 s") as caught:
            await answer
        assert caught.value.retry_after_s == 20.0
    assert router.waiting.num == 2
    router.on_control(ControlReport(51.0))
    for timeout_s in (30.0, 600.0):
        with pytest.raises(Overloaded, match="expected in 51 s"):
            await answers[timeout_s]
    assert router.waiting.num == 0
    await router.stop()


async def test_a_router_shows_the_metrics_of_the_controller_while_they_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(CONFIG)
    assert b"diptych_pool" not in router.metrics()
    ready = ControlSeries("pool_ready_replicas", "Workers that are ready", "pool", (("decode", 2.0),))
    made = ControlSeries("controller_decisions", "Decisions", "kind", (("budgets", 3.0),), is_counter=True)
    router.on_control(ControlReport(series=(ready, made)))
    assert b'diptych_pool_ready_replicas{pool="decode"} 2.0' in router.metrics()
    assert b'diptych_controller_decisions_total{kind="budgets"} 3.0' in router.metrics()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + KNOWN_S + 1)
    assert b"diptych_pool" not in router.metrics()


async def test_overload_is_refused_at_the_door() -> None:
    config = replace(CONFIG, max_in_flight=2)
    async with scripted("mixed") as (worker,), routing(worker, config=config) as router:
        router.admit(2)
        answers = [reading(router.stream(request())) for _ in range(2)]
        handles = [(await worker.submitted()).handle for _ in answers]
        with pytest.raises(Overloaded) as caught:
            router.admit(1)
        assert 1.0 <= caught.value.retry_after_s <= 60.0
        with pytest.raises(Overloaded):
            await reading(router.stream(request()))
        for handle in handles:
            worker.tokens(handle, [50], finish=FinishReason.STOP)
        assert await asyncio.gather(*answers) == [[50], [50]]
        router.admit(2)


async def test_the_slot_of_an_answer_that_is_not_read_is_free_at_its_deadline() -> None:
    config = replace(CONFIG, max_in_flight=1)
    async with scripted("mixed") as (worker,), routing(worker, config=config) as router:
        tokenizer = byte_tokenizer()
        completion = TextCompletion(
            0,
            request(timeout_s=0.2),
            tokenizer.detokenizer(),
            StopStrings(StopTable(())),
        )
        async with aclosing(Generation(router, "r", [completion], 1).batches()) as batches:
            first = asyncio.create_task(anext(batches))
            worker.tokens((await worker.submitted()).handle, [50])
            assert (await first)[0].token_ids == (50,)
            with pytest.raises(Overloaded):
                router.admit(1)
            await settled(router, lambda: router.health().num_requests == 0)  # no client reads
            router.admit(1)


async def test_stopping_ends_every_request_and_hangs_up() -> None:
    async with scripted("mixed") as (worker,):
        router = Router(CONFIG)
        with pytest.raises(Unavailable, match="not running"):
            await anext(router.stream(request()))
        await router.start()
        router.update_fleet([worker.info])
        answer = reading(router.stream(request()))
        await worker.submitted()
        await router.stop()
        with pytest.raises(Unavailable, match="shutting down"):
            await answer
        assert await worker.ended.get() == 1
        with pytest.raises(Unavailable):
            await anext(router.stream(request()))
