"""The router over scripted workers on real sockets: every way in which a request can go, and its ends."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from diptych.cluster.routing.generation import Generation, TextCompletion, TokenDelta
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.cluster.tokens.stop_strings import StopStrings, StopTable
from diptych.proto import worker_pb2
from diptych.workers.common.errors import (
    ConfigError,
    DeadlineExceeded,
    DiptychError,
    InvalidRequest,
    OutOfBlocks,
    Overloaded,
    TransportError,
    Unavailable,
    WorkerDraining,
)
from diptych.workers.common.request import FinishReason, Request, SamplingParams
from diptych.workers.core.prefix_cache import block_hashes

from ...support.front import byte_tokenizer
from ...support.scripted_worker import MODEL, ScriptedWorker, scripted

TIMEOUT_S = 20.0
PROMPT = tuple(range(1, 10))
CONFIG = RoutingConfig(reconnect_s=0.01, max_reconnect_s=0.02)


def request(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4, timeout_s: float = 60.0) -> Request:
    return Request("request", prompt, SamplingParams(max_tokens=max_tokens, seed=7), timeout_s=timeout_s)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


@asynccontextmanager
async def routing(*workers: ScriptedWorker, config: RoutingConfig = CONFIG) -> AsyncIterator[Router]:
    """A router with links to all of `workers`; checks afterwards that nothing is left in flight."""
    router = Router(config)
    router.update_fleet([w.info for w in workers])
    await router.start()
    while not all(w.is_up for w in router.snapshot()):
        await asyncio.sleep(0.002)
    try:
        yield router
        assert router.health().num_requests == 0
        assert [w.num_in_flight for w in router.snapshot()] == [0] * len(router.snapshot())
    finally:
        await router.stop()


def reading(stream: AsyncGenerator[TokenDelta, None]) -> asyncio.Task[list[int]]:
    """All tokens of a stream, read in a task."""

    async def read() -> list[int]:
        return [t async for delta in stream for t in delta.token_ids]

    return asyncio.create_task(read())


async def settled(router: Router, condition: Callable[[], bool]) -> None:
    """Yield until what the router has been told shows."""
    while not condition():
        await asyncio.sleep(0.002)


# -- the plain way -------------------------------------------------------------------------------------------------


def test_prefill_and_decode_share_a_request() -> None:
    async def test() -> None:
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
            assert [w.num_in_flight for w in router.snapshot()] == [1, 1]
            prefill.tokens(at_prefill.handle, [50], cached=[worker_pb2.CachedTokens(entry=0, num_tokens=4)])
            decode.tokens(at_decode.handle, [51, 52], start=1)
            decode.tokens(at_decode.handle, [53], start=3, finish=FinishReason.LENGTH)
            assert await answer == [50, 51, 52, 53]
            assert prefill.received.empty()
            assert decode.received.empty()

    run(test)


def test_the_first_token_does_not_wait_for_the_second_and_the_last_says_why_it_is() -> None:
    async def test() -> None:
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

    run(test)


@pytest.mark.parametrize("block_size", [4, 2])  # the prefill worker's is 4
def test_a_prefix_that_the_decode_worker_holds_is_not_prefilled_elsewhere(block_size: int) -> None:
    async def test() -> None:
        config = replace(CONFIG, alone_below_tokens=4)
        async with (
            scripted("prefill", "decode") as (prefill, decode),
            routing(prefill, config=config) as router,
        ):
            assert decode.hello is not None
            decode.hello.layout.block_size = block_size
            router.update_fleet([prefill.info, decode.info])
            await settled(router, lambda: sum(w.is_up for w in router.snapshot()) == 2)
            decode.send(blocks=worker_pb2.BlockEvents(stored=block_hashes(PROMPT, block_size), cleared=True))
            decode.load(num_running=5)
            await settled(router, lambda: any(w.load.num_running for w in router.snapshot()))
            answer = reading(router.stream(request()))
            submit = await decode.submitted()
            assert not (submit.HasField("offer") or submit.HasField("source"))
            decode.tokens(submit.handle, [50], finish=FinishReason.STOP)
            assert await answer == [50]
            await decode.kill()  # and with it, what it held
            await settled(router, lambda: not all(w.is_up for w in router.snapshot()))
            await decode.start(decode.port)
            await settled(router, lambda: all(w.is_up for w in router.snapshot()))
            answer = reading(router.stream(request()))
            prefill.tokens((await prefill.submitted()).handle, [50], finish=FinishReason.STOP)
            assert await answer == [50]

    run(test)


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_decode_worker_killed_mid_stream_is_replaced() -> None:
    async def test() -> None:
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

    run(test)


def test_a_sink_lost_before_its_pull_is_replaced_at_the_same_offer() -> None:
    async def test() -> None:
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

    run(test)


def test_without_another_worker_the_one_left_does_it_all() -> None:
    async def test() -> None:
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

    run(test)


def test_a_draining_worker_is_left_before_its_report_says_so() -> None:
    async def test() -> None:
        async with scripted("mixed", "mixed", "mixed", "mixed", "mixed") as workers:
            config = replace(CONFIG, max_attempts=1)
            async with routing(*workers, config=config) as router:
                answer = reading(router.stream(request()))
                for worker in workers[:4]:
                    worker.fail((await worker.submitted()).handle, WorkerDraining("draining"))
                workers[4].tokens((await workers[4].submitted()).handle, [50], finish=FinishReason.STOP)
                assert await answer == [50]
                assert [w.is_draining for w in router.snapshot()] == [True] * 4 + [False]

    run(test)


def test_failures_are_bounded() -> None:
    async def test() -> None:
        async with scripted("mixed") as (worker,), routing(worker) as router:
            answer = reading(router.stream(request()))
            for _ in range(3):
                worker.fail((await worker.submitted()).handle, OutOfBlocks("full"))
            with pytest.raises(Unavailable, match=r"3 attempts.*OutOfBlocks: full"):
                await answer

    run(test)


def test_an_error_of_the_client_is_told_as_it_is() -> None:
    async def test() -> None:
        async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
            answer = reading(router.stream(request()))
            sink = await decode.submitted()
            prefill.fail((await prefill.submitted()).handle, InvalidRequest("bad"))
            with pytest.raises(InvalidRequest, match="bad"):
                await answer
            assert await decode.aborted() == sink.handle
            assert b'diptych_requests_total{outcome="invalid_request_error"} 1.0' in router.metrics()

    run(test)


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_stops_both_workers() -> None:
    async def test() -> None:
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

    run(test)


def test_the_deadline_stops_both_workers() -> None:
    async def test() -> None:
        async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
            answer = reading(router.stream(request(timeout_s=0.05)))
            with pytest.raises(DeadlineExceeded, match=r"within its 0\.05 s"):
                await answer
            assert (await prefill.submitted()).handle == await prefill.aborted()
            assert (await decode.submitted()).handle == await decode.aborted()

    run(test)


def test_a_client_that_does_not_read_neither_stops_a_resume_nor_the_deadline() -> None:
    async def test() -> None:
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

    run(test)


def test_a_request_waits_for_a_worker_to_come() -> None:
    async def test() -> None:
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

    run(test)


def test_no_worker_comes() -> None:
    async def test() -> None:
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

    run(test)


def test_overload_is_refused_at_the_door() -> None:
    async def test() -> None:
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

    run(test)


def test_the_slot_of_an_answer_that_is_not_read_is_free_at_its_deadline() -> None:
    async def test() -> None:
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
                await settled(router, lambda: router.health().num_requests == 0)  # and nobody reads
                router.admit(1)

    run(test)


def test_stopping_ends_every_request_and_hangs_up() -> None:
    async def test() -> None:
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

    run(test)


# -- the fleet -----------------------------------------------------------------------------------------------------


def test_a_worker_that_is_not_listed_any_more_finishes_what_it_has() -> None:
    async def test() -> None:
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
            assert [w.info for w in router.snapshot()] == [staying.info]

    run(test)


def test_a_worker_that_is_not_listed_any_more_dies_with_what_it_offers() -> None:
    async def test() -> None:
        async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
            answers = [reading(router.stream(request())) for _ in range(3)]
            for _ in answers:
                prefill.tokens((await prefill.submitted()).handle, [50])
            await settled(router, lambda: b"generation_tokens_total 3.0" in router.metrics())
            router.update_fleet([decode.info])
            await prefill.kill()
            await settled(router, lambda: [w.info for w in router.snapshot()] == [decode.info])
            for _ in answers:
                decode.tokens((await decode.submitted()).handle, [51], start=1, finish=FinishReason.STOP)
            assert await asyncio.gather(*answers) == [[50, 51]] * 3

    run(test)


def test_a_worker_with_another_model_is_refused_and_reported() -> None:
    async def test() -> None:
        async with scripted("mixed", "mixed") as (worker, stranger), routing(worker) as router:
            assert stranger.hello is not None
            stranger.hello.layout.num_layers = 32
            router.update_fleet([worker.info, stranger.info])
            await settled(router, lambda: any("num_layers: 1 here, 32 there" in w.problem for w in router.snapshot()))
            assert router.health().num_mixed_workers == 1
            answer = reading(router.stream(request()))
            worker.tokens((await worker.submitted()).handle, [50], finish=FinishReason.STOP)
            assert await answer == [50]

    run(test)


def test_two_hundred_requests_on_workers_that_come_and_go() -> None:
    """Each worker answers with its prompt's sum plus the position, and dies after some steps."""

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
            await worker.kill()
            worker.received = asyncio.Queue()
            await worker.start(worker.port)

    async def test() -> None:
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

    run(test)


def test_settings_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="max_in_flight"):
        Router(RoutingConfig(max_in_flight=0))
    assert issubclass(ConfigError, DiptychError)
