"""Log-probabilities of prompts through the router: each position arrives once, with any worker and after any loss."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from diptych.cluster.routing.output.prompt_state import PromptState
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2
from diptych.workers.common.errors import InternalError, WorkerDraining
from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.common.request import FinishReason, Request
from diptych.workers.testing.fake_runner import fake_output, fake_prompt_logprobs

from ...support.scripted_worker import ScriptedWorker, scripted
from .test_router_with_workers import CALM, CONFIG, TIMEOUT_S, cluster, prompts, request

PROMPT = list(range(1, 41))


def asking(prompt: list[int], max_tokens: int, num_top: int = 2) -> Request:
    plain = request(prompt, max_tokens)
    return replace(plain, sampling=replace(plain.sampling, prompt_logprobs=num_top))


async def answer(router: Router, asked: Request) -> tuple[list[int], list[PromptLogprobs]]:
    ids: list[int] = []
    found: list[PromptLogprobs] = []
    async for delta in router.stream(asked):
        assert not (ids and delta.prompt_logprobs), "they come with the first tokens"
        ids += delta.token_ids
        found += delta.prompt_logprobs
    return ids, found


def assert_whole(found: list[PromptLogprobs], prompt: list[int]) -> None:
    expected = fake_prompt_logprobs(prompt, prompt, 1, len(prompt), 2)
    assert [part.first for part in found] == [1, *(part.end for part in found[:-1])]
    joined = PromptLogprobs.joined(found)
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(expected, name))


async def check_answers(router: Router, asked: list[list[int]], max_tokens: int) -> None:
    answers = await asyncio.gather(*(answer(router, asking(prompt, max_tokens)) for prompt in asked))
    for (ids, found), prompt in zip(answers, asked, strict=True):
        assert ids == fake_output(prompt, max_tokens)
        assert_whole(found, prompt)


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode"), ("mixed", "decode")], ids="+".join)
@pytest.mark.parametrize("max_tokens", [1, 12])
async def test_prompt_logprobs_come_once_from_every_shape_of_fleet(roles: tuple[str, ...], max_tokens: int) -> None:
    asked = [prompt * 2 for prompt in prompts(8, 30, seed=1)]
    async with cluster(*roles, config=replace(CONFIG, pull_prefixes=True), **CALM) as running:
        await check_answers(running.router, asked, max_tokens)
        await check_answers(running.router, asked, max_tokens)  # with warm caches
        if "prefill" in roles and max_tokens > 1:
            [load] = [(await w.settled_state()).load for w in running.of("decode")]
            assert (load.num_handoffs_failed, load.num_handoffs_received) == (0, 16)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_killed_under_load_costs_no_prompt_logprob(role: str) -> None:
    async with cluster("prefill", "prefill", "decode", "decode", step_s=0.002) as running:
        asked = [prompt * 2 for prompt in prompts(30, 40, seed=3)]
        answers = asyncio.create_task(check_answers(running.router, asked, max_tokens=40))
        victim = running.of(role)[0]
        await running.busy(victim)
        await running.lose(victim)
        await answers
        assert b"diptych_request_resumes_total 0.0" not in running.router.metrics()


def send(worker: ScriptedWorker, handle: int, first: int, end: int, num_top: int = 2) -> None:
    found = fake_prompt_logprobs(PROMPT, PROMPT, first, end, num_top)
    worker.send(prompt_logprobs=found.to_proto(handle))


async def test_a_resumed_request_asks_for_what_did_not_come() -> None:
    """Some came before the first worker failed, some come twice."""
    async with scripted("mixed", "mixed") as workers:
        router = Router(RoutingConfig())
        router.update_fleet([w.info for w in workers])
        await router.start()
        while not all(w.is_up for w in router.workers()):
            await asyncio.sleep(0.002)
        answering = asyncio.create_task(answer(router, asking(PROMPT, 1)))
        found = [asyncio.create_task(w.submitted()) for w in workers]
        await asyncio.wait(found, return_when=asyncio.FIRST_COMPLETED)
        chosen = next(i for i, task in enumerate(found) if task.done())
        submit = await found[chosen]
        assert (submit.sampling.prompt_logprobs, submit.first_prompt_logprob) == (2, 1)
        send(workers[chosen], submit.handle, 1, 9)
        send(workers[chosen], submit.handle, 9, 17)
        workers[chosen].fail(submit.handle, WorkerDraining("test"))
        submit = await found[1 - chosen]
        assert (submit.sampling.prompt_logprobs, submit.first_prompt_logprob) == (2, 17)
        send(workers[1 - chosen], submit.handle, 13, 33)
        send(workers[1 - chosen], submit.handle, 33, 40)
        workers[1 - chosen].tokens(submit.handle, [5], finish=FinishReason.LENGTH)
        ids, parts = await asyncio.wait_for(answering, TIMEOUT_S)
        assert ids == [5]
        assert_whole(parts, PROMPT)
        await router.stop()


async def test_of_a_handed_off_request_the_source_alone_is_asked_for_them() -> None:
    async with scripted("prefill", "decode") as workers:
        router = Router(RoutingConfig())
        router.update_fleet([w.info for w in workers])
        await router.start()
        while not all(w.is_up for w in router.workers()):
            await asyncio.sleep(0.002)
        answering = asyncio.create_task(answer(router, asking(PROMPT, 9)))
        source, sink = [await worker.submitted() for worker in workers]
        assert (source.HasField("offer"), sink.HasField("source")) == (True, True)
        assert [submit.sampling.HasField("prompt_logprobs") for submit in (source, sink)] == [True, False]
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await router.stop()


@pytest.mark.parametrize(("first", "end", "num_top"), [(1, 8, 3), (2, 8, 2), (1, 41, 2)])
def test_a_worker_that_sends_other_prompt_logprobs_than_were_asked_for_ends_the_request(
    first: int, end: int, num_top: int
) -> None:
    state = PromptState(asking(PROMPT, 1))
    with pytest.raises(InternalError, match="where token 1 was next"):
        state.add(fake_prompt_logprobs(PROMPT, [*PROMPT, 1], first, end, num_top))
    with pytest.raises(InternalError):
        PromptState(request(PROMPT, 1)).add(fake_prompt_logprobs(PROMPT, PROMPT, 1, 8, 0))


async def test_a_token_before_the_prompts_logprobs_ends_the_request() -> None:
    async with scripted("mixed") as [worker]:
        router = Router(RoutingConfig())
        router.update_fleet([worker.info])
        await router.start()
        answering = asyncio.create_task(answer(router, asking(PROMPT, 2)))
        submit = await worker.submitted()
        send(worker, submit.handle, 1, 9)
        worker.tokens(submit.handle, [5])
        with pytest.raises(InternalError, match="without the log-probabilities"):
            await answering
        await router.stop()


Columns = worker_pb2.PromptLogprobs


@pytest.mark.parametrize(
    "columns",
    [
        Columns(first=1),
        Columns(first=0, logprobs=[1.0], ranks=[1]),
        Columns(first=1, logprobs=[1.0], ranks=[]),
        Columns(first=1, logprobs=[1.0, 1.0], ranks=[1, 1], top_token_ids=[1], top_logprobs=[1.0]),
        Columns(first=1, logprobs=[1.0], ranks=[1], top_token_ids=[1], top_logprobs=[]),
        Columns(first=1, logprobs=[1.0], ranks=[1], top_token_ids=[1000], top_logprobs=[1.0]),
        Columns(first=1, logprobs=[1.0], ranks=[1], top_token_ids=range(21), top_logprobs=[1.0] * 21),
        Columns(first=1, logprobs=[1.0] * 4097, ranks=[1] * 4097),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(columns: worker_pb2.PromptLogprobs) -> None:
    with pytest.raises(InternalError):
        PromptLogprobs.from_proto(columns, vocab_size=1000)
