"""Worker processes on a GPU hand off to each other, and to a worker on CPU: greedy tokens are transformers'.

Only prompts whose best two logits lie well apart at every position are used: two processors round differently.
"""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..support.checkpoints import make_checkpoint, random_prompts, reference_greedy
from ..support.harness import TINY, WorkerHandle, assert_nothing_leaked, unlike_workers
from ..workers.execution.gpu.conftest import EVEN
from .test_tensor_parallel import NUM_TOKENS, answer, routed

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

LENGTHS = (1, 16, 17, 65, 130, 200)
WIDE_GAP = 0.01
Flags = dict[str, Any]
Cases = list[tuple[list[int], list[int]]]

CPU: Flags = {"dtype": "float32", "chunk_tokens": 48, "kv_memory_bytes": 32 << 20}
GPU: Flags = CPU | {"device": "cuda"}
# name: source, sink, the transport that they should find
PAIRS: dict[str, tuple[Flags, Flags, str]] = {
    "two on one GPU": (GPU, GPU, "cuda_ipc"),
    "two on one GPU, verified": (GPU, GPU | {"verify_kv": True}, "cuda_ipc"),
    "unlike layouts": (GPU, GPU | {"block_size": 64, "kv_axis_order": "layer"}, "cuda_ipc"),
    "by NIXL": (GPU, GPU | {"transports": "nixl"}, "nixl"),
    "staged in host memory": (GPU, GPU | {"transports": "grpc"}, "grpc"),
    "narrowed": (GPU, GPU | {"wire_dtype": "bfloat16"}, "grpc"),
    "GPU to CPU": (GPU, CPU | {"transports": "grpc"}, "grpc"),
    "CPU to GPU": (CPU | {"transports": "grpc"}, GPU, "grpc"),
}
FEW_BITS = {"kv_dtype": "int8"}
FEW_BITS_PAIRS: dict[str, tuple[Flags, Flags, str]] = {
    "two on one GPU, verified": (GPU | FEW_BITS, GPU | FEW_BITS | {"verify_kv": True}, "cuda_ipc"),
    "unlike layouts": (GPU | FEW_BITS, GPU | FEW_BITS | {"block_size": 64, "kv_axis_order": "layer"}, "cuda_ipc"),
    "by NIXL": (GPU | FEW_BITS, GPU | FEW_BITS | {"transports": "nixl"}, "nixl"),
    "GPU to CPU": (GPU | FEW_BITS, CPU | FEW_BITS | {"transports": "grpc"}, "grpc"),
    "CPU to GPU": (CPU | FEW_BITS | {"transports": "grpc"}, GPU | FEW_BITS, "grpc"),
    "from full width": (GPU, GPU | FEW_BITS, "cuda_ipc"),
    "to full width": (GPU | FEW_BITS, GPU, "cuda_ipc"),
}
LARGE_GAP = 0.02  # rounded keys and values change logits more than another processor does


@pytest.fixture(scope="module")
def cases() -> Cases:
    return cases_of(TINY)


@pytest.fixture(scope="module")
def few_bits_cases() -> Cases:
    """Prompts to which a worker on CPU whose KV has few bits gives the reference's tokens."""
    wide = cases_of(TINY, LARGE_GAP)
    with unlike_workers(TINY, [("mixed", CPU | FEW_BITS)]) as handles:
        found = asyncio.run(answers(handles, [prompt for prompt, _ in wide]))
    kept = [case for case, tokens in zip(wide, found, strict=True) if case[1] == tokens]
    assert len(kept) >= 4
    return kept


def cases_of(path: Path, least_gap: float = WIDE_GAP) -> Cases:
    prompts = random_prompts(31, [n for n in LENGTHS for _ in range(6)])
    found = reference_greedy(path, prompts, NUM_TOKENS)
    kept = [(p, tokens) for p, (tokens, gap) in zip(prompts, found, strict=True) if gap > least_gap]
    assert len(kept) >= 4
    return kept


async def answers(handles: list[WorkerHandle], prompts: list[list[int]]) -> list[list[int]]:
    async with routed(*handles) as router:
        return await asyncio.gather(*(answer(router, prompt, b"") for prompt in prompts))


def needing(pair: str) -> Any:
    without = pair == "by NIXL" and find_spec("nixl") is None
    return pytest.param(pair, marks=pytest.mark.skipif(without, reason="nixl is not installed"))


@pytest.mark.parametrize("pair", [needing(pair) for pair in PAIRS])
def test_tokens_are_the_references_whatever_the_two_run_on(cases: Cases, pair: str) -> None:
    source, sink, transport = PAIRS[pair]
    with unlike_workers(TINY, [("prefill", source), ("decode", sink)]) as handles:
        found = asyncio.run(answers(handles, [prompt for prompt, _ in cases]))
        assert found == [tokens for _, tokens in cases]
        load = handles[1].settled_state().load
        assert load.num_handoffs_received >= len(cases)
        assert {link.transport for link in load.links} == {transport}
        assert_nothing_leaked(handles)


@pytest.mark.parametrize("pair", [needing(pair) for pair in FEW_BITS_PAIRS])
def test_kv_of_few_bits_is_handed_off(few_bits_cases: Cases, pair: str) -> None:
    source, sink, transport = FEW_BITS_PAIRS[pair]
    with unlike_workers(TINY, [("prefill", source), ("decode", sink)]) as handles:
        found = asyncio.run(answers(handles, [prompt for prompt, _ in few_bits_cases]))
        assert found == [tokens for _, tokens in few_bits_cases]
        assert {link.transport for link in handles[1].settled_state().load.links} == {transport}
        assert_nothing_leaked(handles)


@pytest.mark.parametrize("pair", ["two on one GPU", "unlike layouts", "CPU to GPU"])
def test_latents_are_handed_off(tmp_path: Path, pair: str) -> None:
    source, sink, transport = PAIRS[pair]
    path = make_checkpoint(tmp_path / "latent", "deepseek-v3", seed=21, **EVEN)
    cases = cases_of(path, least_gap=0.002)  # its logits lie closer
    with unlike_workers(path, [("prefill", source), ("decode", sink)]) as handles:
        found = asyncio.run(answers(handles, [prompt for prompt, _ in cases]))
        assert found == [tokens for _, tokens in cases]
        assert {link.transport for link in handles[1].settled_state().load.links} == {transport}
        assert_nothing_leaked(handles)


def test_a_killed_source_leaves_its_sink_well_and_its_memory_free(cases: Cases) -> None:
    """A mapping of an ended process does no harm and is closed: a third worker on the GPU hands off to the sink."""
    with unlike_workers(TINY, [("prefill", GPU), ("decode", GPU)]) as (first, sink):
        asyncio.run(answers([first, sink], [prompt for prompt, _ in cases[:2]]))
        first.kill()
        with unlike_workers(TINY, [("prefill", GPU)]) as (second,):
            found = asyncio.run(answers([second, sink], [prompt for prompt, _ in cases]))
            assert found == [tokens for _, tokens in cases]
            assert_nothing_leaked([second, sink])
