"""Several routers over the same workers share nothing, and come to know the same."""

from contextlib import aclosing
from dataclasses import replace

from diptych.cluster.routing.router import Router
from diptych.workers.common.request import SamplingParams
from diptych.workers.core.prefix_cache import block_hashes

from ...support.routing import settled
from .recall.test_keyed_requests import PROMPT, another, asked, read
from .test_router_with_workers import CALM, cluster

BLOCK_SIZE = 4


def held(router: Router, tokens: list[int]) -> dict[str, int]:
    """Blocks of these tokens that each worker holds, as the router knows."""
    return router._context.prefixes.match(block_hashes(tokens, BLOCK_SIZE))  # pyright: ignore[reportPrivateUsage]


async def test_a_router_that_joins_late_knows_the_prefix_caches() -> None:
    async with cluster("prefill", "decode", **CALM) as running:
        tokens = [*PROMPT, *await read(running.router, asked(None))]
        await settled(running.router, lambda: len(held(running.router, tokens)) == 2)
        async with another(running) as late:
            await settled(late, lambda: held(late, tokens) == held(running.router, tokens))
            assert [*PROMPT, *await read(late, asked(None))] == tokens
            await running.router.stop()
            assert held(late, tokens)


async def test_the_load_of_another_router_is_seen() -> None:
    async with cluster("mixed", step_s=0.002, **CALM) as running, another(running) as second:
        long = replace(asked(None), sampling=SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
        async with aclosing(running.router.stream(long)) as deltas:
            await anext(deltas)
            await settled(second, lambda: second.workers()[0].reported.num_sequences == 1)
            assert second.workers()[0].num_in_flight == 0
            assert running.router.workers()[0].num_in_flight == 1
            own = running.router.workers()[0]
            await settled(running.router, lambda: own.load.num_running == 1)
            assert own.reported.num_sequences == 0, "its own does not count twice"
        await settled(second, lambda: second.workers()[0].reported.num_sequences == 0)
