"""Workers of several ranks: the same tokens as transformers', and none of their processes outlives another."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from diptych.cluster.fleet import WorkerInfo
from diptych.cluster.policy import RoutingConfig
from diptych.cluster.router import Router
from diptych.workers.request import Request, SamplingParams

from ..checkpoints import make_checkpoint, untied_prompts
from .harness import WorkerHandle, assert_nothing_leaked, spawn, workers

LENGTHS = (1, 3, 17, 40, 130)
NUM_TOKENS = 24
END_S = 20.0  # for processes that must end; generous, and no test passes by waiting
FLAGS = {"dtype": "float32", "threads": 1, "chunk_tokens": 48, "kv_memory_bytes": 64 << 20, "transports": "grpc"}
Cases = list[tuple[list[int], list[int]]]

pytestmark = pytest.mark.e2e


def make(folder: Path, num_kv_heads: int) -> tuple[Path, Cases]:
    path = make_checkpoint(folder, "llama", seed=6, num_key_value_heads=num_kv_heads, attention_bias=True)
    return path, untied_prompts(path, seed=31, lengths=LENGTHS, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cases]:
    """Four KV heads: each rank has its own."""
    return make(tmp_path_factory.mktemp("grouped") / "llama", 4)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cases]:
    """One KV head, which every rank holds."""
    return make(tmp_path_factory.mktemp("single") / "llama", 1)


@pytest.fixture
def worker(grouped: tuple[Path, Cases]) -> Iterator[WorkerHandle]:
    with workers(grouped[0], ["mixed"], tensor_parallel=2, **FLAGS) as [handle]:
        yield handle


def info(handle: WorkerHandle) -> WorkerInfo:
    return WorkerInfo(handle.incarnation, handle.address, handle.role, handle.role)


@asynccontextmanager
async def routed(*handles: WorkerHandle) -> AsyncIterator[Router]:
    router = Router(RoutingConfig(worker_timeout_s=5.0))
    await router.start()
    router.update_fleet([info(h) for h in handles])
    try:
        while not all(state.is_up for state in router.snapshot()):
            await asyncio.sleep(0.01)
        yield router
    finally:
        await router.stop()


async def answer(
    router: Router, prompt: list[int], salt: bytes, on_token: Callable[[], object] = lambda: None
) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: list[int] = []
    async for delta in router.stream(Request("r", tuple(prompt), sampling, timeout_s=60.0, cache_salt=salt)):
        tokens += delta.token_ids
        on_token()
    return tokens


def ranks_of(handle: WorkerHandle) -> list[psutil.Process]:
    """Its other ranks, in order."""
    return sorted(psutil.Process(handle.process.pid).children(), key=lambda p: p.pid)


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    assert not alive


@pytest.mark.parametrize(("kind", "size"), [("grouped", 2), ("single", 4)])
def test_greedy_equals_transformers(kind: str, size: int, request: pytest.FixtureRequest) -> None:
    path, cases = request.getfixturevalue(kind)

    async def test(handle: WorkerHandle) -> None:
        async with routed(handle) as router:
            for prompt, tokens in cases:
                assert await answer(router, prompt, b"alone") == tokens
            calls = [answer(router, prompt, b"together") for prompt, _ in cases]
            assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]

    with workers(path, ["mixed"], tensor_parallel=size, **FLAGS) as [handle]:
        ranks = ranks_of(handle)
        assert len(ranks) == size - 1
        asyncio.run(test(handle))
        assert_nothing_leaked([handle])
    assert handle.process.returncode == 0
    assert_ended(ranks)


def test_a_rank_that_is_killed_ends_its_worker_and_the_request_goes_on_elsewhere(
    grouped: tuple[Path, Cases], worker: WorkerHandle
) -> None:
    prompt, tokens = grouped[1][-1]
    ranks = ranks_of(worker)

    async def test(other: WorkerHandle) -> None:
        async with routed(worker) as router:
            num_out = 0

            def count() -> None:
                nonlocal num_out
                num_out += 1
                if num_out == NUM_TOKENS // 3:
                    router.update_fleet([info(worker), info(other)])
                    ranks[0].kill()

            assert await answer(router, prompt, b"killed", count) == tokens

    with workers(grouped[0], ["mixed"], **FLAGS) as [other]:
        asyncio.run(test(other))
        assert worker.process.wait(END_S) == 1
        assert_ended(ranks)


def test_no_rank_outlives_a_worker_that_is_killed(worker: WorkerHandle) -> None:
    ranks = ranks_of(worker)
    assert len(ranks) == 1
    worker.kill()
    assert_ended(ranks)


def test_a_worker_that_is_killed_while_it_loads_leaves_nothing(grouped: tuple[Path, Cases]) -> None:
    process = spawn(grouped[0], "mixed", tensor_parallel=2, **FLAGS)
    me = psutil.Process(process.pid)
    while not (ranks := me.children()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    assert_ended(ranks)


def test_ctrl_c_ends_a_worker_in_order(worker: WorkerHandle) -> None:
    """In a terminal it reaches all ranks at once: the first one acts on it."""
    ranks = ranks_of(worker)
    for process in [*ranks, worker.process]:
        process.send_signal(signal.SIGINT)
    assert worker.process.wait(END_S) == 0
    assert_ended(ranks)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "transport"),
    [("grouped", 4, 2, "nixl"), ("grouped", 1, 4, "grpc"), ("grouped", 2, 1, "grpc"), ("single", 2, 1, "nixl")],
)
def test_kv_moves_between_workers_of_unlike_sizes(
    kind: str, prefill: int, decode: int, transport: str, request: pytest.FixtureRequest
) -> None:
    path, cases = request.getfixturevalue(kind)
    flags = FLAGS | {"transports": transport}

    async def test(*handles: WorkerHandle) -> None:
        async with routed(*handles) as router:
            calls = [answer(router, prompt, b"moved") for prompt, _ in cases]
            assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]

    with (
        workers(path, ["prefill"], tensor_parallel=prefill, **flags) as [source],
        workers(path, ["decode"], tensor_parallel=decode, **flags) as [sink],
    ):
        asyncio.run(test(source, sink))
        assert sink.settled_state().load.num_handoffs_received == len(cases)
        assert_nothing_leaked([source, sink])
