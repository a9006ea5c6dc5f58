"""Workers that die or stop under load: every request still gives exactly its tokens, and nothing is kept."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.cluster.routing.token_source import TokenDelta
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.embedding import Pooling

from ..support.checkpoints import make_checkpoint, untied_prompts
from ..support.embedders import reference_embeddings
from ..support.harness import WorkerHandle, assert_nothing_leaked, workers

ROLES = ["prefill", "prefill", "decode", "decode"]
NUM_TOKENS = 200
LENGTHS = (3, 40, 90, 200)
WHILE_PREFILLING = 1  # the first token: other prompts are being computed, or pulled
WHILE_DECODING = len(LENGTHS) * 4 * NUM_TOKENS // 10
Cases = list[tuple[list[int], list[int]]]

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


class Crew:
    """Worker processes, one for each of ROLES. Those that a test has killed are replaced for the next one."""

    def __init__(self, model: Path, transport: str, stack: ExitStack) -> None:
        self._model, self._transport, self._stack = model, transport, stack
        self._handles: dict[int, WorkerHandle] = {}  # by place in ROLES

    def complete(self) -> list[WorkerHandle]:
        missing = [i for i in range(len(ROLES)) if i not in self._handles or not self._handles[i].is_alive]
        flags = {"dtype": "float32", "transports": self._transport, "threads": 1, "lease_s": 2.0}
        started = self._stack.enter_context(workers(self._model, [ROLES[i] for i in missing], **flags))
        self._handles |= zip(missing, started, strict=True)
        return [self._handles[i] for i in range(len(ROLES))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cases]:
    path = make_checkpoint(tmp_path_factory.mktemp("death") / "llama", "llama", seed=5)
    return path, untied_prompts(path, seed=21, lengths=LENGTHS * 4, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def crew(checkpoint: tuple[Path, Cases], request: pytest.FixtureRequest) -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(checkpoint[0], request.param, stack)


@asynccontextmanager
async def routed(handles: list[WorkerHandle]) -> AsyncIterator[Router]:
    router = Router(RoutingConfig(worker_timeout_s=2.0))
    await router.start()
    router.update_fleet(WorkerInfo(h.incarnation, h.address, h.role, h.role) for h in handles)
    try:
        yield router
    finally:
        await router.stop()


async def answer(
    router: Router, number: int, prompt: list[int], salt: bytes, on_token: Callable[[], None]
) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = Request(f"request-{number}", tuple(prompt), sampling, timeout_s=120.0, cache_salt=salt)
    tokens: list[int] = []
    async for delta in router.stream(request):
        tokens += delta.token_ids
        on_token()
    return tokens


async def under_load(router: Router, cases: Cases, salt: str, fault: Callable[[], None], *, strike_at: int) -> None:
    """Send all prompts at once, none cached under another salt; `fault` begins when this many tokens have arrived."""
    num_out = 0

    def count() -> None:
        nonlocal num_out
        num_out += 1
        if num_out == strike_at:
            fault()

    calls = [answer(router, i, prompt, salt.encode(), count) for i, (prompt, _) in enumerate(cases)]
    assert await asyncio.gather(*calls) == [tokens for _, tokens in cases]


@pytest.mark.parametrize(
    ("crew", "victim", "strike_at"),
    [
        pytest.param("nixl", 0, WHILE_PREFILLING, id="nixl-prefill-early"),
        pytest.param("nixl", 0, WHILE_DECODING, id="nixl-prefill-late", marks=pytest.mark.long),
        pytest.param("nixl", 2, WHILE_PREFILLING, id="nixl-decode-early", marks=pytest.mark.long),
        pytest.param("nixl", 2, WHILE_DECODING, id="nixl-decode-late"),
        pytest.param("grpc", 0, WHILE_PREFILLING, id="grpc-prefill-early", marks=pytest.mark.long),
        pytest.param("grpc", 0, WHILE_DECODING, id="grpc-prefill-late"),
        pytest.param("grpc", 2, WHILE_PREFILLING, id="grpc-decode-early"),
        pytest.param("grpc", 2, WHILE_DECODING, id="grpc-decode-late", marks=pytest.mark.long),
    ],
    indirect=["crew"],
)
async def test_killed_under_load(checkpoint: tuple[Path, Cases], crew: Crew, victim: int, strike_at: int) -> None:
    handles = crew.complete()
    async with routed(handles) as router:
        fault = handles[victim].kill
        await under_load(router, checkpoint[1], f"kill {victim} at {strike_at}", fault, strike_at=strike_at)
        while all(s.is_up for s in router.workers()):  # its requests may have ended before the router noticed
            await asyncio.sleep(0.01)
        assert [s.is_up for s in router.workers()].count(False) == 1
    assert_nothing_leaked([h for i, h in enumerate(handles) if i != victim])


@pytest.mark.parametrize("crew", ["nixl"], indirect=True)
async def test_both_sides_killed_at_once(checkpoint: tuple[Path, Cases], crew: Crew) -> None:
    handles = crew.complete()

    def kill_both() -> None:
        handles[0].kill()
        handles[2].kill()

    async with routed(handles) as router:
        await under_load(router, checkpoint[1], "kill both", kill_both, strike_at=WHILE_PREFILLING)
    assert_nothing_leaked([handles[1], handles[3]])


@pytest.mark.parametrize("crew", ["nixl"], indirect=True)
async def test_a_stopped_worker_is_left_and_may_come_back(checkpoint: tuple[Path, Cases], crew: Crew) -> None:
    handles = crew.complete()
    async with routed(handles) as router:
        try:
            await under_load(
                router, checkpoint[1], "stop", lambda: handles[2].send(signal.SIGSTOP), strike_at=WHILE_DECODING
            )
        finally:
            handles[2].send(signal.SIGCONT)  # otherwise it would exist without answering in the next test
        await under_load(router, checkpoint[1], "go on", lambda: None, strike_at=WHILE_DECODING)
    assert_nothing_leaked(handles)


@pytest.mark.parametrize("crew", ["nixl"], indirect=True)
async def test_embeddings_of_a_killed_worker_come_from_another(checkpoint: tuple[Path, Cases], crew: Crew) -> None:
    """The last, for it leaves a worker killed: one that was stopped before, so that it answers nothing."""
    path, cases = checkpoint
    prompts = [prompt for prompt, _ in cases]
    expected = [state / state.norm() for state in reference_embeddings(path, prompts, Pooling.LAST)]
    handles = crew.complete()

    async def embedding(router: Router, prompt: list[int]) -> TokenDelta:
        request = Request("e", tuple(prompt), SamplingParams(max_tokens=1), 120.0, b"embeddings", embeds=True)
        [delta] = [delta async for delta in router.stream(request)]
        return delta

    async with routed(handles) as router:
        while not all(s.is_up for s in router.workers()):
            await asyncio.sleep(0.01)
        handles[0].send(signal.SIGSTOP)
        answers = asyncio.gather(*(embedding(router, prompt) for prompt in prompts))
        while not (view := next(s for s in router.workers() if s.incarnation == handles[0].incarnation)).num_in_flight:
            await asyncio.sleep(0)
        num_sent = view.num_in_flight
        handles[0].kill()
        found = await answers
    for delta, reference in zip(found, expected, strict=True):
        assert delta.embedding is not None
        torch.testing.assert_close(torch.from_numpy(delta.embedding), reference, atol=1e-4, rtol=0)
    assert sum(d.timings is not None and d.timings.num_attempts == 2 for d in found) >= num_sent > 0
    assert_nothing_leaked(handles[1:])
