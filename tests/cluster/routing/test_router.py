"""The router over scripted workers on real sockets: a request that goes well, and a fleet that changes."""

import asyncio
from dataclasses import replace

import pytest

from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.cluster.routing.token_source import TokenDelta
from diptych.proto import worker_pb2
from diptych.workers.common.errors import (
    ConfigError,
    DiptychError,
)
from diptych.workers.common.request import FinishReason
from diptych.workers.core.prefix_cache import block_hashes

from ...support.routing import CONFIG, PROMPT, reading, request, routing, settled
from ...support.scripted_worker import MODEL, ScriptedWorker, scripted


async def test_prefill_and_decode_share_a_request() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        assert router.model() == MODEL
        answer = reading(router.stream(request()))
        at_prefill, at_decode = await prefill.submitted(), await decode.submitted()
        assert tuple(at_prefill.prompt_token_ids) == tuple(at_decode.prompt_token_ids) == PROMPT
        assert (at_prefill.sampling.seed, at_prefill.sampling.max_tokens) == (7, 4)
        assert 0 < at_prefill.timeout_s <= 60
        assert len(at_prefill.offer.handoff_id) == 32
        assert at_decode.source == worker_pb2.HandoffSource(
            handoff_id=at_prefill.offer.handoff_id,
            address=prefill.info.address,
            incarnation=prefill.incarnation,
        )
        assert [w.num_in_flight for w in router.workers()] == [1, 1]
        prefill.tokens(at_prefill.handle, [50], cached=[worker_pb2.CachedTokens(entry=0, num_tokens=4)])
        decode.tokens(at_decode.handle, [51, 52], start=1)
        decode.tokens(at_decode.handle, [53], start=3, finish=FinishReason.LENGTH)
        assert await answer == [50, 51, 52, 53]
        assert prefill.received.empty()
        assert decode.received.empty()


async def test_the_first_token_does_not_wait_for_the_second_and_the_last_says_why_it_is() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        stream = router.stream(request())
        first = asyncio.create_task(anext(stream))
        handle = (await prefill.submitted()).handle
        prefill.tokens(handle, [50], cached=[worker_pb2.CachedTokens(entry=0, num_tokens=4)])
        assert await first == TokenDelta((50,), num_cached_tokens=4)
        decode.tokens((await decode.submitted()).handle, [51], start=1, finish=FinishReason.STOP)
        assert await anext(stream) == TokenDelta((51,), finish_reason=FinishReason.STOP)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.parametrize("block_size", [4, 2])  # the prefill worker's is 4
async def test_a_prefix_that_the_decode_worker_holds_is_not_prefilled_elsewhere(block_size: int) -> None:
    cost = worker_pb2.StepCost(
        fixed_s=0.004, decode_s=0.001, prefill_s=0.001, prefill_is_measured=True, decode_is_measured=True
    )
    async with (
        scripted("prefill", "decode") as (prefill, decode),
        routing(prefill, config=replace(CONFIG, predict=True)) as router,
    ):
        assert decode.hello is not None
        decode.hello.layout.block_size = block_size
        router.update_fleet([prefill.info, decode.info])
        await settled(router, lambda: sum(w.is_up for w in router.workers()) == 2)
        decode.send(blocks=worker_pb2.BlockEvents(stored=block_hashes(PROMPT, block_size), cleared=True))
        decode.load(step_cost=cost)
        await settled(router, lambda: any(w.load.step_cost.fixed_s for w in router.workers()))
        answer = reading(router.stream(request()))
        submit = await decode.submitted()
        assert not (submit.HasField("offer") or submit.HasField("source"))
        decode.tokens(submit.handle, [50], finish=FinishReason.STOP)
        assert await answer == [50]
        await decode.kill()  # its KV is lost too
        await settled(router, lambda: not all(w.is_up for w in router.workers()))
        await decode.start(decode.port)
        await settled(router, lambda: all(w.is_up for w in router.workers()))
        prefill.send(blocks=worker_pb2.BlockEvents(stored=block_hashes(PROMPT, 4)[:1], cleared=True))
        prefill.load(step_cost=cost)
        await settled(router, lambda: any(w.load.step_cost.fixed_s for w in router.workers()))
        answer = reading(router.stream(request()))
        prefill.tokens((await prefill.submitted()).handle, [50], finish=FinishReason.STOP)
        assert await answer == [50]


async def test_a_worker_that_is_not_listed_any_more_finishes_what_it_has() -> None:
    async with scripted("mixed", "mixed") as (leaving, staying), routing(leaving, staying) as router:
        answer = reading(router.stream(request()))
        handle = (await leaving.submitted()).handle
        router.update_fleet([staying.info])
        other = reading(router.stream(request()))
        staying.tokens((await staying.submitted()).handle, [60], finish=FinishReason.STOP)
        assert await other == [60]
        leaving.tokens(handle, [50], finish=FinishReason.STOP)
        assert await answer == [50]
        assert await leaving.ended.get() == 1
        assert [w.info for w in router.workers()] == [staying.info]


async def test_a_worker_that_is_not_listed_any_more_dies_with_what_it_offers() -> None:
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        answers = [reading(router.stream(request())) for _ in range(3)]
        for _ in answers:
            prefill.tokens((await prefill.submitted()).handle, [50])
        await settled(router, lambda: b"generation_tokens_total 3.0" in router.metrics())
        router.update_fleet([decode.info])
        await prefill.kill()
        await settled(router, lambda: [w.info for w in router.workers()] == [decode.info])
        for _ in answers:
            decode.tokens((await decode.submitted()).handle, [51], start=1, finish=FinishReason.STOP)
        assert await asyncio.gather(*answers) == [[50, 51]] * 3


async def test_a_worker_with_another_model_is_refused_and_reported() -> None:
    async with scripted("mixed", "mixed") as (worker, stranger), routing(worker) as router:
        assert stranger.hello is not None
        stranger.hello.layout.num_layers = 32
        router.update_fleet([worker.info, stranger.info])
        await settled(router, lambda: any("num_target_layers: 1 here, 32 there" in w.problem for w in router.workers()))
        assert router.health().num_mixed_workers == 1
        answer = reading(router.stream(request()))
        worker.tokens((await worker.submitted()).handle, [50], finish=FinishReason.STOP)
        assert await answer == [50]


async def test_two_hundred_requests_on_workers_that_come_and_go() -> None:
    """Each worker answers with the sum of its prompt plus the position, and ends after some steps."""

    async def serve(worker: ScriptedWorker, num_steps: int) -> None:
        for _ in range(num_steps):
            message = await worker.received.get()
            if message.WhichOneof("message") == "abort":
                continue
            submit = message.submit
            first, done = sum(submit.prompt_token_ids) % 900, len(submit.output_token_ids)
            kind = next((name for name in ("offer", "source") if submit.HasField(name)), None)
            start, end = {None: (done, 6), "offer": (done, done + 1), "source": (done + 1, 6)}[kind]
            for position in range(start, end):
                reason = FinishReason.LENGTH if position == 5 else None
                worker.tokens(submit.handle, [first + position], start=position, finish=reason)

    async def live(worker: ScriptedWorker, num_steps: int) -> None:
        while True:
            await serve(worker, num_steps)
            await worker.written()  # many requests may have come as one message
            await worker.kill()
            worker.received = asyncio.Queue()
            await worker.start(worker.port)

    config = replace(CONFIG, max_attempts=50)
    async with (
        scripted("prefill", "prefill", "decode", "decode", "mixed") as workers,
        routing(*workers, config=config) as router,
    ):
        lives = [asyncio.create_task(live(w, 17 + 5 * i)) for i, w in enumerate(workers)]
        answers = [reading(router.stream(request((i + 1,), max_tokens=6))) for i in range(200)]
        found = await asyncio.gather(*answers)
        assert found == [[i + 1 + position for position in range(6)] for i in range(200)]
        for task in lives:
            task.cancel()
        ends = await asyncio.gather(*lives, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


def test_settings_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="max_in_flight"):
        Router(RoutingConfig(max_in_flight=0))
    assert issubclass(ConfigError, DiptychError)
