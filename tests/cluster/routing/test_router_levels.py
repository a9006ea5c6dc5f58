"""Levels of requests at the router: how they reach workers, refusals, and counters."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from diptych.cluster.common.admission import RouterLoad
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2
from diptych.workers.common.errors import Overloaded
from diptych.workers.common.request import FinishReason, RequestLevel

from ...support.routing import reading, request, routing, settled
from ...support.scripted_worker import ScriptedWorker, scripted

COST = worker_pb2.StepCost(
    fixed_s=0.004, decode_s=0.001, prefill_s=0.001, prefill_is_measured=True, decode_is_measured=True
)
REFUSE = RequestLevel(ttft_s=0.5, tpot_s=0.05, refuse=True, model="chat", tier="flex")


async def measured(router: Router, worker: ScriptedWorker, **load: Any) -> None:
    """Report a load with the costs of steps, and wait until the router has it."""
    worker.load(step_cost=COST, **load)
    (view,) = router.workers()
    tokens = load.get("num_waiting_tokens", 0)
    await settled(router, lambda: view.load.HasField("step_cost") and view.load.num_waiting_tokens == tokens)
    assert view.reported_at > 0


def counted(router: Router) -> dict[str, float]:
    """Requests by outcome, of their level."""
    lines = [line for line in router.metrics().decode().splitlines() if line.startswith("diptych_level_requests_total")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def finish(worker: ScriptedWorker, answer: asyncio.Task[list[int]]) -> worker_pb2.Submit:
    submit = await worker.submitted()
    worker.tokens(submit.handle, [50, 51, 52, 53], finish=FinishReason.LENGTH)
    assert await answer == [50, 51, 52, 53]
    return submit


async def test_workers_learn_what_the_request_asks_for_and_nothing_else() -> None:
    async with scripted("mixed") as (worker,), routing(worker) as router:
        for level in (RequestLevel(), RequestLevel(0.5), RequestLevel(None, 0.05), RequestLevel(0.5, 0.05)):
            submit = await finish(worker, reading(router.stream(replace(request(), level=level))))
            assert submit.level.HasField("ttft_s") == (level.ttft_s is not None)
            assert submit.level.HasField("tpot_s") == (level.tpot_s is not None)
            assert (submit.level.ttft_s, submit.level.tpot_s) == (level.ttft_s or 0, level.tpot_s or 0)


async def test_who_would_rather_be_refused_than_late_is_refused_with_the_time_that_the_queue_takes() -> None:
    hurried, patient = replace(request(), level=REFUSE), replace(request(), level=replace(REFUSE, refuse=False))
    async with scripted("mixed") as (worker,), routing(worker) as router:
        await finish(worker, reading(router.stream(hurried)))  # nothing is measured yet
        await measured(router, worker)
        await finish(worker, reading(router.stream(hurried)))  # idle
        await measured(router, worker, num_waiting_tokens=4500)
        with pytest.raises(Overloaded, match="first token is predicted to be") as refused:
            await anext(router.stream(hurried))
        # A step of 4 ms, a queue of 4.5 s, a prompt of 9 ms; half a second is asked for.
        assert refused.value.retry_after_s == pytest.approx(4.013, abs=0.001)
        await finish(worker, reading(router.stream(patient)))
        assert counted(router) == {"met": 3, "refused": 1}
        await measured(router, worker, num_waiting_tokens=400)
        await finish(worker, reading(router.stream(hurried)))


async def test_a_request_that_has_begun_is_never_refused() -> None:
    async with scripted("mixed", "mixed") as (one, other), routing(one, other) as router:
        answer = reading(router.stream(replace(request(), level=REFUSE)))
        while one.received.empty() and other.received.empty():
            await asyncio.sleep(0.002)
        first, second = (one, other) if not one.received.empty() else (other, one)
        submit = await first.submitted()
        first.tokens(submit.handle, [50])
        second.load(step_cost=COST, num_waiting_tokens=100_000)
        await settled(router, lambda: any(w.load.num_waiting_tokens for w in router.workers()))
        await first.kill()
        resumed = await second.submitted()
        assert resumed.level.ttft_s == 0.5
        second.tokens(resumed.handle, [51, 52, 53], start=1, finish=FinishReason.LENGTH)
        assert await answer == [50, 51, 52, 53]


async def test_the_outlook_is_what_the_router_would_decide_of_the_least_request() -> None:
    async with scripted("mixed") as (worker,), routing(worker) as router:
        before = router.outlook()
        assert (before.num_requests, before.now, before.idle) == (0, None, None), "nothing is measured yet"
        await measured(router, worker, num_waiting_tokens=4500)
        outlook = router.outlook()
        assert outlook.now is not None
        assert outlook.idle is not None
        # A step of 4 ms, a queue of 4.5 s, a prompt of 1 ms.
        assert outlook.now.ttft_s == pytest.approx(4.505, abs=0.001)
        assert outlook.idle.ttft_s == pytest.approx(0.005, abs=0.001)
        least = replace(request(), prompt_token_ids=(5,), level=REFUSE)
        with pytest.raises(Overloaded) as refused:
            await anext(router.stream(least))
        predicted = outlook.misses(0.5)
        assert predicted is not None
        assert predicted.retry_after_s == pytest.approx(refused.value.retry_after_s, abs=0.001)
        assert outlook.misses(60.0) is None
        assert (
            RouterLoad.from_json(json.loads(json.dumps(RouterLoad("tag", True, outlook).to_json()))).outlook == outlook
        )
        await worker.kill()
        await settled(router, lambda: not router.workers()[0].is_up)
        assert router.outlook().now is None, "there is no worker"
