"""Pools of several GPUs that another worker maps by CUDA IPC, piece by piece, over real sockets and fake GPUs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from diptych.proto import kv_pb2
from diptych.workers.common.errors import TransportError
from diptych.workers.device.cuda_driver import LibCuda
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.segment_receiver import DEFAULT_PULL_SETTINGS, PullSettings
from diptych.workers.kv.layout import LAYER_MAJOR, ROWS, SCALES_LAST, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.packing import unpacked
from diptych.workers.kv.wire import STORAGE
from diptych.workers.transport import cuda_ipc
from diptych.workers.transport.base import Source
from diptych.workers.transport.cuda_ipc import CudaIpcTransport
from diptych.workers.transport.file_server import FileServer
from diptych.workers.transport.select import make_transports

from ...support.gpu.fake_cuda import seen_by_host
from ...support.gpu.fake_libcuda import FakeLibCuda, FakeVirtualMemory
from ...support.gpu.fake_ranks import FakeRanks, make_pieces
from ...support.handoff_pair import Served, SinkEngine, receive, seal_event, serve, start

LAYOUT = KVLayout("float32", block_size=4, num_layers=3, num_kv_heads=6, head_dim=8, model_id="m", tensor_parallel=3)
INT8 = replace(LAYOUT, dtype="int8", head_dim=30, packing=SCALES_LAST)  # of as many bytes
NUM_BLOCKS = 256  # whole granules of each number of ranks
BLOCKS, TABLE = (0, 255, 7, 8, 31), (0, 255, 9, 3, 30)
CUDA_IPC = ("cuda_ipc",)


Pools = Callable[..., tuple[list[KVMemory], list[FakeRanks]]]


@pytest.fixture
def pools() -> Iterator[Pools]:
    """Makes a pool of each layout. At the end nothing of their memory is left."""
    made: list[FakeRanks] = []

    def make(*layouts: KVLayout) -> tuple[list[KVMemory], list[FakeRanks]]:
        ranks = [FakeRanks(layout.tensor_parallel) for layout in layouts]
        made.extend(ranks)
        return [make_pieces(layout, NUM_BLOCKS, ranks=of) for layout, of in zip(layouts, ranks, strict=True)], ranks

    yield make
    for ranks in made:
        ranks.check_nothing_is_left()


async def pulled(
    theirs: KVMemory,
    ours: KVMemory,
    blocks: Sequence[int],
    table: Sequence[int],
    names: Sequence[str] = CUDA_IPC,
    *,
    settings: PullSettings = DEFAULT_PULL_SETTINGS,
    engine: SinkEngine | None = None,
) -> PullResult:
    """The result of a hand-off of the blocks from one pool into those of `table` in the other."""
    assert theirs.device is not None and ours.device is not None
    far = make_transports(names, [theirs.region], theirs.device, theirs.rank_links)
    near = make_transports(names, [ours.region, *ours.device.staging.regions], ours.device, ours.rank_links)
    engine = engine or SinkEngine(table=tuple(table))
    try:
        async with (
            serve(memory=theirs, transports=far) as served,
            receive(engine, memory=ours, transports=near, staging=ours.device.staging, settings=settings) as (sink, _),
        ):
            hand_off(served, theirs.layout, blocks)
            return cast(PullResult, await start(sink, served))
    finally:
        for transport in (*far.values(), *near.values()):
            await transport.close()


def hand_off(served: Served, layout: KVLayout, blocks: Sequence[int]) -> None:
    num_tokens = layout.block_size * len(blocks) - 1
    served.source.offer("h", num_tokens)
    served.announce(blocks, layout=layout)
    served.source.on_event(seal_event("h", num_tokens, [7]))


def fill(memory: KVMemory) -> None:
    region = seen_by_host(memory).region
    assert region.view is not None
    region.view[:] = np.random.default_rng(3).standard_normal(region.num_bytes // 4, np.float32).tobytes()


def content(memory: KVMemory, blocks: Sequence[int]) -> torch.Tensor:
    """[blocks, layers, vectors, slots, heads, row_size], whatever the ranks, the order of axes and the packing are."""
    layout, seen = memory.layout, seen_by_host(memory)
    found: list[torch.Tensor] = []
    for block in blocks:
        data = bytearray(b"".join(seen.read(seen.runs([block], 0, layout.num_layers))))
        shape = layout.tensor_parallel, 3, 2, layout.block_size, layout.heads_per_rank, -1
        numbers = np.frombuffer(data, STORAGE[layout.dtype])
        rows = torch.from_numpy(numbers if layout.packing == ROWS else unpacked(numbers, layout)).view(shape)
        found.append(rows.permute(1, 2, 3, 0, 4, 5).flatten(3, 4))
    return torch.stack(found)


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize(
    ("layout", "order"), [(LAYOUT, LAYOUT.axis_order), (LAYOUT, LAYER_MAJOR), (INT8, LAYOUT.axis_order)]
)
@pytest.mark.parametrize(("num_ranks", "num_own"), [(3, 3), (3, 1), (2, 3), (3, 2)])
async def test_kv_of_several_gpus_goes_straight_to_those_of_another_worker(
    num_ranks: int,
    num_own: int,
    layout: KVLayout,
    order: str,
    has_kernel: bool,
    pools: Pools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one copy for each pair of GPUs at least: the fake driver refuses one that touches two; or by a kernel, for
    which that makes no difference. Some of these blocks are at the ends of the pieces, and so adjacent to those of the
    next rank."""
    monkeypatch.setattr("diptych.workers.transport.runs.FEW_COPIES", 1)
    source = replace(layout, tensor_parallel=num_ranks)
    memories, ranks = pools(source, replace(layout, tensor_parallel=num_own, axis_order=order))
    fill(memories[0])
    ranks[1].memories[0].has_kernel = has_kernel
    result = await pulled(*memories, BLOCKS, TABLE)
    assert ranks[1].memories[0].num_lists == has_kernel
    assert result.transport == "cuda_ipc" and result.num_bytes == len(BLOCKS) * source.block_bytes
    assert torch.equal(content(memories[0], BLOCKS), content(memories[1], TABLE))
    assert sum(row.num_bytes * row.num for row in ranks[1].memories[0].copied) == result.num_bytes
    assert len(ranks[1].libcudas[0].mapped) == (num_own if num_own > 1 else 0), "theirs is not mapped any more"


async def connected(opened: kv_pb2.Opened, near: CudaIpcTransport) -> None:
    await near.connect(Source("h", "sink/1", opened, cast(Any, None)))


@asynccontextmanager
async def transports(
    pools: Pools,
) -> AsyncIterator[tuple[kv_pb2.Opened, CudaIpcTransport, CudaIpcTransport, FakeLibCuda]]:
    """What a source with three GPUs publishes, its transport, that of a sink with one, and the sink's driver."""
    memories, ranks = pools(LAYOUT, replace(LAYOUT, tensor_parallel=1))
    made = [make_transports(CUDA_IPC, [of.region], device=of.device)["cuda_ipc"] for of in memories]
    far, near = cast(list[CudaIpcTransport], made)
    opened = kv_pb2.Opened(source_incarnation="s")
    try:
        far.publish(opened)
        yield opened, far, near, ranks[1].libcudas[0]
    finally:
        await near.close()
        await far.close()


async def test_a_source_is_mapped_once_and_until_it_ends(pools: Pools) -> None:
    async with transports(pools) as (opened, far, near, libcuda):
        for _ in range(3):
            await connected(opened, near)
        assert len(libcuda.mapped) == 3 and not libcuda.handles
        assert [peer.life is not None for peer in near._peers.values()] == [True]
        await far.close()
        while near._peers:  # the connection tells
            await asyncio.sleep(0)
        with pytest.raises(TransportError, match="does not pass its memory"):
            await connected(opened, near)
    assert not libcuda.mapped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num": 0}, "malformed pieces"),
        ({"num": 2}, "more than 2 descriptors came"),
        ({"num": 7}, "malformed pieces"),
        ({"num": 251}, "malformed pieces"),
        ({"token": b"short"}, "malformed pieces"),
        ({"socket": "a\0b"}, "malformed pieces"),
        ({"socket": "nobody"}, "does not pass its memory"),
        ({"token": b"x" * 32}, "does not pass its memory"),
    ],
)
async def test_pieces_that_cannot_be_are_refused(changes: dict[str, Any], message: str, pools: Pools) -> None:
    async with transports(pools) as (opened, _, near, libcuda):
        for name, value in changes.items():
            setattr(opened.cuda_ipc.pieces, name, value)
        with pytest.raises(TransportError, match=message):
            await connected(opened, near)
        assert not libcuda.mapped and not libcuda.handles


@pytest.mark.parametrize("change", ["larger", "with a handle", "with an offset"])
async def test_a_pool_that_does_not_fit_its_pieces_is_refused(change: str, pools: Pools) -> None:
    async with transports(pools) as (opened, _, near, libcuda):
        if change == "larger":
            opened.cuda_ipc.num_bytes *= 2
        elif change == "with a handle":
            opened.cuda_ipc.handle = b"h" * 64
        else:
            opened.cuda_ipc.offset = 512
        with pytest.raises(TransportError, match=r"INVALID_VALUE|malformed"):
            await connected(opened, near)
        assert not libcuda.mapped


@pytest.mark.parametrize("why", ["out of reach", "no descriptors"])
async def test_where_pieces_cannot_be_mapped_grpc_steps_in(
    why: str, pools: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*descriptors: int) -> FileServer:
        raise OSError("too many open files")

    if why == "no descriptors":
        monkeypatch.setattr(cuda_ipc, "FileServer", refuse)
    memories, ranks = pools(LAYOUT, replace(LAYOUT, tensor_parallel=1))
    ranks[1].libcudas[0].out_of_reach = True
    fill(memories[0])
    result = await pulled(*memories, BLOCKS, TABLE, ("cuda_ipc", "grpc"))
    assert result.transport == "grpc"
    assert torch.equal(content(memories[0], BLOCKS), content(memories[1], TABLE))
    caplog.clear()  # it holds errors, and these the memory


async def test_a_gpu_without_virtual_memory_takes_grpc(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(self: FakeVirtualMemory, descriptors: Sequence[int], num_bytes: int) -> int:
        return LibCuda.open_pieces(self, descriptors, num_bytes)

    monkeypatch.setattr(FakeVirtualMemory, "open_pieces", lacking)
    memories, _ = pools(LAYOUT, replace(LAYOUT, tensor_parallel=1))
    assert (await pulled(*memories, BLOCKS, TABLE, ("cuda_ipc", "grpc"))).transport == "grpc"
