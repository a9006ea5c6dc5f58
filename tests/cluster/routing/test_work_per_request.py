"""What a request costs the router, counted in calls of functions of `cluster`: the same on any machine.

The bounds leave 5 % for what comes next. Before a request is made dearer than that, look for what it may do without.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from diptych.cluster.routing.router import Router
from diptych.workers.common.request import FinishReason

from ...support.routing import CONFIG, request, routing
from ...support.scripted_worker import ScriptedWorker, scripted

CLUSTER = str(Path(__file__).parents[3] / "cluster")
QUIET = replace(CONFIG, worker_timeout_s=3600.0)  # no ping while calls are counted
NUM_TOKENS = 64
MOST_A_REQUEST, MOST_A_TOKEN = 221, 24  # 3 of a token are a round of deliveries, which all requests share


class Calls:
    """Counts calls, and resumed coroutines, of functions of `cluster` on this thread while it is entered."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(CLUSTER):
            self.num += 1


async def answered(router: Router, prefill: ScriptedWorker, decode: ScriptedWorker, num_tokens: int) -> None:
    """One request, whose tokens come in a step each, after the one before was read."""
    stream = router.stream(request(max_tokens=num_tokens))
    first = asyncio.create_task(anext(stream))
    prefill.tokens((await prefill.submitted()).handle, [50])
    await first
    handle = (await decode.submitted()).handle
    for position in range(1, num_tokens):
        is_last = position == num_tokens - 1
        decode.tokens(handle, [51], start=position, finish=FinishReason.LENGTH if is_last else None)
        await anext(stream)
    assert await anext(stream, None) is None


async def test_a_request_and_a_token_cost_few_calls() -> None:
    async with scripted("prefill", "decode") as workers, routing(*workers, config=QUIET) as router:
        await answered(router, *workers, 2)
        with Calls() as short:
            await answered(router, *workers, 2)
        with Calls() as long:
            await answered(router, *workers, 2 + NUM_TOKENS)
    assert 0 < short.num <= MOST_A_REQUEST
    assert 0 < (long.num - short.num) / NUM_TOKENS <= MOST_A_TOKEN
