"""Segments that all ranks of a worker receive: real NIXL agents in processes of their own, memory files as devices.

Workers do the same in tests/e2e/test_gpu_ranks.py.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.proto import kv_pb2
from diptych.workers.common.errors import ChecksumMismatch, DiptychError, TransportError
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.kv_cache import KVCache, view_of
from diptych.workers.handoff.rank_receiver import RankReceiver
from diptych.workers.handoff.segment_receiver import PullSettings, SegmentReceiver
from diptych.workers.handoff.types import Reservation
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.layout import BLOCK_MAJOR, LAYER_MAJOR, Copies, KVLayout, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.segment import Read, Segment
from diptych.workers.transport.base import KVReader
from diptych.workers.transport.nixl_agent import Endpoint
from diptych.workers.transport.rank_agent import RankAgent

from ...support.gpu.fake_cuda import STAGING_BYTES, make_device_memory, seen_by_host
from ...support.gpu.fake_ranks import make_pieces
from ...support.gpu.rank_process import TwoRanks
from ...support.gpu.scripted_rank import ScriptedRank, done, opened
from ...support.handoff_pair import SinkEngine
from ..device.test_mapped_pieces import BLOCKS, LAYOUT, NUM_BLOCKS, TABLE, content, fill, pulled

ONE, TWO = (replace(LAYOUT, tensor_parallel=n) for n in (1, 2))
Received = list[tuple[int, int]]  # by the other rank: position of a part's first block, number of its blocks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[KVMemory]:
    with closing(TwoRanks(replace(TWO, axis_order=LAYER_MAJOR), NUM_BLOCKS)) as made:
        yield made.memory


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    """What the other rank is asked for. A part is one block."""
    monkeypatch.setattr("diptych.workers.kv.bridge.PART_BYTES", TWO.block_bytes)
    found, receive = Received(), RankAgent.receive

    def noting(agent: RankAgent, parts: kv_pb2.RankParts) -> "Future[None]":
        found.extend((part.first_block, len(part.block_ids)) for part in parts.parts)
        return receive(agent, parts)

    monkeypatch.setattr(RankAgent, "receive", noting)
    return found


@dataclass
class Spoiling(SinkEngine):
    """Calls `spoil` before anything is read."""

    spoil: Callable[[], object] = lambda: None

    async def reserve(self, key: str, num_tokens: int) -> Reservation:
        self.spoil()
        return await super().reserve(key, num_tokens)


@pytest.mark.parametrize("verify", [False, True])
async def test_parts_are_dealt_to_all_ranks(verify: bool, two_ranks: KVMemory, received: Received) -> None:
    """Heads that are divided otherwise: each rank reads parts into a staging buffer of its own, and converts them into
    the pieces of all."""
    theirs = make_pieces(ONE, NUM_BLOCKS)
    fill(theirs)
    clear(two_ranks)
    result = await pulled(theirs, two_ranks, BLOCKS, TABLE, ["nixl"], settings=PullSettings(verify=verify))
    assert (result.transport, result.num_bytes) == ("nixl", len(BLOCKS) * ONE.block_bytes)
    assert torch.equal(content(theirs, BLOCKS), content(two_ranks, TABLE))
    assert received == [(1, 1), (3, 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("nixl") is None, reason="there is no GPU, or no NIXL")
@pytest.mark.parametrize("order", [BLOCK_MAJOR, LAYER_MAJOR])
async def test_on_a_gpu_parts_are_dealt_to_all_ranks(
    order: str, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks on one GPU, for there may be no other."""
    num_blocks, blocks = 1024, range(3, 903, 3)
    one = KVLayout("bfloat16", block_size=16, num_layers=4, num_kv_heads=8, head_dim=64, model_id="m")
    monkeypatch.setattr("diptych.workers.kv.bridge.PART_BYTES", 16 * one.block_bytes)
    device = CudaDevice(torch.device("cuda", 0))
    theirs = KVCache(one, num_blocks, device.torch_device, gpu=device)
    theirs.tensor.normal_()
    table = [*reversed(blocks)]
    two = replace(one, tensor_parallel=2, axis_order=order)
    with closing(TwoRanks(two, num_blocks, "cuda:0")) as ours:
        device.synchronize()
        result = await pulled(theirs.memory, ours.memory, blocks, table, ["nixl"], settings=PullSettings(verify=True))
        pool = view_of(ours.cache._pool, num_blocks, two, two.layer_groups(0, two.num_layers)[0])
        by_block = pool if order == BLOCK_MAJOR else pool.transpose(1, 2)
        assert torch.equal(torch.cat([*by_block[:, table]], dim=-2), theirs.tensor[list(blocks)])
        del pool, by_block
    assert result.num_bytes == len(blocks) * one.block_bytes
    assert sum(num for _, num in received) == pytest.approx(len(blocks) / 2, abs=16)


async def test_what_differs_from_its_checksum_at_another_rank_is_never_committed(
    two_ranks: KVMemory, received: Received
) -> None:
    theirs = make_pieces(ONE, NUM_BLOCKS)
    fill(theirs)

    def spoil() -> None:
        view = seen_by_host(theirs).region.view
        assert view is not None
        view[BLOCKS[3] * ONE.block_bytes] ^= 1

    engine = Spoiling(table=TABLE, spoil=spoil)
    with pytest.raises(ChecksumMismatch, match=rf"rank 1: block {BLOCKS[3]} \(position 3"):
        await pulled(theirs, two_ranks, BLOCKS, TABLE, ["nixl"], settings=PullSettings(verify=True), engine=engine)
    assert received == [(1, 1), (3, 1)] and ("fail", "k", False) in engine.calls


async def test_a_rank_that_ends_fails_the_pull(received: Received) -> None:
    """It has connected, and ends when it is to receive: tests/e2e/test_gpu_ranks.py kills one."""
    theirs, ours, engine = make_pieces(ONE, NUM_BLOCKS), make_pieces(TWO, NUM_BLOCKS), SinkEngine(table=TABLE)
    rank = ScriptedRank(opened, done)
    ending = asyncio.create_task(asyncio.to_thread(rank.end))
    with pytest.raises(DiptychError, match="the NIXL agent of rank 1 has ended"):
        await pulled(theirs, replace(ours, rank_links=[rank.ours]), BLOCKS, TABLE, ["nixl"], engine=engine)
    await ending
    rank.ours.close()
    assert received == [(1, 1), (3, 1)] and ("fail", "k", False) in engine.calls


async def test_a_rank_measures_reads_into_its_own_staging() -> None:
    memory, asked = make_device_memory(ONE, NUM_BLOCKS), list[tuple[int, int]]()
    assert memory.device is not None
    into = memory.device.staging.on_device

    def read(incarnation: str, piece: int, copies: Copies, region: Region) -> "Future[None]":
        assert incarnation == "s" and region is into
        asked.append((piece, copies.num_bytes))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    endpoint = Endpoint("a", b"m", 4096, 1 << 19, 0, "DRAM")
    agent: Any = SimpleNamespace(endpoint=endpoint, read=read)
    receiver = RankReceiver(memory)
    link = kv_pb2.RankLink(incarnation="s", piece=1)
    assert receiver.measure(agent, [endpoint] * 2, link).result(20) > 0
    receiver.close()
    assert asked == [(1, 1 << 19)] * 4 and memory.device.staging.num_free == STAGING_BYTES


class FailingReader(KVReader):
    lands_on_device, num_receivers, first_rank = True, 2, 1

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # rank, parts

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        self.asked.append((0, 1))

    async def receive(self, rank: int, parts: kv_pb2.RankParts, num_bytes: int) -> None:
        self.asked.append((rank, len(parts.parts)))
        raise TransportError(f"rank {rank}", may_still_land=rank == 2)


@pytest.mark.usefixtures("received")
async def test_of_several_errors_one_says_that_bytes_may_still_land() -> None:
    memory = make_device_memory(ONE, NUM_BLOCKS)
    assert memory.device is not None
    reader, bridge = FailingReader(), Bridge(memory, TWO, NUM_BLOCKS)
    receiver = SegmentReceiver(reader, bridge, memory, memory.device.staging, verify=False)
    segment = Segment(0, BLOCKS, (1,) * len(BLOCKS), 0, TWO.num_layers)
    with pytest.raises(TransportError, match="rank 2") as caught:
        await receiver.receive(Read(0, segment, TABLE, 0))
    assert caught.value.may_still_land
    assert sorted(reader.asked) == [(0, 1), (1, 2), (2, 2)]
    await receiver.settled()


def clear(memory: KVMemory) -> None:
    view = seen_by_host(memory).region.view
    assert view is not None
    view[:] = bytes(len(view))
