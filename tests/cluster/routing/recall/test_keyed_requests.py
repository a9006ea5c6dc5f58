"""Answers that go on at another router, from what workers have recorded: real workers, hand-computable tokens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.recall.keyed_requests import joined, usable
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2
from diptych.workers.common.errors import AnswerTakenOver, IdempotencyKeyReused
from diptych.workers.common.request import FinishReason, RecordKey, Request, SamplingParams
from diptych.workers.testing.fake_runner import fake_output

from ....support.routing import routing
from ....support.scripted_worker import scripted
from ..test_router_with_workers import CALM, CONFIG, TOKEN, Cluster, cluster

RECORD = RecordKey(b"n" * 16, b"c" * 16)
PROMPT = [3, 5, 7, 11, 13, 17, 19]
NUM_TOKENS, NUM_SEEN = 60, 30
EXPECTED = fake_output(PROMPT, NUM_TOKENS)


def asked(record: RecordKey | None = RECORD, max_tokens: int = NUM_TOKENS, logprobs: int | None = None) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs)
    return Request("asked", tuple(PROMPT), sampling, timeout_s=60.0, record=record)


async def read(router: Router, request: Request, num: int = NUM_TOKENS) -> list[int]:
    """Tokens of an answer; the client leaves after `num`."""
    tokens: list[int] = []
    async with aclosing(router.stream(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            if len(tokens) >= num:
                break
    return tokens


@asynccontextmanager
async def another(running: Cluster, config: RoutingConfig = CONFIG) -> AsyncGenerator[Router, None]:
    """A second router of the same workers."""
    router = Router(config, TOKEN)
    router.update_fleet([w.info for w in running.workers])
    await router.start()
    while not all(w.is_up for w in router.workers()):
        await asyncio.sleep(0.002)
    try:
        yield router
        assert router.health().num_requests == 0
    finally:
        await router.stop()


def steps(running: Cluster) -> int:
    return sum(worker.runner.num_steps for worker in running.workers)


def test_the_answer_is_long_enough_to_be_cut() -> None:
    assert len(EXPECTED) == NUM_TOKENS


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")], ids="+".join)
async def test_another_router_goes_on_after_the_recorded_tokens(roles: tuple[str, ...]) -> None:
    async with cluster(*roles, step_s=0.002, **CALM) as running, another(running) as second:
        seen = await read(running.router, asked(), NUM_SEEN)
        await running.router.stop()  # as if it were lost: its streams break
        before = steps(running)
        assert await read(second, asked()) == EXPECTED
        assert seen == EXPECTED[: len(seen)]
        assert steps(running) - before < NUM_TOKENS - NUM_SEEN + 8, "what was recorded is not computed again"


async def test_an_answer_that_has_ended_is_not_made_again() -> None:
    async with cluster("prefill", "decode", **CALM) as running, another(running) as second:
        assert await read(running.router, asked()) == EXPECTED
        for router in (second, running.router):
            before = steps(running)
            assert await read(router, asked()) == EXPECTED
            assert steps(running) - before < NUM_TOKENS // 4, "it is read, 8 tokens a step, not made"


async def test_without_a_record_the_tokens_are_made_again() -> None:
    async with cluster("mixed", **CALM) as running, another(running) as second:
        await read(running.router, asked(None), NUM_SEEN)
        assert await read(second, asked()) == EXPECTED


async def test_another_call_with_the_key_is_refused() -> None:
    other = replace(RECORD, call=b"d" * 16)
    async with cluster("mixed", step_s=0.002, **CALM) as running, another(running) as second:
        async with aclosing(running.router.stream(asked())) as deltas:
            await anext(deltas)
            for router in (running.router, second):
                with pytest.raises(IdempotencyKeyReused):
                    await read(router, asked(other))
        with pytest.raises(IdempotencyKeyReused):
            await read(second, asked(other))
        assert await read(second, asked(replace(other, name=b"m" * 16))) == EXPECTED


async def test_the_newer_of_two_calls_goes_on_with_the_answer() -> None:
    async with cluster("prefill", "decode", step_s=0.002, **CALM) as running:
        first, seen = running.router.stream(asked()), list[int]()
        while len(seen) < NUM_SEEN:
            seen += (await anext(first)).token_ids
        newer = asyncio.create_task(read(running.router, asked()))
        with pytest.raises(AnswerTakenOver):
            async for delta in first:
                seen += delta.token_ids
        assert await newer == EXPECTED
        assert seen == EXPECTED[: len(seen)]
        before = steps(running)
        assert await read(running.router, asked()) == EXPECTED
        assert steps(running) - before < NUM_TOKENS // 4, "it is read, 8 tokens a step, not made"


async def test_two_routers_at_once_make_the_same_answer() -> None:
    async with cluster("prefill", "decode", step_s=0.001, **CALM) as running, another(running) as second:
        answers = await asyncio.gather(*(read(router, asked()) for router in (running.router, second)))
        assert answers == [EXPECTED] * 2


async def test_a_worker_of_an_earlier_version_has_no_records() -> None:
    async with scripted("mixed") as [worker], routing(worker) as router:
        reading = asyncio.create_task(read(router, asked(max_tokens=3)))
        submit = await worker.submitted()
        assert submit.record.name == RECORD.name and submit.record.call == RECORD.call
        worker.tokens(submit.handle, [1, 2, 3], finish=FinishReason.LENGTH)
        assert await reading == [1, 2, 3]


def part(first: int, *token_ids: int) -> worker_pb2.RecordedTokens:
    return worker_pb2.RecordedTokens(first=first, token_ids=token_ids)


def test_parts_of_several_workers_are_joined() -> None:
    assert joined([]) == []
    assert joined([part(1, 6, 7), part(0, 5)]) == [5, 6, 7]
    assert joined([part(0, 5, 6), part(1, 6, 7, 8), part(0, 5), part(9, 1)]) == [5, 6, 7, 8]
    assert joined([part(1, 6)]) == []


def test_a_worker_always_makes_the_last_token() -> None:
    request = asked(max_tokens=4)
    assert usable(request, [1, 2], is_finished=False) == [1, 2]
    assert usable(request, [1, 2], is_finished=True) == [1]
    assert usable(request, [1, 2, 3, 4], is_finished=False) == [1, 2, 3]
    assert usable(request, [], is_finished=False) == []
    assert usable(asked(max_tokens=4, logprobs=1), [1, 2], is_finished=False) == []
