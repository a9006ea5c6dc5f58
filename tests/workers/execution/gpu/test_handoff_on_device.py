"""Whole hand-offs between pools of which one or both are on a device: every transport, unlike layouts, failures."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from diptych.workers.common.errors import ChecksumMismatch, ConfigError, DiptychError, TransportError
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.segment_receiver import DEFAULT_PULL_SETTINGS, PullSettings
from diptych.workers.kv.device_kv import DeviceKV
from diptych.workers.kv.layout import DOT, LAYER_MAJOR, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.packing import Pool, unpacked
from diptych.workers.kv.staging import Staging
from diptych.workers.kv.wire import STORAGE, Numbers
from diptych.workers.transport.select import make_transports

from ....support.gpu.fake_cuda import STAGING_BYTES, FakeCuda, make_device_memory, seen_by_host
from ....support.handoff_pair import (
    SinkEngine,
    make_memory,
    receive,
    seal_event,
    serve,
    start,
    until_quiet,
)

LAYOUT = KVLayout("float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=16, model_id="m")
NUM_TOKENS = 70
BLOCKS = {16: (6, 7, 1, 4, 3), 4: tuple(range(19, 1, -1))}  # of the source, by block size
BF16 = replace(LAYOUT, dtype="bfloat16")
DOT_BF16 = replace(BF16, packing=DOT)
LATENT = replace(LAYOUT, num_kv_heads=1, head_dim=40, num_vectors=1)
UNLIKE = replace(LAYOUT, layer_shapes=((4, 16), (4, 16), (2, 40)))
TWO = replace(LAYOUT, tensor_parallel=2)
DRAFTED = replace(UNLIKE, layer_shapes=((4, 16), (4, 16), (2, 32)), num_draft_layers=1, draft_id="d")
EQUAL = LAYOUT, LAYOUT
# name: source, sink, on a device: source, sink
PAIRS = {
    "equal": (*EQUAL, True, True),
    "onto a layer-major pool": (LAYOUT, replace(LAYOUT, axis_order=LAYER_MAJOR), True, True),
    "off a layer-major pool": (replace(LAYOUT, axis_order=LAYER_MAJOR), replace(LAYOUT, block_size=4), True, True),
    "smaller blocks, bfloat16": (LAYOUT, replace(BF16, block_size=4), True, True),
    "larger blocks, float32": (replace(BF16, block_size=4), replace(LAYOUT, block_size=64), True, True),
    "off a device": (*EQUAL, True, False),
    "off a device, into dot": (LAYOUT, DOT_BF16, True, False),
    "onto a device": (*EQUAL, False, True),
    "dot onto a device": (DOT_BF16, replace(LAYOUT, block_size=4), False, True),
    "dot, layer-major, two ranks, onto a device": (
        replace(LAYOUT, packing=DOT, axis_order=LAYER_MAJOR, tensor_parallel=2),
        BF16,
        False,
        True,
    ),
    "replicated heads onto a device": (replace(LAYOUT, tensor_parallel=8), LAYOUT, False, True),
    "latents": (LATENT, LATENT, True, True),
    "latents, layer-major, into smaller blocks": (
        replace(LATENT, axis_order=LAYER_MAJOR),
        replace(LATENT, dtype="bfloat16", block_size=4),
        True,
        True,
    ),
    "latents of two ranks onto a device": (replace(LATENT, tensor_parallel=2), LATENT, False, True),
    "latents off a device": (LATENT, replace(LATENT, block_size=4), True, False),
    "unlike layers": (UNLIKE, UNLIKE, True, True),
    "unlike layers, layer-major, into smaller blocks": (
        replace(UNLIKE, axis_order=LAYER_MAJOR),
        replace(UNLIKE, dtype="bfloat16", block_size=4),
        True,
        True,
    ),
    "unlike layers of two ranks onto a device": (replace(UNLIKE, tensor_parallel=2), UNLIKE, False, True),
    "unlike layers off a device": (UNLIKE, replace(UNLIKE, block_size=4), True, False),
    "a target and its draft": (DRAFTED, replace(DRAFTED, block_size=4), True, True),
    "dot, of a target and its draft, onto a device": (
        replace(DRAFTED, packing=DOT, dtype="bfloat16", tensor_parallel=2),
        replace(DRAFTED, block_size=4, axis_order=LAYER_MAJOR),
        False,
        True,
    ),
    "a draft of two ranks' first alone": (
        replace(DRAFTED, tensor_parallel=2, draft_tensor_parallel=1),
        replace(DRAFTED, block_size=4),
        True,
        True,
    ),
    "a draft onto two ranks' first alone": (
        DRAFTED,
        replace(DRAFTED, tensor_parallel=2, draft_tensor_parallel=1),
        True,
        True,
    ),
    "two ranks onto one": (TWO, LAYOUT, True, True),
    "one onto two, layer-major, of smaller blocks": (
        BF16,
        replace(TWO, axis_order=LAYER_MAJOR, block_size=4),
        True,
        True,
    ),
    "two ranks off a device": (replace(TWO, axis_order=LAYER_MAJOR), DOT_BF16, True, False),
    "dot onto two ranks": (DOT_BF16, TWO, False, True),
    "two ranks onto eight, which replicate heads": (TWO, replace(LAYOUT, tensor_parallel=8), True, True),
    "unlike layers onto two ranks": (UNLIKE, replace(UNLIKE, tensor_parallel=2), True, True),
}


def known_rows(layout: KVLayout = LAYOUT) -> Numbers:
    """[token, numbers of all layers] float32: integers that bfloat16 can represent; each identifies its place."""
    shapes = [layout.shape_of(layer) for layer in range(layout.num_layers)]
    shape = NUM_TOKENS, layout.num_vectors * sum(heads * dim for heads, dim in shapes)
    return (np.arange(np.prod(shape)) % 251).astype(np.float32).reshape(shape)


def as_stored(rows: Numbers, dtype: str) -> Numbers:
    return rows if dtype == "float32" else (rows.view(np.uint32) >> 16).astype(np.uint16)


def store(memory: KVMemory, table: tuple[int, ...], rows: Numbers) -> None:
    layout, first = memory.layout, 0
    for group in layout.layer_groups(0, layout.num_layers):
        of, pool, layers = group.uniform, Pool(memory, group), slice(0, len(group.layers))
        sizes = layers.stop, of.num_vectors, 1, of.num_kv_heads, of.head_dim
        end = first + int(np.prod(sizes))
        for token, row in enumerate(as_stored(rows[:, first:end], layout.dtype)):
            block, slot = table[token // of.block_size], token % of.block_size
            for rank in range(of.tensor_parallel):
                heads = slice(of.first_head(rank), of.first_head(rank) + of.heads_per_rank)
                own = slice(0, of.heads_per_rank)
                pool.write(rank, block, layers, own, slot, row.reshape(sizes)[:, :, :, heads])
        first = end


def load(memory: KVMemory, table: tuple[int, ...]) -> Numbers:
    """Of whole heads; ranks that have the same must have the same of it."""
    layout = memory.layout
    assert memory.region.view is not None
    if not layout.layer_shapes:
        ranks = np.frombuffer(memory.region.view, np.uint8).reshape(layout.tensor_parallel, -1)
        firsts = {layout.first_head(rank): rank for rank in layout.distinct_ranks}
        assert all(np.array_equal(of, ranks[firsts[layout.first_head(rank)]]) for rank, of in enumerate(ranks))
    numbers, parts = np.frombuffer(memory.region.view, STORAGE[layout.dtype]), list[Numbers]()
    for group in layout.layer_groups(0, layout.num_layers):
        of, size = group.uniform, group.uniform.layer_bytes // numbers.itemsize
        starts = layout.offsets(group, memory.num_blocks, table).reshape(-1) // numbers.itemsize
        pieces = np.stack([numbers[start : start + size] for start in starts])
        outer, inner = (len(of.distinct_ranks), len(table), -1), (of.num_vectors, of.block_size)
        heads = of.heads_per_rank * of.head_dim
        blocks = (unpacked(pieces, of) if of.packing == DOT else pieces).reshape(*outer, *inner, heads)
        parts.append(blocks.transpose(1, 4, 2, 3, 0, 5).reshape(len(table) * of.block_size, -1)[:NUM_TOKENS])
    tokens = np.concatenate(parts, axis=1)
    return tokens if layout.dtype == "float32" else (tokens.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Case:
    theirs: KVLayout
    ours: KVLayout
    source_on_device: bool = True
    sink_on_device: bool = True
    transport: str = "cuda_ipc"
    settings: PullSettings = DEFAULT_PULL_SETTINGS
    is_late: bool = True
    source_cuda: FakeCuda = field(default_factory=FakeCuda)
    sink_cuda: FakeCuda = field(default_factory=FakeCuda)

    def memory(self, layout: KVLayout, num_blocks: int, driver: FakeCuda | None) -> KVMemory:
        if driver is None:
            return make_memory(layout, num_blocks)
        return make_device_memory(layout, num_blocks, driver=driver, device=FakeDevice(is_late=self.is_late))


def looked_at(memory: KVMemory) -> KVMemory:
    return memory if memory.device is None else seen_by_host(memory)


def staging_of(device: DeviceKV | None) -> Staging:
    return device.staging if device is not None else Staging(STAGING_BYTES)


async def hand_over(
    case: Case, spoil: Callable[[KVMemory], None] = lambda _: None
) -> tuple[PullResult | DiptychError, KVMemory, SinkEngine]:
    """Pull in two segments with `case.transport` and gRPC; `spoil` changes the source's pool during the pull."""
    theirs = case.memory(case.theirs, 20, case.source_cuda if case.source_on_device else None)
    ours = case.memory(case.ours, 20, case.sink_cuda if case.sink_on_device else None)
    blocks = BLOCKS[case.theirs.block_size]
    store(looked_at(theirs), blocks, known_rows(case.theirs))
    table = tuple(range(19, 19 - case.ours.num_blocks_for(NUM_TOKENS), -1))
    engine, staging = SinkEngine(table=table), staging_of(ours.device)
    names = (case.transport, "grpc") if case.transport != "grpc" else ("grpc",)
    far = make_transports(names, [theirs.region], device=theirs.device) if case.source_on_device else None
    near_names = names if case.sink_on_device else ("grpc",)
    near = make_transports(near_names, [ours.region, *staging.regions], device=ours.device)
    async with AsyncExitStack() as stack:
        for transport in (*(far or {}).values(), *near.values()):
            stack.push_async_callback(transport.close)
        served = await stack.enter_async_context(serve(memory=theirs, transports=far))
        sink, _ = await stack.enter_async_context(
            receive(engine, memory=ours, transports=near, settings=case.settings, staging=staging)
        )
        served.source.offer("h", NUM_TOKENS)
        served.announce(blocks[:3], layout=case.theirs)
        pull = start(sink, served)
        await engine.until("reserve")
        spoil(looked_at(theirs))
        served.announce(blocks[3:], 3, layout=case.theirs)
        served.source.on_event(seal_event("h", NUM_TOKENS, [7]))
        try:
            result: PullResult | DiptychError = await pull  # type: ignore[assignment]
        except DiptychError as e:
            result = e
        await until_quiet(sink)
    assert staging.num_free == STAGING_BYTES
    assert not case.sink_cuda.opened, "what is mapped is unmapped at the end"
    case.source_cuda.free()
    case.sink_cuda.free()
    return result, looked_at(ours), engine


# A pool in host memory has no CUDA IPC.
WAYS = [("grpc", name) for name in PAIRS] + [("cuda_ipc", name) for name, pair in PAIRS.items() if all(pair[2:])]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("transport", "name"), WAYS)
async def test_tokens_arrive_whatever_the_layout(transport: str, name: str, verify: bool) -> None:
    case = Case(*PAIRS[name], transport, PullSettings(verify=verify))
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.transport == transport, result
    assert np.array_equal(load(memory, engine.table), known_rows(case.ours))


@pytest.mark.parametrize("name", [name for transport, name in WAYS if transport == "cuda_ipc"])
async def test_tokens_arrive_by_a_kernel_that_takes_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.transport.runs.FEW_COPIES", 0)
    case = Case(*PAIRS[name], settings=PullSettings(verify=True), sink_cuda=FakeCuda(takes_lists=True))
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.transport == "cuda_ipc", result
    assert np.array_equal(load(memory, engine.table), known_rows(case.ours))
    assert case.sink_cuda.lists and not case.sink_cuda.num_copies


@pytest.mark.parametrize("transport", ["grpc", "cuda_ipc"])
@pytest.mark.parametrize("block_size", [16, 4])
async def test_a_draft_that_only_one_side_has_stays_there(transport: str, block_size: int) -> None:
    target = replace(LAYOUT, num_layers=2, block_size=block_size)
    case = Case(DRAFTED, target, transport=transport, settings=PullSettings(verify=True))
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.num_bytes == 5 * replace(LAYOUT, num_layers=2).block_bytes
    num_numbers = 2 * 2 * 4 * 16
    assert np.array_equal(load(memory, engine.table), known_rows(DRAFTED)[:, :num_numbers])
    case = Case(replace(target, block_size=16), replace(DRAFTED, block_size=block_size), transport=transport)
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult)
    found = load(memory, engine.table)
    assert np.array_equal(found[:, :num_numbers], known_rows(target)) and not found[:, num_numbers:].any()


@pytest.mark.parametrize("name", ["equal", "smaller blocks, bfloat16", "dot onto a device"])
async def test_a_device_that_does_everything_at_once_gives_the_same(name: str) -> None:
    case = Case(*PAIRS[name], "grpc", is_late=False)
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult)
    assert np.array_equal(load(memory, engine.table), known_rows())


@pytest.mark.parametrize(("wire", "share"), [("bfloat16", 0.5), ("int8", (16 + 2) / 64)])
@pytest.mark.parametrize(("source_on_device", "sink_on_device"), [(True, True), (True, False), (False, True)])
async def test_a_narrower_wire_goes_over_grpc(
    wire: str, share: float, source_on_device: bool, sink_on_device: bool
) -> None:
    settings = PullSettings(wire, verify=True)
    case = Case(LAYOUT, replace(LAYOUT, block_size=4), source_on_device, sink_on_device, "grpc", settings)
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.transport == "grpc"
    assert result.num_bytes == share * 5 * LAYOUT.block_bytes
    error = load(memory, engine.table) - known_rows()
    assert np.linalg.norm(error) <= 0.01 * np.linalg.norm(known_rows())


async def test_a_narrower_wire_of_unlike_layers() -> None:
    settings = PullSettings("int8", verify=True)
    case = Case(UNLIKE, UNLIKE, transport="grpc", settings=settings)
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult)
    error = load(memory, engine.table) - known_rows(UNLIKE)
    assert np.linalg.norm(error) <= 0.01 * np.linalg.norm(known_rows(UNLIKE))


def flip_a_number(memory: KVMemory) -> None:
    """Of a block that was named already."""
    assert memory.region.view is not None
    memory.region.view[BLOCKS[16][0] * LAYOUT.block_bytes] ^= 1


@pytest.mark.parametrize("transport", ["cuda_ipc", "grpc"])
async def test_what_differs_from_its_checksum_is_never_committed(transport: str) -> None:
    case = Case(*EQUAL, transport=transport, settings=PullSettings(verify=True))
    result, _, engine = await hand_over(case, flip_a_number)
    assert isinstance(result, ChecksumMismatch), result
    assert not any(call[0] == "commit" for call in engine.calls)  # type: ignore[index]


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        (FakeCuda(device_uuid=b"\2" * 16), FakeCuda(out_of_reach=[b"\2" * 16])),
        (FakeCuda(device_uuid=b"short"), FakeCuda()),
    ],
    ids=["out of reach", "malformed uuid"],
)
async def test_a_device_that_cannot_be_read_is_read_over_grpc(
    source: FakeCuda, sink: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    result, memory, engine = await hand_over(Case(*EQUAL, source_cuda=source, sink_cuda=sink))
    assert isinstance(result, PullResult) and result.transport == "grpc"
    assert np.array_equal(load(memory, engine.table), known_rows())
    assert "cannot be read over cuda_ipc" in caplog.text


class BadHandles(FakeCuda):
    def export(self, address: int) -> tuple[bytes, int]:
        return b"\xff" * 64, 0


class SmallAllocations(FakeCuda):
    """Claims that the pool begins later in its allocation than it does."""

    def export(self, address: int) -> tuple[bytes, int]:
        handle, offset = super().export(address)
        return handle, offset + 4096


@pytest.mark.parametrize("kind", [BadHandles, SmallAllocations])
async def test_a_handle_that_cannot_be_mapped_is_not_read(
    kind: type[FakeCuda], caplog: pytest.LogCaptureFixture
) -> None:
    result, memory, engine = await hand_over(Case(*EQUAL, source_cuda=kind()))
    assert isinstance(result, PullResult) and result.transport == "grpc"
    assert np.array_equal(load(memory, engine.table), known_rows())
    assert "cannot be read over cuda_ipc" in caplog.text


class Unshared(FakeCuda):
    def export(self, address: int) -> tuple[bytes, int]:
        raise TransportError("cuIpcGetMemHandle failed")


def test_memory_that_cannot_be_shared_has_no_cuda_ipc() -> None:
    memory = make_device_memory(LAYOUT, 4, driver=Unshared())
    with pytest.raises(ConfigError, match="'cuda_ipc' is not usable: cuIpcGetMemHandle failed"):
        make_transports(("cuda_ipc", "grpc"), [memory.region], device=memory.device)


def test_host_memory_has_no_cuda_ipc() -> None:
    with pytest.raises(ConfigError, match="not in CUDA memory"):
        make_transports(("cuda_ipc", "grpc"), [make_memory(LAYOUT, 4).region])


async def test_auto_prefers_cuda_ipc_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("no nixl")

    monkeypatch.setattr("diptych.workers.transport.select.NixlTransport", absent)
    for kind, expected in ((FakeCuda, ["cuda_ipc", "grpc"]), (Unshared, ["grpc"])):
        memory = make_device_memory(LAYOUT, 4, driver=kind())
        made = make_transports("auto", [memory.region], device=memory.device)
        assert list(made) == expected
        for transport in made.values():
            await transport.close()
