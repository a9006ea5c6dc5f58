"""Embeddings through the router: one worker computes each, whatever its role, and another one after any loss."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from diptych.cluster.routing.router import Router
from diptych.cluster.routing.token_source import TokenDelta
from diptych.proto import worker_pb2
from diptych.workers.common.errors import InternalError, WorkerDraining
from diptych.workers.common.request import FinishReason, Request
from diptych.workers.testing.fake_runner import fake_hidden

from ...support.scripted_worker import ScriptedWorker, scripted
from .test_router_with_workers import CONFIG, TIMEOUT_S, Cluster, cluster, prompts, request

PROMPT = list(range(1, 41))


def asking(prompt: list[int]) -> Request:
    return replace(request(prompt, 1), embeds=True)


async def embedded(router: Router, prompt: list[int]) -> TokenDelta:
    [delta] = [delta async for delta in router.stream(asking(prompt))]
    assert (delta.token_ids, delta.finish_reason) == ((), FinishReason.STOP)
    return delta


async def check_embeddings(router: Router, asked: list[list[int]]) -> list[TokenDelta]:
    found = await asyncio.gather(*(embedded(router, prompt) for prompt in asked))
    for delta, prompt in zip(found, asked, strict=True):
        expected = np.array(fake_hidden(prompt))
        assert delta.embedding is not None
        np.testing.assert_allclose(delta.embedding, expected / np.linalg.norm(expected), atol=1e-6)
    return found


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode"), ("decode",)], ids="+".join)
async def test_embeddings_come_from_every_shape_of_fleet(roles: tuple[str, ...]) -> None:
    asked = [*prompts(8, 30, seed=1), [1 + i % 500 for i in range(512)]]  # the last fills the context
    async with cluster(*roles, config=replace(CONFIG, pull_prefixes=True)) as running:
        await check_embeddings(running.router, asked)
        for delta, prompt in zip(await check_embeddings(running.router, asked), asked, strict=True):
            assert delta.num_cached_tokens == (len(prompt) - 1) // 4 * 4
            assert delta.timings is not None and delta.timings.num_attempts == 1
        for worker in running.workers:
            state = await worker.settled_state()
            assert (state.load.num_handoffs_sent, state.num_unaccounted_blocks) == (0, 0)
        assert running.router.health().num_requests == 0
        metrics = running.router.metrics().decode()
        assert f'diptych_requests_total{{outcome="stop"}} {2.0 * len(asked)}' in metrics
        assert f"diptych_time_to_first_token_seconds_count {2.0 * len(asked)}" in metrics
        assert "diptych_generation_tokens_total 0.0" in metrics


async def several_run(running: Cluster) -> str:
    """Incarnation of a worker with several requests."""
    while True:
        for worker in running.router.workers():
            if worker.num_in_flight > 3:
                return worker.incarnation
        await asyncio.sleep(0.001)


async def test_a_worker_killed_under_load_costs_no_embedding() -> None:
    async with cluster("mixed", "mixed", "mixed", step_s=0.002) as running:
        answers = asyncio.create_task(check_embeddings(running.router, [p * 2 for p in prompts(30, 40, seed=3)]))
        victim = await several_run(running)
        await running.lose(next(w for w in running.workers if w.info.incarnation == victim))
        await answers
        assert b"diptych_request_resumes_total 0.0" not in running.router.metrics()


async def routed(workers: list[ScriptedWorker]) -> Router:
    router = Router(CONFIG)
    router.update_fleet([w.info for w in workers])
    await router.start()
    while not all(w.is_up for w in router.workers()):
        await asyncio.sleep(0.002)
    return router


async def test_a_refused_embedding_is_asked_for_elsewhere() -> None:
    async with scripted("mixed", "mixed") as workers:
        router = await routed(workers)
        answering = asyncio.create_task(embedded(router, PROMPT))
        found = [asyncio.create_task(w.submitted()) for w in workers]
        await asyncio.wait(found, return_when=asyncio.FIRST_COMPLETED)
        chosen = next(i for i, task in enumerate(found) if task.done())
        submit = await found[chosen]
        assert submit.embeds and not submit.HasField("offer") and list(submit.prompt_token_ids) == PROMPT
        workers[chosen].fail(submit.handle, WorkerDraining("test"))
        submit = await found[1 - chosen]
        assert submit.embeds
        message = worker_pb2.Embedding(handle=submit.handle, values=[0.5, -0.5], num_cached=16, num_stored=99)
        workers[1 - chosen].send(embedding=message)
        delta = await asyncio.wait_for(answering, TIMEOUT_S)
        assert delta.embedding is not None and delta.embedding.tolist() == [0.5, -0.5]
        assert (delta.num_cached_tokens, delta.num_stored_tokens) == (16, len(PROMPT) - 16)
        await router.stop()


@pytest.mark.parametrize(
    ("asked", "num_cached", "values"),
    [(request(PROMPT, 2), 0, [1.0]), (asking(PROMPT), 40, [1.0])],
    ids=["nobody asked", "all is cached"],
)
async def test_an_embedding_that_cannot_be_ends_the_request(
    asked: Request, num_cached: int, values: list[float]
) -> None:
    async with scripted("mixed") as [worker]:
        router = await routed([worker])
        answering = asyncio.create_task(anext(router.stream(asked)))
        submit = await worker.submitted()
        message = worker_pb2.Embedding(handle=submit.handle, values=values, num_cached=num_cached)
        worker.send(embedding=message)
        with pytest.raises(InternalError, match="was not asked for"):
            await answering
        assert await worker.aborted() == submit.handle
        await router.stop()


async def test_numbers_that_are_not_finite_end_the_stream_of_their_worker() -> None:
    async with scripted("mixed") as [worker]:
        router = await routed([worker])
        answering = asyncio.create_task(embedded(router, PROMPT))
        submit = await worker.submitted()
        worker.send(embedding=worker_pb2.Embedding(handle=submit.handle, values=[float("nan")]))
        again = await worker.submitted()  # over a new stream
        worker.send(embedding=worker_pb2.Embedding(handle=again.handle, values=[1.0]))
        assert (await asyncio.wait_for(answering, TIMEOUT_S)).embedding is not None
        await router.stop()
