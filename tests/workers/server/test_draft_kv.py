"""KV of a model that drafts moves between two worker services that have the same one, and else the target's alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from diptych.proto import worker_pb2
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.prefix_cache import block_hashes
from diptych.workers.engine.engine import Engine
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import fake_output

from ...support.draft_runner import NUM_DRAFT_LAYERS, NUM_LAYERS, DraftRunner, drafted_of
from ...support.sequences import make_request
from .test_service import Router, assert_clean
from .test_service_migration import some_tokens, until_handed_off

PROMPT = [1, 2, 3, 5, 7, 11] * 5  # no sum on its way is a multiple of 1000: only max_tokens ends it
TOKEN_BYTES = 2 * 4  # of a layer: K and V
# of the source, of the sink, whether the draft's layers move
PAIRS = {
    "the same draft": (DraftRunner, DraftRunner, True),
    "larger blocks": (lambda: DraftRunner(block_size=8), DraftRunner, True),
    "smaller blocks": (lambda: DraftRunner(block_size=2, num_blocks=128), DraftRunner, True),
    "another draft": (DraftRunner, lambda: DraftRunner(draft_id="another"), False),
    "a draft of fewer layers": (DraftRunner, lambda: DraftRunner(1), False),
    "another draft, larger blocks": (lambda: DraftRunner(block_size=8, draft_id="another"), DraftRunner, False),
    "no draft at the sink": (DraftRunner, lambda: DraftRunner(0), False),
    "no draft at the source": (lambda: DraftRunner(0), DraftRunner, False),
}


@asynccontextmanager
async def worker(runner: DraftRunner, **config: object) -> AsyncIterator[tuple[Engine, worker_pb2.HandoffSource]]:
    """A worker's engine, and a source of the hand-off "h"."""
    settings = {"transports": ("grpc",)} | config
    service = WorkerService(WorkerConfig.of(model="fake", **settings), runner)
    engine: Engine = service._engine._engine  # pyright: ignore[reportPrivateUsage]
    runner.draft_kv = engine.draft_kv
    address = (await service.start()).address
    try:
        yield engine, worker_pb2.HandoffSource(handoff_id="h", address=address, incarnation=service.incarnation)
    finally:
        await service.stop(grace_s=0.0)


@pytest.mark.parametrize("verify_kv", [False, True])
@pytest.mark.parametrize("layer_groups", [0, 3])
@pytest.mark.parametrize("pair", PAIRS)
async def test_a_prompt_is_handed_off(pair: str, layer_groups: int, verify_kv: bool) -> None:
    *make, brings = PAIRS[pair]
    there, here = (of() for of in make)
    here.drafts = False  # its layers hold what came
    async with (
        worker(there, role="prefill", chunk_tokens=7, layer_groups=layer_groups) as (_, source),
        worker(here, role="decode", verify_kv=verify_kv) as (engine, sink),
    ):
        prefill, decode = Router(source.address), Router(sink.address)
        expected = list(enumerate(fake_output(PROMPT, 10)))
        await decode.submit(1, make_request(PROMPT, 10), source=source)
        await prefill.submit(1, make_request(PROMPT, 10), offer=worker_pb2.HandoffOffer(handoff_id="h"))
        made = await prefill.tokens(1, until_finished=False)
        assert made + await decode.tokens(1) == expected
        states = [await prefill.idle_state(), await decode.idle_state()]
        for state in states:
            assert_clean(state)
        assert here.counted[0] == (len(PROMPT), len(PROMPT) if brings else 0)
        num_slots = there.layout.num_blocks_for(len(PROMPT)) * there.layout.block_size
        num_layers = NUM_LAYERS + (NUM_DRAFT_LAYERS if brings else 0)
        assert states[1].load.handoff_bytes == num_slots * num_layers * TOKEN_BYTES
        table = engine.cache.find(block_hashes(PROMPT, 4))
        assert len(table) == len(PROMPT) // 4
        nothing = [[(0, 0)] * len(table) * 4] * here.num_draft_layers
        found = here.drafted(table, len(table) * 4)
        assert found == (drafted_of(PROMPT[: len(table) * 4]) if brings else nothing)
        if engine.draft_kv is not None:
            assert [engine.draft_kv.has(block) for block in table] == [brings] * len(table)
        await prefill.close()
        await decode.close()


@pytest.mark.parametrize("pair", ["the same draft", "larger blocks", "another draft", "no draft at the source"])
async def test_a_running_sequence_moves(pair: str) -> None:
    *make, brings = PAIRS[pair]
    there, here = (of() for of in make)
    there.step_s = 0.003
    here.drafts = False
    async with worker(there) as (_, source), worker(here) as (_, sink):
        first, second = Router(source.address), Router(sink.address)
        request, expected = make_request(PROMPT, 150), list(enumerate(fake_output(PROMPT, 150)))
        await first.submit(1, request)
        made = await some_tokens(first, 1, 5)
        await first.send(offer=worker_pb2.Offer(handle=1, handoff_id="h"))
        await second.submit(7, request, [t for _, t in made], source=source)
        more, num_outputs = await until_handed_off(first, 1)
        made += more
        assert len(made) == num_outputs < 150
        assert made + await second.tokens(7) == expected
        for router in (first, second):
            assert_clean(await router.idle_state())
            await router.close()
        num_computed = len(PROMPT) + num_outputs - 1
        assert here.counted[0] == (num_computed, num_computed if brings else 0)
