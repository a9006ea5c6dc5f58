"""A router over scripted workers on real sockets, for tests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.cluster.routing.token_source import TokenDelta
from diptych.workers.common.request import Request, SamplingParams

from .scripted_worker import ScriptedWorker

PROMPT = tuple(range(1, 10))
CONFIG = RoutingConfig(reconnect_s=0.01, max_reconnect_s=0.02)


def request(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4, timeout_s: float = 60.0) -> Request:
    return Request("request", prompt, SamplingParams(max_tokens=max_tokens, seed=7), timeout_s=timeout_s)


@asynccontextmanager
async def routing(*workers: ScriptedWorker, config: RoutingConfig = CONFIG) -> AsyncIterator[Router]:
    """A router with links to all of `workers`; checks afterwards that nothing is left in flight."""
    router = Router(config)
    router.update_fleet([w.info for w in workers])
    await router.start()
    while not all(w.is_up for w in router.workers()):
        await asyncio.sleep(0.002)
    try:
        yield router
        assert router.health().num_requests == 0
        assert [w.num_in_flight for w in router.workers()] == [0] * len(router.workers())
    finally:
        await router.stop()


def reading(stream: AsyncGenerator[TokenDelta, None]) -> asyncio.Task[list[int]]:
    """All tokens of a stream, read in a task."""

    async def read() -> list[int]:
        return [t async for delta in stream for t in delta.token_ids]

    return asyncio.create_task(read())


async def settled(router: Router, condition: Callable[[], bool]) -> None:
    """Yield until the router shows the messages that it has received."""
    while not condition():
        await asyncio.sleep(0.002)
