"""Workers of several ranks: the same tokens as transformers', and none of their processes outlives another."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.exit_codes import UNAVAILABLE
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.common.role import Role
from diptych.workers.common.wire import ROLE_TO_PROTO

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.harness import WorkerHandle, assert_nothing_leaked, spawn, unlike_workers, workers

LENGTHS = (1, 3, 17, 40, 130)
NUM_TOKENS = 24
END_S = 20.0  # for processes that must end; generous, and no test passes by waiting
FLAGS: dict[str, object] = {
    "dtype": "float32",
    "threads": 1,
    "chunk_tokens": 48,
    "kv_memory_bytes": 64 << 20,
    "transports": "grpc",
}
TRANSPORTS = ("grpc", "nixl", "shared_memory")
Cases = list[tuple[list[int], list[int]]]

pytestmark = pytest.mark.e2e


def make(folder: Path, num_kv_heads: int) -> tuple[Path, Cases]:
    return with_cases(make_checkpoint(folder, "llama", 6, num_key_value_heads=num_kv_heads, attention_bias=True))


def with_cases(path: Path) -> tuple[Path, Cases]:
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
    router = Router(RoutingConfig(worker_timeout_s=60.0))  # a busy machine may not let a worker run for seconds
    await router.start()
    router.update_fleet([info(h) for h in handles])
    try:
        while not all(state.is_up for state in router.workers()):
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


async def killed_midway(worker: WorkerHandle, other: WorkerHandle, ranks: list[psutil.Process], cases: Cases) -> None:
    """A rank of the worker that answers a request is killed: it is answered by the other."""
    prompt, tokens = cases[-1]
    async with routed(worker) as router:
        num_out = 0

        def count() -> None:
            nonlocal num_out
            num_out += 1
            if num_out == NUM_TOKENS // 3:
                router.update_fleet([info(worker), info(other)])
                ranks[0].kill()

        assert await answer(router, prompt, b"killed", count) == tokens


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    assert not alive


def test_a_rank_that_is_killed_ends_its_worker_and_the_request_goes_on_elsewhere(
    grouped: tuple[Path, Cases], worker: WorkerHandle, grouped_sizes: dict[int, WorkerHandle]
) -> None:
    ranks = ranks_of(worker)
    asyncio.run(killed_midway(worker, grouped_sizes[1], ranks, grouped[1]))
    assert worker.process.wait(END_S) == UNAVAILABLE
    assert_ended(ranks)


def test_no_rank_outlives_a_worker_that_is_killed(worker: WorkerHandle) -> None:
    ranks = ranks_of(worker)
    assert len(ranks) == 1
    worker.kill()
    assert_ended(ranks)


@contextmanager
def loading(path: Path) -> Iterator[tuple[Popen[str], list[psutil.Process]]]:
    """A worker of two ranks as soon as both are processes, and the second of them; on leaving, all have ended."""
    with spawn(path, "mixed", tensor_parallel=2, **FLAGS) as process:
        me = psutil.Process(process.pid)
        while not (ranks := me.children()):
            assert process.poll() is None
            time.sleep(0.05)
        yield process, ranks
    assert_ended(ranks)


def test_a_worker_that_is_killed_while_it_loads_leaves_nothing(grouped: tuple[Path, Cases]) -> None:
    with loading(grouped[0]) as (process, _):
        process.kill()


def test_a_rank_that_is_killed_while_it_loads_ends_its_worker_by_name(
    grouped: tuple[Path, Cases], capfd: pytest.CaptureFixture[str]
) -> None:
    with loading(grouped[0]) as (process, ranks):
        ranks[0].kill()
        assert process.wait(END_S) == UNAVAILABLE
    assert "rank 1 was killed by SIGKILL: all 2 ranks of the worker end with it" in capfd.readouterr().err


def test_ctrl_c_ends_a_worker_in_order(worker: WorkerHandle) -> None:
    """In a terminal it reaches all ranks at once: the first one acts on it."""
    ranks = ranks_of(worker)
    for process in [*ranks, worker.process]:
        process.send_signal(signal.SIGINT)
    assert worker.process.wait(END_S) == 0
    assert_ended(ranks)


async def take_roles(*handles: WorkerHandle) -> None:
    """A source and a sink, whatever they were."""
    for handle, role in zip(handles, (Role.PREFILL, Role.DECODE), strict=True):
        control = await WorkerControl.open(handle.address, None)
        try:
            control.set_prefill_budget(control.budget_of(role))
            async with asyncio.timeout(END_S):
                while (await control.state()).load.role != ROLE_TO_PROTO[role]:
                    await asyncio.sleep(0.01)
        finally:
            await control.close()


def assert_kv_moves(source: WorkerHandle, sink: WorkerHandle, cases: Cases, transport: str) -> None:
    """All prompts at once, computed by one and continued by the other, over that transport."""

    async def test() -> None:
        await take_roles(source, sink)
        async with routed(source, sink) as router:
            salt = f"{source.incarnation} to {sink.incarnation}".encode()
            calls = [answer(router, prompt, salt) for prompt, _ in cases]
            assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]

    num_before = sink.settled_state().load.num_handoffs_received
    asyncio.run(test())
    load = sink.settled_state().load
    assert load.num_handoffs_received - num_before == len(cases)
    [link] = [link for link in load.links if link.incarnation == source.incarnation]
    assert (link.transport, link.num_failed) == (transport, 0) and link.num_bytes > 0
    assert_nothing_leaked([source, sink])


@contextmanager
def sized(model: Path, transports: dict[int, str]) -> Generator[dict[int, WorkerHandle]]:
    """A worker with each number of ranks, and the transport that it uses as a sink. All ranks end in order."""
    each: list[tuple[str, dict[str, object]]] = [
        ("mixed", {**FLAGS, "tensor_parallel": size, "transports": ",".join({first: None} | dict.fromkeys(TRANSPORTS))})
        for size, first in transports.items()
    ]
    with unlike_workers(model, each) as handles:
        ranks = [ranks_of(handle) for handle in handles]
        assert [len(of) + 1 for of in ranks] == [*transports]
        yield dict(zip(transports, handles, strict=True))
    assert [handle.process.returncode for handle in handles] == [0] * len(handles)
    assert_ended([rank for of in ranks for rank in of])


@pytest.fixture(scope="module")
def grouped_sizes(grouped: tuple[Path, Cases]) -> Iterator[dict[int, WorkerHandle]]:
    with sized(grouped[0], {1: "nixl", 2: "grpc", 4: "shared_memory"}) as handles:
        yield handles


def assert_exact(handle: WorkerHandle, cases: Cases) -> None:
    """Alone and together."""

    async def test() -> None:
        async with routed(handle) as router:
            for prompt, tokens in cases:
                assert await answer(router, prompt, b"alone") == tokens
            calls = [answer(router, prompt, b"together") for prompt, _ in cases]
            assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]

    asyncio.run(test())
    assert_nothing_leaked([handle])


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_equals_transformers(
    size: int, grouped: tuple[Path, Cases], grouped_sizes: dict[int, WorkerHandle]
) -> None:
    assert_exact(grouped_sizes[size], grouped[1])


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),  # the sink's favourite
    [
        (1, 2, "grpc"),
        (2, 1, "nixl"),
        (1, 4, "shared_memory"),
        (4, 1, "nixl"),
        (2, 4, "shared_memory"),
        (4, 2, "grpc"),
    ],
)
def test_kv_moves_between_workers_of_unlike_sizes(
    prefill: int, decode: int, transport: str, grouped: tuple[Path, Cases], grouped_sizes: dict[int, WorkerHandle]
) -> None:
    assert_kv_moves(grouped_sizes[prefill], grouped_sizes[decode], grouped[1], transport)


async def test_budgets_move_between_the_extremes_under_load(
    grouped: tuple[Path, Cases], grouped_sizes: dict[int, WorkerHandle]
) -> None:
    """What no longer fits moves to the other worker: no request fails for it, or gets other tokens."""
    handles, cases = [grouped_sizes[1], grouped_sizes[2]], grouped[1]
    controls = [await WorkerControl.open(handle.address, None) for handle in handles]
    most = [control.load.step_tokens for control in controls]
    settings = [(most[0], 0), (0, most[1]), (0, 0), (most[0], most[1]), (most[0] - 1, most[1] - 1)]

    async def move() -> None:
        for budgets in settings * 4:
            for control, budget in zip(controls, budgets, strict=True):
                control.set_prefill_budget(budget)
                while (await control.state()).load.prefill_budget != budget:
                    await asyncio.sleep(0.001)

    try:
        async with routed(*handles) as router, asyncio.timeout(6 * END_S):
            moving, number = asyncio.create_task(move()), 0
            while not moving.done():
                number += 1
                calls = [answer(router, prompt, b"load %d" % (number * 2 + i)) for prompt, _ in cases for i in (0, 1)]
                assert await asyncio.gather(*calls) == [tokens for _, tokens in cases for _ in (0, 1)]
            await moving
    finally:
        for control in controls:
            await control.close()
    await asyncio.to_thread(assert_nothing_leaked, handles)


@pytest.mark.parametrize(
    ("size", "to_many", "to_one"),
    [
        (4, "grpc", "shared_memory"),
        pytest.param(2, "grpc", "nixl", marks=pytest.mark.long),
        pytest.param(2, "shared_memory", "shared_memory", marks=pytest.mark.long),
    ],
)
def test_ranks_that_hold_the_same_head(single: tuple[Path, Cases], size: int, to_many: str, to_one: str) -> None:
    """Tokens are exact, and the KV moves to one rank and back."""
    path, cases = single
    with sized(path, {1: to_one, size: to_many}) as handles:
        assert_exact(handles[size], cases)
        assert_kv_moves(handles[size], handles[1], cases, to_one)
        assert_kv_moves(handles[1], handles[size], cases, to_many)


def test_latents_move_between_workers_of_unlike_sizes(tmp_path: Path) -> None:
    """Every rank holds them all: they travel once."""
    path, cases = with_cases(make_checkpoint(tmp_path / "latent", "deepseek-v2", seed=6))
    with sized(path, {1: "nixl", 2: "grpc"}) as handles:
        assert_kv_moves(handles[2], handles[1], cases, "nixl")
        assert_kv_moves(handles[1], handles[2], cases, "grpc")


def test_experts_that_ranks_hold_whole(tmp_path: Path) -> None:
    """Two ranks and four, prefill by either; layers of two KV heads and of a larger one, of which ranks hold copies."""
    path, cases = with_cases(make_checkpoint(tmp_path / "gemma4-moe", "gemma4-moe", seed=7))
    placement = {"expert_placement": "round_robin"}
    each = [("mixed", FLAGS | placement | {"tensor_parallel": n, "expert_parallel": n}) for n in (2, 4)]
    with unlike_workers(path, each) as [two, four]:
        assert [len(ranks_of(handle)) for handle in (two, four)] == [1, 3]
        assert_kv_moves(two, four, cases, "grpc")
        assert_kv_moves(four, two, cases, "grpc")
