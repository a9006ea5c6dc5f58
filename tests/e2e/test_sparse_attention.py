"""Sparse decodes of KV that arrived over real transports: the tokens are those of one worker that computed it all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.server.service import WorkerService

from ..support.checkpoints import make_checkpoint, random_prompts

LENGTHS = (40, 64, 90, 200, 333)
SPARSE: dict[str, Any] = {"sparse_attention": "quest", "sparse_budget_tokens": 64}
ROLES: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {"mixed": SPARSE},
    "1P1D": {"prefill": {}, "decode": SPARSE},
    "asked for": {"prefill": {}, "decode": SPARSE | {"sparse_by_default": False}},
    "unlike blocks": {"prefill": {"block_size": 8}, "decode": SPARSE},
}

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sparse") / "llama", "llama", seed=5, num_hidden_layers=5)


class KnowingRouter(Router):
    """Says when all its workers are up: before, one of two answers alone."""

    def __init__(self, infos: list[WorkerInfo]) -> None:
        super().__init__(RoutingConfig())
        self.infos, self.knows_all = infos, asyncio.Event()

    def on_up(self, info: WorkerInfo) -> None:
        super().on_up(info)
        if sum(worker.is_available for worker in self.workers()) == len(self.infos):
            self.knows_all.set()


@asynccontextmanager
async def routed(
    path: Path, roles: dict[str, dict[str, Any]], transport: str
) -> AsyncIterator[tuple[Router, WorkerService]]:
    """A router over workers in this process, and the last of these. Pools are small: blocks serve one sequence after
    another."""
    async with AsyncExitStack() as stack:
        infos: list[WorkerInfo] = []
        services: list[WorkerService] = []
        for role, settings in roles.items():
            config = WorkerConfig.of(
                path,
                role=role,
                transports=(transport,),
                dtype="float32",
                threads=1,
                max_context_tokens=512,
                kv_memory_bytes=2 << 20,
                prefix_cache=False,
                **settings,
            )
            services.append(service := WorkerService(config, ModelRunner.load(config)))
            where = await service.start()
            stack.push_async_callback(service.stop, 0.0)
            infos.append(WorkerInfo(where.incarnation, where.address, role, role))
        router = KnowingRouter(infos)
        await router.start()
        stack.push_async_callback(router.stop)
        router.update_fleet(infos)
        await router.knows_all.wait()
        yield router, services[-1]


async def answers(path: Path, which: str, transport: str) -> list[list[int]]:
    """To each prompt, one after the other, then all at once, which must give the same."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    async def answer(router: Router, name: str, prompt: list[int]) -> list[int]:
        asked = True if which == "asked for" else None
        request = Request(name, tuple(prompt), sampling, timeout_s=120.0, sparse_attention=asked)
        return [token async for delta in router.stream(request) for token in delta.token_ids]

    async with routed(path, ROLES[which], transport) as (router, last):
        prompts = list(enumerate(random_prompts(3, LENGTHS)))
        one_by_one = [await answer(router, f"one-{i}", prompt) for i, prompt in prompts]
        assert await asyncio.gather(*(answer(router, f"all-{i}", prompt) for i, prompt in prompts)) == one_by_one
        assert which == "alone" or last._engine._engine.incoming.num_received == 2 * len(prompts)
        return one_by_one


@pytest.mark.parametrize(
    ("which", "transport"),
    [("1P1D", "grpc"), ("1P1D", "shared_memory"), ("1P1D", "nixl"), ("asked for", "grpc"), ("unlike blocks", "grpc")],
)
async def test_tokens_do_not_depend_on_where_the_prompt_was_computed(model: Path, which: str, transport: str) -> None:
    assert await answers(model, which, transport) == await answers(model, "alone", "grpc")
