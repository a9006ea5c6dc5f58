"""Scaling under load, by a real supervisor, router and workers in one process: sequences move, nothing is resumed."""

import pytest

from ...support.supervised import FakeLauncher, World, is_ready, supervising
from ...support.users import ROOMY, STEP_S, check_nothing_was_resumed, counted, under_load


async def scale(world: World, **replicas: int) -> None:
    """Until the targets are reached and those that leave have left."""
    world.supervisor.scale(replicas)
    await world.until(lambda status: status.is_settled)


@pytest.mark.slow
async def test_a_planned_change_moves_sequences_and_resumes_nothing() -> None:
    async with supervising(
        FakeLauncher(step_s=STEP_S, num_blocks=ROOMY), prefill={"replicas": 1}, decode={"replicas": 1}
    ) as world:
        await world.until(is_ready)
        async with under_load(world) as users:
            await users.until_done(10)
            await scale(world, prefill=2, decode=2)
            await users.until_done(30)
            await users.until_each_decodes()
            await scale(world, prefill=1, decode=1)
            await users.until_done(10)
        check_nothing_was_resumed(world, users)
        assert counted(users.router, "diptych_request_migrations_total") >= 1


async def test_the_first_prefill_worker_comes_and_the_last_one_goes_and_nothing_is_resumed() -> None:
    async with supervising(
        FakeLauncher(step_s=STEP_S, num_blocks=ROOMY), prefill={"replicas": 0}, decode={"replicas": 1}
    ) as world:
        await world.until(is_ready)
        async with under_load(world) as users:
            await users.until_done(10)
            await scale(world, prefill=1)
            await users.until_done(20)
            await scale(world, prefill=0)
            await users.until_done(10)
        check_nothing_was_resumed(world, users)
