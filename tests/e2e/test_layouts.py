"""Greedy tokens are one worker's, whatever the two pools' layouts: block size, axis order and KV dtype, both ways.

Where both pools compute in float32 the tokens must be transformers' (prompts without ties, as in test_exactness.py).
Where one computes in bfloat16 its weights are rounded too, so tokens may differ for reasons that no hand-off has: a
prompt is used only if a worker alone in bfloat16 gives the reference's float32 tokens, and in the reference the best
two logits lie more than WIDE_GAP apart at every position. Then any mixture of the two dtypes must give those tokens.

Pools that keep KV in few bits (kv_dtype) must give, of any prompt, what one such worker alone gives: each vector is
rounded once, where it is stored. Beside a pool of full width the rule of the mixed dtypes holds.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import open_channel
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.gpu import rank_steps
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.dtypes import vector_bytes
from diptych.workers.server.service import WorkerService

from ..support.checkpoints import random_prompts, reference_greedy, untied_prompts
from ..support.harness import TINY

NEW_TOKENS = 16
CHUNK_TOKENS = 48
GRAPH_TOKENS = 64  # captures take time: those of a chunk suffice
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 200)
WIDE_GAP = 0.05
Cases = list[tuple[list[int], list[int]]]
Layout = dict[str, Any]

PLAIN: Layout = {"dtype": "float32", "block_size": 16}
EXACT_PAIRS: dict[str, tuple[Layout, Layout]] = {
    "16 to 64": (PLAIN, PLAIN | {"block_size": 64}),
    "64 to 16": (PLAIN | {"block_size": 64}, PLAIN),
    "block to layer": (PLAIN, PLAIN | {"kv_axis_order": "layer"}),
    "layer to block": (PLAIN | {"kv_axis_order": "layer"}, PLAIN),
    "layer 64 to block 16, verified": (
        PLAIN | {"kv_axis_order": "layer", "block_size": 64},
        PLAIN | {"verify_kv": True},
    ),
}
# Pools on a fake device, which computes and copies as late as a GPU may: "gpu" is no setting of a worker.
DEVICE_PAIRS: dict[str, tuple[Layout, Layout]] = {
    "device to CPU": (PLAIN | {"gpu": True}, PLAIN | {"block_size": 64}),
    "CPU to device, verified": (PLAIN, PLAIN | {"gpu": True, "block_size": 64, "verify_kv": True}),
    "device to device": (PLAIN | {"gpu": True}, PLAIN | {"gpu": True, "kv_axis_order": "layer"}),
}
MIXED_PAIRS: dict[str, tuple[Layout, Layout]] = {
    "bfloat16 to float32": (PLAIN | {"dtype": "bfloat16"}, PLAIN),
    "float32 to bfloat16": (PLAIN, PLAIN | {"dtype": "bfloat16", "block_size": 64, "kv_axis_order": "layer"}),
}

# Pools that both keep KV in few bits, and how it travels.
FEW_BITS_PAIRS: dict[str, tuple[Layout, Layout]] = {
    "shared_memory": ({}, {"block_size": 64}),
    "grpc": ({"kv_axis_order": "layer", "block_size": 64}, {"verify_kv": True}),
    "nixl": ({}, {"verify_kv": True}),
}
FEW_BITS_DEVICE_PAIRS: dict[str, tuple[Layout, Layout]] = {
    "device to CPU": ({"gpu": True}, {"block_size": 64, "verify_kv": True}),
    "CPU to device": ({}, {"gpu": True, "block_size": 64}),
    "device to device": ({"gpu": True}, {"gpu": True, "block_size": 4, "kv_axis_order": "layer", "verify_kv": True}),
    "device to device, directly": ({"gpu": True, "kv_axis_order": "layer"}, {"gpu": True}),
}
KIVI: Layout = PLAIN | {"kv_dtype": "kivi", "block_size": 32}
KIVI_PAIRS: dict[str, tuple[str, Layout, Layout]] = {
    "shared_memory": ("shared_memory", {}, {}),
    "grpc": ("grpc", {"kv_axis_order": "layer"}, {"verify_kv": True}),
    "nixl": ("nixl", {}, {"kv_axis_order": "layer"}),
    "CPU to device": ("grpc", {}, {"gpu": True, "kv_axis_order": "layer"}),
    "device to CPU": ("grpc", {"gpu": True, "kv_axis_order": "layer"}, {"verify_kv": True}),
    "device to device": ("grpc", {"gpu": True}, {"gpu": True, "kv_axis_order": "layer", "verify_kv": True}),
    "device to device, directly": ("grpc", {"gpu": True}, {"gpu": True}),
}
OF_RUNNER = ("dtype", "kv_dtype", "cpu_isa", "block_size", "kv_axis_order")  # settings of a layout, of what computes

pytestmark = pytest.mark.e2e


async def answers(
    layouts: list[tuple[str, Layout]], transport: str, prompts: list[list[int]], *, has_warm: bool = True
) -> tuple[list[list[int]], list[worker_pb2.LoadReport]]:
    """The tokens of each prompt, cold and, if `has_warm`, then with a warm prefix cache, which moves what the router's
    policy finds worth it; and what each worker has done."""
    async with AsyncExitStack() as stack:
        infos: list[WorkerInfo] = []
        for role, layout in layouts:
            gpu = FakeDevice() if layout.get("gpu") else None
            settled = {name: value for name, value in layout.items() if name != "gpu"}
            sizes = {"max_running": 16}  # a device captures graphs of all steps up to it
            own: Layout = {"role": role, "chunk_tokens": CHUNK_TOKENS, "transports": (transport,)}
            config = WorkerConfig.of(str(TINY), **own, **settled, **sizes)
            computing = {name: layout[name] for name in OF_RUNNER if name in layout} | sizes
            settings = WorkerConfig.of(Path(TINY), threads=1, kv_memory_bytes=32 << 20, **computing)
            with patch.object(rank_steps, "GRAPH_TOKENS", GRAPH_TOKENS):
                service = WorkerService(config, ModelRunner.load(settings, gpu=gpu))
            where = await service.start()
            stack.push_async_callback(service.stop, 0.0)
            infos.append(WorkerInfo(where.incarnation, where.address, role, role))
        router = Router(RoutingConfig())
        await router.start()
        stack.push_async_callback(router.stop)
        router.update_fleet(infos)

        async def answer(name: str, prompt: list[int]) -> list[int]:
            sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            request = Request(name, tuple(prompt), sampling, timeout_s=60.0)
            return [token async for delta in router.stream(request) for token in delta.token_ids]

        cold = [await answer(f"cold-{i}", prompt) for i, prompt in enumerate(prompts)]
        if has_warm:
            warm = await asyncio.gather(*(answer(f"warm-{i}", prompt) for i, prompt in enumerate(prompts)))
            assert warm == cold
        return cold, [await load_of(info) for info in infos]


async def load_of(info: WorkerInfo) -> worker_pb2.LoadReport:
    """Whose books are right."""
    async with open_channel(info.address) as channel:
        return (await worker_pb2_grpc.WorkerStub(channel).GetState(worker_pb2.GetStateRequest())).load


def through(pair: tuple[Layout, Layout], transport: str, cases: Cases) -> int:
    """The bytes that travelled."""
    layouts: list[tuple[str, Layout]] = list(zip(("prefill", "decode"), pair, strict=True))
    found, loads = asyncio.run(answers(layouts, transport, [prompt for prompt, _ in cases]))
    assert found == [tokens for _, tokens in cases]
    assert sum(load.num_handoffs_received for load in loads) >= len(cases)
    return sum(load.handoff_bytes for load in loads)


@pytest.fixture(scope="module")
def exact_cases() -> Cases:
    return untied_prompts(TINY, seed=21, lengths=LENGTHS, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def wide_cases() -> Cases:
    prompts = random_prompts(31, [n for n in LENGTHS for _ in range(6)])
    found = reference_greedy(TINY, prompts, NEW_TOKENS)
    return [(p, tokens) for p, (tokens, gap) in zip(prompts, found, strict=True) if gap > WIDE_GAP]


@pytest.fixture(scope="module")
def mixed_cases(wide_cases: Cases) -> Cases:
    alone, _ = asyncio.run(answers([("mixed", PLAIN | {"dtype": "bfloat16"})], "grpc", [p for p, _ in wide_cases]))
    cases = [case for case, tokens in zip(wide_cases, alone, strict=True) if case[1] == tokens]
    assert len(cases) >= 4
    return cases


@pytest.mark.parametrize("transport", ["grpc", "nixl", "shared_memory"])
@pytest.mark.parametrize("pair", EXACT_PAIRS)
def test_tokens_are_the_references_between_unlike_pools(exact_cases: Cases, pair: str, transport: str) -> None:
    through(EXACT_PAIRS[pair], transport, exact_cases)


@pytest.mark.parametrize("pair", DEVICE_PAIRS)
def test_tokens_are_the_references_to_and_from_a_device(exact_cases: Cases, pair: str) -> None:
    through(DEVICE_PAIRS[pair], "grpc", exact_cases[::3])


@pytest.mark.parametrize("transport", ["grpc", "nixl", "shared_memory"])
@pytest.mark.parametrize("pair", MIXED_PAIRS)
def test_tokens_are_one_workers_between_two_dtypes(mixed_cases: Cases, pair: str, transport: str) -> None:
    through(MIXED_PAIRS[pair], transport, mixed_cases)


def test_a_narrower_wire_carries_fewer_bytes_and_the_same_tokens(wide_cases: Cases) -> None:
    """Both pools keep float32; only what travels is narrower."""
    exact = through((PLAIN, PLAIN), "grpc", wide_cases)
    narrowed = {
        wire: through((PLAIN, PLAIN | {"wire_dtype": wire}), "grpc", wide_cases) for wire in ("bfloat16", "int8")
    }
    head_dim = 32  # of examples/tiny: int8 travels with a bfloat16 scale for each vector
    assert narrowed == {"bfloat16": exact // 2, "int8": exact * (head_dim + 2) // (4 * head_dim)}


@pytest.fixture(scope="module", params=["int8", *(pytest.param(of, marks=pytest.mark.long) for of in ("fp8", "int4"))])
def few_bits(request: pytest.FixtureRequest) -> Layout:
    return PLAIN | {"kv_dtype": request.param}


@pytest.fixture(scope="module")
def few_bits_alone(few_bits: Layout, wide_cases: Cases) -> Cases:
    """What one worker that keeps KV in few bits gives."""
    prompts = [p for p, _ in wide_cases]
    found, _ = asyncio.run(answers([("mixed", few_bits)], "grpc", prompts))
    return list(zip(prompts, found, strict=True))


@pytest.mark.parametrize("transport", FEW_BITS_PAIRS)
def test_pools_of_few_bits_give_one_workers_tokens(few_bits: Layout, few_bits_alone: Cases, transport: str) -> None:
    source, sink = FEW_BITS_PAIRS[transport]
    through((few_bits | source, few_bits | sink), transport, few_bits_alone)


@pytest.mark.parametrize("pair", FEW_BITS_DEVICE_PAIRS)
def test_pools_of_few_bits_on_a_device_give_the_tokens_of_a_worker_on_cpu(
    few_bits: Layout, few_bits_alone: Cases, pair: str
) -> None:
    source, sink = FEW_BITS_DEVICE_PAIRS[pair]
    through((few_bits | source, few_bits | sink), "grpc", few_bits_alone[::3])


def test_pools_of_full_width_hand_off_to_those_of_few_bits_and_back(
    few_bits: Layout, few_bits_alone: Cases, wide_cases: Cases
) -> None:
    if few_bits["kv_dtype"] == "int4":
        pytest.skip("tokens are others where a part of the KV was at full width: it has 4 bits")
    cases = [case for case, alone in zip(wide_cases, few_bits_alone, strict=True) if case == alone]
    assert len(cases) >= 4
    cases = cases[:: len(cases) // 4][:4]  # of many lengths
    device = PLAIN | {"gpu": True}
    for source, sink in (
        (PLAIN, few_bits | {"block_size": 32, "verify_kv": True}),
        (PLAIN, few_bits | {"wire_dtype": few_bits["kv_dtype"]}),
        (few_bits | {"block_size": 32}, PLAIN | {"kv_axis_order": "layer"}),
        (few_bits | {"cpu_isa": "none", "block_size": 24}, few_bits),
        (device, few_bits),
        (few_bits, device),
        (device, few_bits | device),
        (few_bits | device, device),
        (PLAIN, few_bits | device | {"block_size": 32}),
        (few_bits | device, PLAIN),
        (device, few_bits | device | {"wire_dtype": few_bits["kv_dtype"]}),
    ):
        through((source, sink), "grpc", cases)


@pytest.mark.parametrize("pair", KIVI_PAIRS)
def test_pools_of_kivi_give_one_workers_tokens(wide_cases: Cases, pair: str) -> None:
    """The sink has full blocks, and computes the tokens after them again: their block was in the source's KV tail."""
    prompts, (transport, source, sink) = [p for p, _ in wide_cases], KIVI_PAIRS[pair]
    alone, _ = asyncio.run(answers([("mixed", KIVI)], "grpc", prompts))
    through((KIVI | source, KIVI | sink), transport, list(zip(prompts, alone, strict=True)))


def test_pools_of_full_width_hand_off_to_those_of_kivi_and_back(wide_cases: Cases) -> None:
    """Of prompts whose tokens are the same with either. A sink in kivi rounds full blocks, once they are read."""
    alone, _ = asyncio.run(answers([("mixed", KIVI)], "grpc", [p for p, _ in wide_cases]))
    cases = [case for case, tokens in zip(wide_cases, alone, strict=True) if case[1] == tokens]
    assert len(cases) >= 8
    for source, sink in (
        (PLAIN | {"block_size": 64}, KIVI | {"verify_kv": True}),
        (PLAIN | {"block_size": 32}, KIVI | {"wire_dtype": "bfloat16"}),
        (KIVI, PLAIN | {"block_size": 32}),
        (KIVI | {"kv_axis_order": "layer"}, PLAIN | {"kv_dtype": "int8", "block_size": 64, "verify_kv": True}),
        (PLAIN | {"gpu": True, "block_size": 64}, KIVI | {"gpu": True}),
        (KIVI | {"gpu": True}, PLAIN | {"gpu": True, "kv_dtype": "int8", "block_size": 32}),
    ):
        through((source, sink), "grpc", cases)


def test_kv_of_few_bits_travels_in_few_bytes(few_bits: Layout, few_bits_alone: Cases) -> None:
    prompts, wire = [p for p, _ in few_bits_alone[:4]], {"wire_dtype": few_bits["kv_dtype"]}

    def bytes_of(source: Layout, sink: Layout) -> int:
        pools = [("prefill", source), ("decode", sink)]
        _, loads = asyncio.run(answers(pools, "grpc", prompts, has_warm=False))
        return loads[1].handoff_bytes

    full, head_dim = bytes_of(PLAIN, PLAIN), 32  # of examples/tiny
    few = full * vector_bytes(few_bits["kv_dtype"], head_dim) // (4 * head_dim)
    assert bytes_of(few_bits, few_bits) == bytes_of(PLAIN, few_bits | wire) == few
    assert bytes_of(PLAIN, few_bits) == full  # the sink converts
