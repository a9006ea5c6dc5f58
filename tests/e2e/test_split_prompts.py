"""Two worker processes compute a prompt together: greedy tokens are transformers', also where either is killed."""

import asyncio
from pathlib import Path

import pytest

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.harness import WorkerHandle, workers
from ..support.split_routes import split_all

LENGTHS = (90, 300, 40, 170)
NEW_TOKENS = 60
BLOCK = 16  # tokens
Cases = list[tuple[list[int], list[int]]]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cases]:
    path = make_checkpoint(tmp_path_factory.mktemp("split") / "llama", "llama", seed=5)
    return path, untied_prompts(path, seed=21, lengths=LENGTHS * 2, max_tokens=NEW_TOKENS)


async def check(handles: list[WorkerHandle], cases: Cases, victim: WorkerHandle | None) -> list[int]:
    """Ask all at once. `victim`: killed when the first token has come, while it computes other prompts. Of each prompt
    every full block counts as cached or as stored, on the route that made its first token."""
    router = Router(RoutingConfig(worker_timeout_s=20.0, max_attempts=5))
    await router.start()
    router.update_fleet([WorkerInfo(h.incarnation, h.address, h.role, h.role) for h in handles])
    while not all(w.is_up for w in router.workers()):
        await asyncio.sleep(0.01)

    num_cached: list[int] = []

    async def answer(number: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        tokens: list[int] = []
        async for delta in router.stream(Request(f"request-{number}", tuple(prompt), sampling, timeout_s=120.0)):
            if victim is not None and victim.is_alive:
                await asyncio.to_thread(victim.kill)
            if not tokens:
                counts = delta.num_cached_tokens, delta.num_stored_tokens
                assert sum(counts) == len(prompt) // BLOCK * BLOCK, (number, counts)
                num_cached.append(delta.num_cached_tokens)
            tokens += delta.token_ids
        return tokens

    try:
        found = await asyncio.gather(*(answer(i, prompt) for i, (prompt, _) in enumerate(cases)))
        assert found == [tokens for _, tokens in cases]
        return num_cached
    finally:
        await router.stop()


@pytest.mark.parametrize("transport", ["grpc", "nixl", "shared_memory"])
async def test_greedy_equals_transformers(
    transport: str, checkpoint: tuple[Path, Cases], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cases = checkpoint
    routes = split_all(monkeypatch)
    flags = {"transports": transport, "chunk_tokens": 32, "dtype": "float32", "threads": 1, "kv_memory_bytes": 64 << 20}
    with workers(path, ["prefill", "decode"], **flags) as handles:
        assert await check(handles, cases, victim=None) == [0] * len(cases)
        assert sum(route.move_at is not None for route in routes) == len(cases)
        states = [await asyncio.to_thread(handle.settled_state) for handle in handles]
    assert states[0].load.num_decode_tokens == 0
    assert states[1].load.num_prefixes_pulled == len(cases)
    assert [link.transport for link in states[1].load.links] == [transport]
    for state in states:
        assert (state.num_unaccounted_blocks, state.load.num_leased_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("role", "transport"),
    [
        ("prefill", "shared_memory"),
        ("decode", "grpc"),
        pytest.param("prefill", "grpc", marks=pytest.mark.long),
        pytest.param("decode", "shared_memory", marks=pytest.mark.long),
    ],
)
async def test_a_killed_worker_costs_no_token(
    role: str, transport: str, checkpoint: tuple[Path, Cases], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cases = checkpoint
    split_all(monkeypatch)
    roles = ["prefill", "prefill", "decode", "decode"]
    flags = {"transports": transport, "chunk_tokens": 16, "dtype": "float32", "threads": 1, "kv_memory_bytes": 64 << 20}
    with workers(path, roles, **flags) as handles:
        await check(handles, cases, victim=next(h for h in handles if h.role == role))
        for handle in (h for h in handles if h.is_alive):
            state = await asyncio.to_thread(handle.settled_state)
            assert (state.num_unaccounted_blocks, state.load.num_quarantined_blocks) == (0, 0)
