"""Greedy float32 tokens equal transformers' `generate`, token for token, whatever path a request takes.

For each checkpoint: 20 prompts of 1 to 1,000 tokens, 64 new tokens each; through one worker, 1P1D and 2P2D; over gRPC
and NIXL; in chunks of 16, of 64 (with speculation) and without limit; with the prefix cache cold and warm; alone and
all at once. The gate runs each pair of checkpoint, path and chunk size at least once; `make long` runs the other
combinations. One after the other, prompts that two workers or more compute get FEW_TOKENS: those after them, which a
worker decodes without the others, are compared where all come at once, and with one worker.

Ties are excluded exactly: a prompt is used only if, in the reference, the best and the second-best logit differ by more
than 1e-4 at each of its 64 positions (else the next seed's prompt takes its place). Every comparison is strict.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.drafting import Drafter
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.server.service import WorkerService

from ..support.checkpoints import ARCHITECTURES, make_checkpoint, untied_prompts
from ..support.drafters import KnowingDrafter, of_cases
from ..support.harness import TINY, assert_nothing_leaked, unlike_workers

LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 128, 200, 257, 400, 700, 1000)
NEW_TOKENS = 64
FEW_TOKENS = 20  # beyond what a block has room for
TOPOLOGIES = {"alone": ["mixed"], "1P1D": ["prefill", "decode"], "2P2D": ["prefill", "prefill", "decode", "decode"]}
PATHS = [
    ("alone", "grpc"),
    ("1P1D", "grpc"),
    ("1P1D", "nixl"),
    ("2P2D", "grpc"),
    ("2P2D", "nixl"),
    ("2P2D", "shared_memory"),
]
CHECKPOINTS = ("llama", "qwen3", "tiny")
CHUNKS = (16, 64, 0)
SPECULATING = 64  # chunk size with which steps verify drafts, too
Cases = list[tuple[list[int], list[int]]]
Checkpoints = Callable[[str], tuple[Path, Cases]]

pytestmark = pytest.mark.e2e


def sampled(*factors: Sequence[Any]) -> list[Any]:
    """All combinations. Those whose numbers do not add up to a multiple of three are long: of factors with three values
    or more, each pair of values is in one of the others."""
    combinations = itertools.product(*(enumerate(values) for values in factors))
    return [
        pytest.param(
            *(value for _, value in each),
            marks=[pytest.mark.long] if sum(i for i, _ in each) % 3 else [],
            id="-".join(str(part) for _, value in each for part in (value if isinstance(value, tuple) else [value])),
        )
        for each in combinations
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """By name, each made once."""

    @cache
    def make(name: str) -> tuple[Path, Cases]:
        path = TINY if name == "tiny" else make_checkpoint(tmp_path_factory.mktemp("exact") / name, name, seed=3)
        return path, untied_prompts(path, seed=11, lengths=LENGTHS, max_tokens=NEW_TOKENS)

    return make


async def answer(
    router: Router, name: str, prompt: Sequence[int], salt: bytes, num_tokens: int = NEW_TOKENS
) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    request = Request(name, tuple(prompt), sampling, timeout_s=120.0, cache_salt=salt)
    return [token async for delta in router.stream(request) for token in delta.token_ids]


async def compare(router: Router, cases: Cases, num_alone: int) -> None:
    """One after the other, so many tokens of each, and all at once; with a cold and then a warm prefix cache."""
    expected = [tokens for _, tokens in cases]
    for temperature in ("cold", "warm"):
        one_by_one = [
            await answer(router, f"{temperature}-{i}", p, b"one by one", num_alone) for i, (p, _) in enumerate(cases)
        ]
        assert one_by_one == [tokens[:num_alone] for tokens in expected], f"one by one, {temperature}"
    for temperature in ("cold", "warm"):
        calls = [answer(router, f"{temperature}-{i}", p, b"at once") for i, (p, _) in enumerate(cases)]
        assert await asyncio.gather(*calls) == expected, f"all at once, {temperature}"


@asynccontextmanager
async def routed(infos: list[WorkerInfo]) -> AsyncIterator[Router]:
    router = Router(RoutingConfig())
    await router.start()
    router.update_fleet(infos)
    try:
        yield router
    finally:
        await router.stop()


@asynccontextmanager
async def services(
    path: Path,
    roles: list[str],
    transport: str,
    chunk_tokens: int,
    layer_groups: int = 0,
    drafter: Drafter | None = None,
) -> AsyncIterator[list[WorkerInfo]]:
    """Workers in this process: each its own engine thread, KV memory and sockets. drafter: of all of them."""
    async with AsyncExitStack() as stack:
        infos: list[WorkerInfo] = []
        for role in roles:
            config = WorkerConfig.of(
                str(path),
                role=role,
                chunk_tokens=chunk_tokens,
                transports=(transport,),
                dtype="float32",
                layer_groups=layer_groups,
            )
            runner = ModelRunner.load(WorkerConfig.of(path, dtype="float32", threads=1, kv_memory_bytes=64 << 20))
            service = WorkerService(config, runner)
            service._engine._engine.scheduler._drafting.drafter = drafter
            where = await service.start()
            stack.push_async_callback(service.stop, 0.0)
            infos.append(WorkerInfo(where.incarnation, where.address, role, role))
        yield infos


@pytest.mark.parametrize(("name", "between", "chunk_tokens"), sampled(CHECKPOINTS, PATHS, CHUNKS))
async def test_greedy_equals_transformers(
    checkpoints: Checkpoints, name: str, between: tuple[str, str], chunk_tokens: int
) -> None:
    (path, cases), (topology, transport) = checkpoints(name), between
    drafter = KnowingDrafter(0.8, 5, of_cases(cases)) if chunk_tokens == SPECULATING else None
    workers = services(path, TOPOLOGIES[topology], transport, chunk_tokens, drafter=drafter)
    num_alone = NEW_TOKENS if topology == "alone" else FEW_TOKENS
    async with workers as infos, routed(infos) as router:
        await compare(router, cases, num_alone)
    assert drafter is None or drafter.counts["accepted"] > len(cases) * (NEW_TOKENS + num_alone)  # half of all tokens


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in ("llama", "qwen3")])
async def test_greedy_of_every_family_equals_transformers_through_two_workers(arch: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / arch, arch, seed=3)
    cases = untied_prompts(path, seed=11, lengths=(20, 90), max_tokens=8)
    async with services(path, TOPOLOGIES["1P1D"], "grpc", 32) as infos, routed(infos) as router:
        calls = [answer(router, f"family-{i}", p, b"", num_tokens=8) for i, (p, _) in enumerate(cases)]
        assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]


@pytest.mark.parametrize(("name", "transport"), sampled(CHECKPOINTS, ("grpc", "nixl", "shared_memory")))
async def test_greedy_equals_transformers_where_layers_go_in_groups(
    checkpoints: Checkpoints, name: str, transport: str
) -> None:
    path, cases = checkpoints(name)
    async with (
        services(path, TOPOLOGIES["1P1D"], transport, 64, layer_groups=3) as infos,
        routed(infos) as router,
    ):
        few = cases[::3]
        calls = [answer(router, f"groups-{i}", p, b"") for i, (p, _) in enumerate(few)]
        assert await asyncio.gather(*calls) == [tokens for _, tokens in few]


@pytest.mark.parametrize("name", sampled(CHECKPOINTS))
def test_greedy_equals_transformers_between_processes(checkpoints: Checkpoints, name: str) -> None:
    """Each of the two sinks uses a different transport."""
    path, cases = checkpoints(name)

    async def test(infos: list[WorkerInfo]) -> None:
        async with routed(infos) as router:
            await compare(router, cases, FEW_TOKENS)

    flags: dict[str, object] = {"dtype": "float32", "chunk_tokens": 64, "threads": 1}
    transports = ("grpc,nixl", "nixl,grpc", "grpc", "nixl")
    each = [(role, flags | {"transports": of}) for role, of in zip(TOPOLOGIES["2P2D"], transports, strict=True)]
    with unlike_workers(path, each) as handles:
        asyncio.run(test([WorkerInfo(h.incarnation, h.address, h.role, h.role) for h in handles]))
        for sink, transport in zip(handles[2:], transports[2:], strict=True):
            links = sink.settled_state().load.links
            assert {(link.transport, link.num_failed) for link in links} == {(transport, 0)}
            assert sum(link.num_bytes for link in links) > 0
        assert_nothing_leaked(handles)
