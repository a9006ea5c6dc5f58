"""Drafts of requests through the router: who may make them, and how they are counted over workers and attempts."""

import asyncio
from dataclasses import replace

import pytest

from diptych.cluster.common.worker_stats import NO_DRAFTS, Drafts
from diptych.cluster.routing.actions import WorkerToken
from diptych.cluster.routing.router import Router
from diptych.cluster.routing.token_source import TokenDelta
from diptych.proto import worker_pb2
from diptych.workers.common.request import FinishReason, Request

from ...support.routing import request, routing, settled
from ...support.scripted_worker import ScriptedWorker, scripted
from ...support.split_routes import split_all
from ...support.state_harness import LOST, StateHarness, split

PREDICTED = replace(request(max_tokens=6), prediction=(7, 8, 9), speculates=False, sparse_attention=False)


def read(router: Router, asked: Request) -> asyncio.Task[list[TokenDelta]]:
    async def deltas() -> list[TokenDelta]:
        return [delta async for delta in router.stream(asked)]

    return asyncio.create_task(deltas())


def verified(entry: int, num_drafted: int, num_accepted: int) -> list[worker_pb2.Verified]:
    return [worker_pb2.Verified(entry=entry, num_drafted=num_drafted, num_accepted=num_accepted)]


def token(harness: StateHarness, handle: int, position: int, drafts: tuple[int, int] | None = None) -> None:
    found = None if drafts is None else Drafts(*drafts)
    harness.log = list(harness.state.token(handle, WorkerToken(position, 100 + position, drafts=found)))


async def test_a_prediction_goes_to_the_worker_that_decodes_and_again_when_the_request_is_resumed() -> None:
    async with (
        scripted("prefill", "decode", "decode") as (prefill, first, second),
        routing(prefill, first, second) as router,
    ):
        answer = read(router, PREDICTED)
        source, sink = await prefill.submitted(), await first.submitted()
        assert (list(source.prediction), list(sink.prediction)) == ([], [7, 8, 9])
        assert source.no_speculation and sink.no_speculation
        assert [(of.HasField("sparse_attention"), of.sparse_attention) for of in (source, sink)] == [(True, False)] * 2
        prefill.tokens(source.handle, [50])
        first.tokens(sink.handle, [51, 52], start=1, verified=verified(0, 4, 1))
        await settled(router, lambda: b"generation_tokens_total 3.0" in router.metrics())
        await first.kill()
        again, rest = await prefill.submitted(), await second.submitted()
        assert (list(again.prediction), list(rest.prediction)) == ([], [7, 8, 9])
        assert again.no_speculation and rest.no_speculation
        assert [(of.HasField("sparse_attention"), of.sparse_attention) for of in (again, rest)] == [(True, False)] * 2
        prefill.tokens(again.handle, [53], start=3)
        second.tokens(rest.handle, [54, 55], start=4, finish=FinishReason.LENGTH, verified=verified(1, 3, 1))
        *_, last = await answer
        assert last.drafts == Drafts(7, 2)  # of both attempts
        assert last.timings is not None and last.timings.num_attempts == 2
        assert (last.timings.num_drafted, last.timings.num_accepted) == (7, 2)


async def test_a_worker_that_computes_a_prefix_gets_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    split_all(monkeypatch)
    async with scripted("prefill", "decode") as (prefill, decode), routing(prefill, decode) as router:
        answer = read(router, PREDICTED)
        source, sink = await prefill.submitted(), await decode.submitted()
        assert source.offer.is_prefix
        assert (list(source.prediction), list(sink.prediction)) == ([], [7, 8, 9])
        decode.tokens(sink.handle, [50], finish=FinishReason.STOP)
        (only,) = await answer
        assert only.drafts == NO_DRAFTS


async def test_each_delta_says_what_was_drafted_so_far() -> None:
    async with scripted("mixed") as (worker,), routing(worker) as router:
        stream = router.stream(request())

        async def after(worker: ScriptedWorker, tokens: list[int], start: int, *counts: int) -> Drafts:
            worker.tokens(handle, tokens, start, verified=verified(0, *counts) if counts else [])
            return (await anext(stream)).drafts

        first = asyncio.ensure_future(anext(stream))
        handle = (await worker.submitted()).handle
        worker.tokens(handle, [50])
        assert (await first).drafts == NO_DRAFTS
        assert await after(worker, [51, 52], 1, 2, 1) == Drafts(2, 1)
        worker.tokens(handle, [53], 3, FinishReason.LENGTH)
        assert (await anext(stream)).drafts == Drafts(2, 1)
        assert await anext(stream, None) is None


def test_drafts_of_repeated_tokens_do_not_count_and_those_of_tokens_that_were_held_do() -> None:
    harness = split()
    token(harness, 2, 1, (3, 0))  # the sink's, before the source's
    assert harness.state.output.notes.drafts == NO_DRAFTS
    token(harness, 1, 0)
    token(harness, 2, 1, (3, 0))  # once more
    token(harness, 2, 2, (2, 2))
    assert harness.state.output.notes.drafts == Drafts(5, 2)
    delta = harness.state.output.take(harness.state.finish)
    assert delta is not None and delta.drafts == Drafts(5, 2)


def test_a_migration_keeps_the_counts_of_the_worker_that_it_leaves() -> None:
    harness = StateHarness(max_tokens=8)
    harness.begin(None, "A")
    token(harness, 1, 0)
    token(harness, 1, 1, (4, 3))
    harness.migrate("B")
    token(harness, 1, 2, (1, 0))
    harness.handed_off(1, 3)
    token(harness, 2, 3, (2, 1))
    assert harness.state.output.notes.drafts == Drafts(7, 4)


def test_what_a_lost_worker_has_not_said_is_lost() -> None:
    harness = StateHarness()
    harness.begin(None, "A")
    token(harness, 1, 0, (4, 0))
    harness.failed(1, LOST)
    harness.begin(None, "B")
    token(harness, 2, 1, (1, 1))
    assert harness.state.output.notes.drafts == Drafts(5, 1)
