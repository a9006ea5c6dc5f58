"""Readiness over a source that a person can compute; the clock is the test's."""

import asyncio

import httpx

from diptych.cluster.front.readiness import LEAVING, NO_WORKER, PERIOD_S, DecodeHealth, Readiness
from diptych.workers.common.errors import WorkerLost

from ...support.front import Echo, served


class Clock:
    """Time in seconds, which passes when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_decode_step_is_made_and_counts_for_a_period() -> None:
    source, clock = Echo(), Clock()
    readiness = Readiness(source, clock=clock)
    assert await readiness.decoding() == DecodeHealth(True, 0.0)
    [request] = source.requests
    assert (request.sampling.max_tokens, request.sampling.ignore_eos, request.prompt_token_ids) == (2, True, (0,))
    assert source.num_delivered == 2, "the second token is the decode step's"
    clock.now += PERIOD_S
    assert await readiness.decoding() == DecodeHealth(True, PERIOD_S)
    assert len(source.requests) == 1
    clock.now += 0.5
    assert await readiness.decoding() == DecodeHealth(True, 0.0)
    assert len(source.requests) == 2


async def test_all_who_ask_at_once_share_one_request() -> None:
    source = Echo()
    source.gate.clear()
    readiness = Readiness(source, clock=Clock())
    asking = [asyncio.create_task(readiness.decoding()) for _ in range(50)]
    await asyncio.to_thread(source.all_started(1).wait, 30)
    source.gate.set()
    assert set(await asyncio.gather(*asking)) == {DecodeHealth(True, 0.0)}
    assert len(source.requests) == 1


async def test_users_tokens_are_the_proof_and_nothing_is_computed() -> None:
    source, clock = Echo(), Clock()
    readiness = Readiness(source, clock=clock)
    source.decode_tokens = {"a": 5, "b": 7}
    await readiness.decoding()  # the first look knows no earlier count
    for num in range(6, 9):
        clock.now += 2 * PERIOD_S
        source.decode_tokens["a"] = num
        assert await readiness.decoding() == DecodeHealth(True, 0.0)
    assert len(source.requests) == 1
    clock.now += 2 * PERIOD_S
    source.decode_tokens = {"c": 900}  # another worker, whose earlier count is not known, is no proof
    await readiness.decoding()
    assert len(source.requests) == 2


async def test_a_failure_stands_for_a_period_and_is_told() -> None:
    source, clock = Echo(), Clock()
    source.fail = lambda made: WorkerLost("no worker decodes") if made == 1 else None
    readiness = Readiness(source, clock=clock)
    for _ in range(3):
        assert await readiness.decoding() == DecodeHealth(False, None, "no worker decodes")
    assert len(source.requests) == 1
    source.fail = lambda _: None
    clock.now += PERIOD_S
    assert await readiness.decoding() == DecodeHealth(True, 0.0)


async def test_a_first_token_alone_is_no_decode_step() -> None:
    source = Echo(laps=1)
    source.gate_after = 1
    source.gate.clear()
    found = await Readiness(source, timeout_s=0.05, clock=Clock()).decoding()
    assert (found.ready, found.problem) == (False, "no two tokens within 0.05 s")
    assert len(source.closed) == 1, "its request is given up"


async def test_workers_that_are_too_busy_for_it_but_decode_are_the_proof() -> None:
    source = Echo()
    source.decode_tokens = {"a": 1}

    def fail(_: int) -> WorkerLost:
        source.decode_tokens = {"a": 2}
        return WorkerLost("late")

    source.fail = fail
    assert (await Readiness(source, clock=Clock()).decoding()).ready


async def test_nothing_is_asked_of_pools_that_may_be_empty() -> None:
    source = Echo()
    source.may_be_empty = True
    assert await Readiness(source).decoding() == DecodeHealth(True, None)
    assert source.requests == []


async def test_one_that_leaves_or_has_no_worker_is_not_ready() -> None:
    source = Echo()
    readiness = Readiness(source)
    source.ready = False
    assert await readiness.decoding() == DecodeHealth(False, None, NO_WORKER)
    source.ready = True
    readiness.leave()
    assert not readiness.health().ready
    assert await readiness.decoding() == DecodeHealth(False, None, LEAVING)
    assert source.requests == []


def test_http_answers_without_a_key() -> None:
    source = Echo()
    with served(source, api_key="the key of the clients") as server:
        answer = httpx.get(f"{server.url}/health/decode", timeout=60)
        assert (answer.status_code, answer.json()["status"], answer.json()["problem"]) == (200, "ready", "")
        assert httpx.get(f"{server.url}/health/decode", timeout=60).status_code == 200
        assert [r.sampling.max_tokens for r in source.requests] == [2]
        source.ready = False
        answer = httpx.get(f"{server.url}/health/decode", timeout=60)
        assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
