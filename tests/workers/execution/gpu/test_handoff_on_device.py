"""Whole hand-offs between pools of which one or both are on a device: every transport, unlike layouts, failures."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.workers.common.errors import ChecksumMismatch, ConfigError, TransportError
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.segment_receiver import PullSettings
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.device_kv import Staged
from diptych.workers.kv.dtypes import vector_bytes
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.segment import Segment
from diptych.workers.transport.select import make_transports

from ....support.gpu.device_pairs import (
    BLOCKS,
    DOT_FP8,
    DRAFTED,
    EQUAL,
    INT8,
    LAYOUT,
    PAIRS,
    TWO,
    TWO_INT8,
    UNLIKE,
    Case,
    due_rows,
    hand_over,
    known_rows,
    load,
)
from ....support.gpu.fake_cuda import FakeCuda, make_device_memory, seen_by_host
from ....support.handoff_pair import (
    make_memory,
)

# A pool in host memory has no CUDA IPC.
WAYS = [("grpc", name) for name in PAIRS] + [("cuda_ipc", name) for name, pair in PAIRS.items() if all(pair[2:])]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("transport", "name"), WAYS)
async def test_tokens_arrive_whatever_the_layout(transport: str, name: str, verify: bool) -> None:
    case = Case(*PAIRS[name], transport, PullSettings(verify=verify))
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.transport == transport, result
    assert np.array_equal(load(memory, engine.table), due_rows(case.theirs, case.ours))


@pytest.mark.parametrize("name", [name for transport, name in WAYS if transport == "cuda_ipc"])
async def test_tokens_arrive_by_a_kernel_that_takes_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.transport.runs.FEW_COPIES", 0)
    case = Case(*PAIRS[name], settings=PullSettings(verify=True), sink_cuda=FakeCuda(takes_lists=True))
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.transport == "cuda_ipc", result
    assert np.array_equal(load(memory, engine.table), due_rows(case.theirs, case.ours))
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


@pytest.mark.parametrize("name", ["equal", "smaller blocks, bfloat16", "dot onto a device", "int8 into smaller blocks"])
async def test_a_device_that_does_everything_at_once_gives_the_same(name: str) -> None:
    case = Case(*PAIRS[name], "grpc", is_late=False)
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult)
    assert np.array_equal(load(memory, engine.table), due_rows(case.theirs, case.ours))


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


@pytest.mark.parametrize("wire", ["int8", "fp8", "int4"])
async def test_vectors_that_the_source_rounds_are_stored_as_they_come(wire: str) -> None:
    """In a pool of the wire's dtype: with the numbers and the scales that the sink would have found."""
    ours = replace(INT8, dtype=wire, block_size=4)
    case = Case(TWO, ours, transport="grpc", settings=PullSettings(wire))
    result, memory, engine = await hand_over(case)
    assert isinstance(result, PullResult) and result.num_bytes == vector_bytes(wire, 16) / 64 * 5 * TWO.block_bytes
    assert np.array_equal(load(memory, engine.table), due_rows(TWO, ours))


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
async def test_vectors_of_few_bits_come_back_from_a_host_as_they_left(dtype: str) -> None:
    """CPU to GPU to CPU: bit by bit, NaNs and all."""
    host = replace(DOT_FP8, dtype=dtype, head_dim=32)
    on_gpu = replace(TWO_INT8, dtype=dtype, head_dim=32, block_size=4)
    content = np.random.default_rng(1).bytes(5 * host.block_bytes)
    first, middle, last = make_memory(host, 5, content=content), make_device_memory(on_gpu, 20), make_memory(host, 5)
    for source, sink in ((first, middle), (seen_by_host(middle), last)):
        table = tuple(range(sink.num_blocks))
        segment = Segment(0, tuple(range(source.num_blocks)), (1,) * source.num_blocks, 0, host.num_layers)
        bridge = Bridge(sink, source.layout, source.num_blocks)
        sent = b"".join(source.read(source.runs(segment.block_ids, 0, host.num_layers)))
        if sink.device is None:
            bridge.convert(memoryview(sent), segment, table, 0)
            continue
        sink.device.staging.view[: len(sent)] = sent
        sink.device.convert(bridge, Staged(segment, 0, len(sent), is_on_device=False), table, 0)
    assert first.region.view == last.region.view


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
