"""Requests while workers of two revisions are up: no answer is of both models."""

import asyncio

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.testing.fake_runner import fake_output

from .test_router_with_workers import CALM, Cluster, cluster, start_worker

PROMPT = [3, 5, 7, 11, 13]
NUM_TOKENS, NUM_CHOICES, NUM_CALLS = 20, 3, 6


async def test_the_choices_of_a_call_are_of_one_model() -> None:
    known = [fake_output(PROMPT, NUM_TOKENS, weights=weights) for weights in (0, 1)]
    async with cluster("mixed", **CALM) as running:
        running.workers.append(await start_worker("mixed", 0.0, weights=1, **CALM))
        running.announce()
        while not all(w.is_up for w in running.router.workers()):
            await asyncio.sleep(0.002)
        seen: list[list[int]] = []
        for number in range(NUM_CALLS):
            choices = await asyncio.gather(*(answer(running, f"{number}", i) for i in range(NUM_CHOICES)))
            assert choices in ([known[0]] * NUM_CHOICES, [known[1]] * NUM_CHOICES)
            seen.append(choices[0])
        assert all(tokens in seen for tokens in known), "calls are spread over both models"


async def answer(running: Cluster, call: str, choice: int) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    request = Request(f"{call}-{choice}", tuple(PROMPT), sampling, timeout_s=60.0, group=call)
    return [token async for delta in running.router.stream(request) for token in delta.token_ids]
