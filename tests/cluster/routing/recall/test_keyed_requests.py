"""Answers that go on at another router, from what workers have recorded: real workers, hand-computable tokens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.recall.keyed_requests import KeyedRequests, KnownTokens, joined, usable
from diptych.cluster.routing.request_state import RequestState
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2
from diptych.workers.common.errors import AnswerTakenOver, DiptychError, IdempotencyKeyReused
from diptych.workers.common.request import FinishReason, RecordKey, Request, SamplingParams
from diptych.workers.testing.fake_runner import fake_output

from ....support.routing import routing
from ....support.scripted_worker import scripted
from ..test_router_with_workers import CALM, CONFIG, TOKEN, Cluster, cluster, start_worker

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


async def test_all_completions_of_a_call_are_recalled_by_one_message_to_each_worker() -> None:
    num, records = 128, [RecordKey(b"%016d" % i, b"c" * 16) for i in range(128)]
    async with scripted(*["mixed"] * 8) as workers, routing(*workers) as router:
        for i, worker in enumerate(workers):
            worker.records = {
                record.name: worker_pb2.RecalledAnswer(call=record.call, parts=[part(0, *range(1, 10))])
                for record in records[i::8]
            }
        streams = [router.stream(replace(asked(record), request_id=str(i))) for i, record in enumerate(records)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        assert [delta.token_ids for delta in firsts] == [tuple(range(1, 10))] * num
        assert [len(worker.recalls) for worker in workers] == [1] * 8
        assert all(sorted(worker.recalls[0]) == [record.name for record in records] for worker in workers)
        await asyncio.gather(*(stream.aclose() for stream in streams))


@pytest.mark.parametrize("logprobs", [None, 1], ids=["recorded", "made again"])
async def test_an_answer_goes_on_with_the_weights_that_made_its_tokens(logprobs: int | None) -> None:
    requests = [asked(replace(RECORD, name=b"%016d" % i), logprobs=logprobs) for i in range(4)]
    async with cluster("mixed", **CALM) as running:
        for request in requests:
            seen = await read(running.router, request, NUM_SEEN)
            assert seen == EXPECTED[: len(seen)]
        running.workers.append(await start_worker("mixed", 0.0, weights=1, **CALM))
        running.announce()
        while not all(w.is_up for w in running.router.workers()):
            await asyncio.sleep(0.002)
        # Every other request without a record is on the new weights.
        assert [await read(running.router, request) for request in requests] == [EXPECTED] * 4


class Told:
    """Link to a worker with one record."""

    def __init__(self, record: worker_pb2.RecalledAnswer | None) -> None:
        self._record = record

    async def recall(self, name: bytes, timeout_s: float) -> worker_pb2.RecalledAnswer | None:
        return self._record


@dataclass
class Running:
    state: RequestState
    revision: str
    error: DiptychError | None = None

    def fail(self, error: DiptychError) -> None:
        self.error = error


async def test_tokens_of_several_revisions_are_not_joined() -> None:
    def told(*parts: worker_pb2.RecordedTokens) -> Told:
        return Told(recorded(*parts))

    links = [("a", told(part(0, 1, 2))), ("b", told(part(1, 6, 7, 8))), ("", Told(None)), ("b", told(part(0, 5)))]
    keyed = KeyedRequests()
    assert await keyed.recall(asked(), links, 1000) == KnownTokens([5, 6, 7, 8], "b")
    assert await keyed.recall(asked(), links[:2], 1000) == KnownTokens([1, 2], "a")
    assert await keyed.recall(asked(logprobs=1), links, 1000) == KnownTokens([], "b"), "they are made again there"
    assert await keyed.recall(asked(), links, 8) == KnownTokens([1, 2], "a"), "a record of tokens that there are not"
    assert await keyed.recall(asked(), [], 1000) == KnownTokens()
    with pytest.raises(IdempotencyKeyReused):
        await keyed.recall(asked(replace(RECORD, call=b"d" * 16)), links, 1000)


@pytest.mark.parametrize(
    ("own", "recalled", "expected"),
    [
        ([1, 2], KnownTokens([3], "b"), KnownTokens([1, 2], "a")),
        ([1], KnownTokens([1, 2], "b"), KnownTokens([1, 2], "b")),
        ([], KnownTokens([], "b"), KnownTokens([], "b")),
    ],
)
def test_a_running_request_tells_its_revision(own: list[int], recalled: KnownTokens, expected: KnownTokens) -> None:
    keyed, state = KeyedRequests(), RequestState(asked(), 3)
    state.token_ids += own
    before = Running(state, "a")
    assert keyed.begin(asked(), before, KnownTokens()) == KnownTokens()
    assert keyed.begin(asked(), Running(state, ""), recalled) == expected
    assert isinstance(before.error, AnswerTakenOver)


def part(first: int, *token_ids: int) -> worker_pb2.RecordedTokens:
    return worker_pb2.RecordedTokens(first=first, token_ids=token_ids)


def recorded(*parts: worker_pb2.RecordedTokens, is_finished: bool = False) -> worker_pb2.RecalledAnswer:
    return worker_pb2.RecalledAnswer(call=b"c" * 16, parts=parts, is_finished=is_finished)


def test_parts_of_several_workers_are_joined() -> None:
    assert joined([]) == ([], False)
    assert joined([recorded(part(1, 6, 7), is_finished=True), recorded(part(0, 5))]) == ([5, 6, 7], True)
    answers = [recorded(part(0, 5, 6)), recorded(part(1, 6, 7, 8)), recorded(part(0, 5), part(9, 1), is_finished=True)]
    assert joined(answers) == ([5, 6, 7, 8], False)
    assert joined([recorded(part(1, 6))]) == ([], False)


def test_runs_that_differ_are_not_mixed() -> None:
    ended, longer = recorded(part(0, 1, 2, 3, 0), is_finished=True), recorded(part(0, 1, 5, 6, 7, 8, 9))
    assert joined([ended, longer]) == joined([longer, ended]) == ([1, 5, 6, 7, 8, 9], False)
    later = recorded(part(2, 3, 0), is_finished=True)
    assert joined([later, recorded(part(0, 1, 5, 6))]) == ([1, 5, 6], False)
    same_length = recorded(part(0, 1, 2, 3, 4, 5, 0), is_finished=True)
    tokens, is_finished = joined([longer, same_length])
    assert is_finished == (tokens == [1, 2, 3, 4, 5, 0])
    # Nothing tells of which run a part without an overlap is.
    assert joined([recorded(part(0, 1)), recorded(part(0, 2)), recorded(part(1, 7, 8))]) == ([1], False)
    assert joined([recorded(part(0, 1)), recorded(part(1, 7, 8)), recorded(part(1, 9))]) == ([1], False)


def test_a_worker_always_makes_the_last_token() -> None:
    request = asked(max_tokens=4)
    assert usable(request, [1, 2], is_finished=False) == [1, 2]
    assert usable(request, [1, 2], is_finished=True) == [1]
    assert usable(request, [1, 2, 3, 4], is_finished=False) == [1, 2, 3]
    assert usable(request, [], is_finished=False) == []
    assert usable(asked(max_tokens=4, logprobs=1), [1, 2], is_finished=False) == []
