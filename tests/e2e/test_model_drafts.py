"""Answers with drafts of models equal those without, token for token, whatever path a request takes: greedy and seeded,
one worker and several, over every transport, in chunks, with warm prefix caches, between workers that draft unlike."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.server.service import WorkerService
from diptych.workers.speculation.methods import make_speculator

from ..support.checkpoints import random_prompts
from ..support.drafters import FreeRows
from ..support.engines import run, tokens
from ..support.harness import TINY
from .test_exactness import routed, sampled

EXAMPLES = TINY.parent
LENGTHS = (1, 5, 16, 17, 40, 63, 100, 200)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=7, repetition_penalty=1.1)
PATHS = {
    "alone": ["mixed"],
    "1P1D-grpc": ["prefill", "decode"],
    "1P1D-nixl": ["prefill", "decode"],
    "2P2D-shared_memory": ["prefill", "prefill", "decode", "decode"],
}
TWO_RANKS = {"tensor_parallel": 2}
FIRST_ALONE = {"tensor_parallel": 2, "draft_tensor_parallel": 1}  # of which the first one drafts
MODELS = {"draft": "tiny_draft", "eagle3": "tiny_eagle3", "mtp": "tiny_mtp"}

pytestmark = pytest.mark.e2e


def settings_of(method: str, folder: Path) -> dict[str, Any]:
    if method in MODELS:
        return {"speculation": method, "draft_model": str(EXAMPLES / MODELS[method])}
    if method == "self":
        file = folder / "skipped.json"
        file.write_text('{"num_layers": 5, "skipped_layers": [2]}')
        return {"speculation": "self", "skipped_layers": str(file)}
    return {"speculation": method}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return without_drafts("auto")


@cache
def without_drafts(kv_dtype: str) -> list[list[int]]:
    """Answers of one engine."""
    config = WorkerConfig.of(TINY, dtype="float32", threads=1, kv_memory_bytes=64 << 20, kv_dtype=kv_dtype)
    runner = ModelRunner.load(config)
    engine = Engine(runner, SchedulerConfig())
    for i, request in enumerate(requests(runner.info.vocab_size, "x")):
        engine.submit(f"0/{i}", request, [])
    outputs = run(engine)
    runner.close()
    return [[event.token_id for event in tokens(outputs, f"0/{i}")] for i in range(2 * len(LENGTHS))]


def requests(vocab_size: int, name: str) -> list[Request]:
    prompts = random_prompts(3, LENGTHS, vocab_size)
    samplings = [GREEDY] * len(prompts) + [replace(SEEDED, seed=i) for i in range(len(prompts))]
    pairs = zip([*prompts, *prompts], samplings, strict=True)
    return [Request(f"{name}-{i}", tuple(ids), sampling, 120.0) for i, (ids, sampling) in enumerate(pairs)]


@asynccontextmanager
async def services(
    roles: list[str], transport: str, drafting: dict[str, dict[str, Any]]
) -> AsyncIterator[tuple[list[WorkerInfo], list[WorkerService]]]:
    """Workers in this process. drafting: their settings of speculation, by role."""
    async with AsyncExitStack() as stack:
        infos: list[WorkerInfo] = []
        made: list[WorkerService] = []
        for role in roles:
            own = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 64 << 20, "chunk_tokens": 40}
            config = WorkerConfig.of(TINY, role=role, transports=(transport,), **own, **drafting[role])
            runner = ModelRunner.load(config)
            service = WorkerService(config, runner)
            method = config.speculation.speculation
            if runner.proposer is not None:
                drafter = FreeRows(method, runner.proposer, 4)
            else:
                drafter = None if method == "none" else make_speculator(method, 4)
            service._engine._engine.scheduler._drafting.drafter = drafter
            where = await service.start()
            stack.push_async_callback(service.stop, 0.0)
            infos.append(WorkerInfo(where.incarnation, where.address, role, role))
            made.append(service)
        yield infos, made


async def answers(router: Router, name: str) -> list[list[int]]:
    """One after the other, for workers whose drafts take turns."""
    found: list[list[int]] = []
    for request in requests(2048, name):
        found.append([token async for delta in router.stream(request) for token in delta.token_ids])
    return found


def drafted(workers: Sequence[WorkerService]) -> int:
    counts = [worker._engine._engine.check_integrity().load.drafts for worker in workers]
    return sum(each.num_drafted for of in counts for each in of)


@pytest.mark.parametrize(("path", "method"), sampled(list(PATHS), ["draft", "self", "eagle3", "mtp", "suffix"]))
async def test_answers_are_those_without_drafts(
    expected: list[list[int]], tmp_path: Path, method: str, path: str
) -> None:
    roles, transport = PATHS[path], path.partition("-")[2] or "grpc"
    settings = settings_of(method, tmp_path)
    async with services(roles, transport, dict.fromkeys(roles, settings)) as (infos, workers), routed(infos) as router:
        for name in ("cold", "warm"):
            assert await answers(router, name) == expected, name
        decoding = [worker for worker, role in zip(workers, roles, strict=True) if role != "prefill"]
        assert method == "suffix" or drafted(decoding) > 60
        for worker in decoding:
            proposer = worker._runner.proposer
            assert proposer is None or proposer.num_anew == 0, "the draft's KV came with the hand-off"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("none", "draft"), ("draft", "none"), ("eagle3", "draft"), ("draft", "self"), ("mtp", "mtp")],
)
async def test_workers_that_draft_unlike(expected: list[list[int]], tmp_path: Path, prefill: str, decode: str) -> None:
    drafting = {"prefill": settings_of(prefill, tmp_path), "decode": settings_of(decode, tmp_path)}
    roles = ["prefill", "decode"]
    async with services(roles, "shared_memory", drafting) as (infos, workers), routed(infos) as router:
        assert await answers(router, "x") == expected
        proposer = workers[1]._runner.proposer
        if decode == "draft":
            assert proposer is not None and proposer.num_anew > 100  # what the prefill worker did not compute
            assert drafted(workers[1:]) > 60


@pytest.mark.parametrize(
    ("method", "prefill", "decode", "transport"),
    [
        ("draft", TWO_RANKS, {}, "grpc"),
        ("draft", {}, TWO_RANKS, "shared_memory"),
        pytest.param("draft", TWO_RANKS, TWO_RANKS, "nixl", marks=pytest.mark.long),
        pytest.param("draft", FIRST_ALONE, TWO_RANKS, "grpc", marks=pytest.mark.long),
        pytest.param("draft", {}, FIRST_ALONE, "nixl", marks=pytest.mark.long),
        ("eagle3", TWO_RANKS, {}, "shared_memory"),
        pytest.param("eagle3", {}, TWO_RANKS, "grpc", marks=pytest.mark.long),
        pytest.param("mtp", TWO_RANKS, TWO_RANKS, "nixl", marks=pytest.mark.long),
        pytest.param("self", {}, TWO_RANKS, "grpc", marks=pytest.mark.long),
    ],
)
async def test_the_drafts_kv_moves_between_workers_of_unlike_sizes(
    expected: list[list[int]],
    tmp_path: Path,
    method: str,
    prefill: dict[str, int],
    decode: dict[str, int],
    transport: str,
) -> None:
    settings, roles = settings_of(method, tmp_path), ["prefill", "decode"]
    drafting = {"prefill": settings | prefill, "decode": settings | decode}
    async with services(roles, transport, drafting) as (infos, workers), routed(infos) as router:
        assert await answers(router, "x") == expected
        proposer = workers[1]._runner.proposer
        assert proposer is not None and proposer.num_anew == 0, "the draft's KV came with the hand-off"
        assert drafted(workers[1:]) > 60  # by a head: only where its KV came, too


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("devices", "method"), sampled(["cpu to gpu", "gpu to cpu"], ["draft", "eagle3", "mtp"]))
async def test_gpus_and_cpus_hand_drafts_off(tmp_path: Path, devices: str, method: str, kv_dtype: str) -> None:
    """The KV of what drafts is packed otherwise in the compiled kernels' pool than on a device, here a fake one."""
    expected = without_drafts(kv_dtype)
    on = {"gpu": {"device": "fake", "max_running": 4, "cuda_graphs": False}, "cpu": dict[str, Any]()}
    there, _, here = devices.partition(" to ")
    settings, roles = settings_of(method, tmp_path) | {"kv_dtype": kv_dtype}, ["prefill", "decode"]
    drafting = {"prefill": settings | on[there], "decode": settings | on[here]}
    async with services(roles, "grpc", drafting) as (infos, workers), routed(infos) as router:
        for name in ("cold", "warm"):
            assert await answers(router, name) == expected, name
        assert drafted(workers[1:]) > 60
        proposer = workers[1]._runner.proposer
        assert proposer is not None and proposer.num_anew == 0, "the draft's KV came with the hand-off"
