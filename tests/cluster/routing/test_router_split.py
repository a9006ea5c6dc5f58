"""The router over real workers, with routes that move inside the prompt."""

import asyncio
from dataclasses import replace

import pytest

from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2
from diptych.workers.common.request import Request
from diptych.workers.testing.fake_runner import fake_output

from ...support.split_routes import split_all
from .test_router_with_workers import LiveWorker, answer, check_answers, cluster, prompts, request


async def loads(workers: list[LiveWorker]) -> list[worker_pb2.LoadReport]:
    return [(await w.settled_state()).load for w in workers]


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed", "prefill"), ("prefill", "prefill", "decode")])
async def test_two_workers_share_a_prompt_and_the_tokens_are_exact(
    roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = split_all(monkeypatch)
    async with cluster(*roles) as running:
        asked = prompts(12, 120, seed=1)
        await check_answers(running.router, asked, max_tokens=12)
        assert sum(route.move_at is not None for route in routes) >= 10
        sources, sinks = running.of("prefill"), [w for w in running.workers if w.info.role != "prefill"]
        computed, received = await loads(sources), await loads(sinks)
        assert sum(load.num_decode_tokens for load in computed) == 0  # they sample nothing
        assert sum(load.num_prefixes_pulled for load in received) >= 10
        total = sum(load.num_prefill_tokens for load in [*computed, *received])
        assert total <= sum(map(len, asked)) + len(asked)  # no token of a prompt is computed twice
        await check_answers(running.router, asked, max_tokens=12)  # now with warm caches


async def test_usage_counts_what_either_worker_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    split_all(monkeypatch)
    async with cluster("prefill", "decode") as running:
        prompt = list(range(1, 119))  # of which the source computes 56; blocks have 4 tokens
        assert await counted(running.router, prompt) == (0, 116)
        assert await counted(running.router, prompt) == (116, 0)
        assert await counted(running.router, [*prompt[:20], *range(200, 300)]) == (20, 100)


async def counted(router: Router, prompt: list[int]) -> tuple[int, int]:
    """Tokens of the prompt that count as cached, and as stored."""
    first, *_ = [delta async for delta in router.stream(request(prompt, 2))]
    return first.num_cached_tokens, first.num_stored_tokens


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_costs_no_token(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_all(monkeypatch)
    async with cluster("prefill", "prefill", "decode", "decode", step_s=0.002) as running:
        answers = asyncio.create_task(check_answers(running.router, prompts(40, 120, seed=3), max_tokens=40))
        victim = running.of(role)[0]
        await running.busy(victim)
        await running.lose(victim)
        await answers


async def test_a_slow_source_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps take as long as a lease renewal: the sink holds the lease while the prompt is computed."""
    split_all(monkeypatch)
    async with cluster("prefill", "decode", step_s=0.3) as running:
        prompt = list(range(1, 121))  # the source computes 60 tokens, 8 a step
        assert await answer(running.router, prompt, 2) == fake_output(prompt, 2)
        (load,) = await loads(running.of("decode"))
        assert load.num_prefixes_pulled == 1 and load.num_prefill_tokens == 60


async def test_several_answers_to_one_prompt_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    split_all(monkeypatch)
    async with cluster("prefill", "decode") as running:
        prompt = list(range(1, 101))
        several = [replace(request(prompt, 6), request_id=f"choice-{i}", group="one") for i in range(3)]
        found = await asyncio.gather(*(stream(running.router, each) for each in several))
        assert found == [fake_output(prompt, 6)] * 3
        total = [load.num_prefill_tokens for load in await loads(running.workers)]
        assert sum(total) <= len(prompt) + 3


async def test_a_prompt_whose_log_probabilities_are_wanted_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = split_all(monkeypatch)
    async with cluster("prefill", "decode") as running:
        asked = request(list(range(1, 61)), 4)
        wanted = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=1))
        assert await stream(running.router, wanted) == fake_output(list(range(1, 61)), 4)
        assert [route.move_at for route in routes] == [None]


async def stream(router: Router, asked: Request) -> list[int]:
    return [t async for delta in router.stream(asked) for t in delta.token_ids]
