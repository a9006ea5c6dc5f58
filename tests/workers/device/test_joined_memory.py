"""Ranks' pieces of device memory, side by side at rank 0: what one writes the other reads, and nothing is left."""

import ctypes
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.workers.common.errors import ConfigError, RankLost, TransportError
from diptych.workers.device import kv_pool
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.joined_memory import receive_pieces, send_pieces
from diptych.workers.device.virtual_memory import Access, Properties, virtual_memory_of
from diptych.workers.kv.layout import LAYER_MAJOR, KVLayout, Region
from diptych.workers.kv.pool_pieces import make_link
from diptych.workers.models.plan.kv_plan import blocks_at_once, plan_num_blocks

from ...support.gpu.fake_libcuda import GRANULARITY, FakeLibCuda, make_virtual_memory
from ...support.gpu.fake_ranks import FakeRanks, num_descriptors

NUM_BYTES = 3 * GRANULARITY
LAYOUT = KVLayout("float32", block_size=4, num_layers=3, num_kv_heads=6, head_dim=8, model_id="m", tensor_parallel=3)


@pytest.fixture
def ranks() -> Iterator[FakeRanks]:
    made = FakeRanks()
    yield made
    made.close()
    made.check_nothing_is_left()


def test_structures_are_as_the_driver_reads_them() -> None:
    """CUmemAllocationProp and CUmemAccessDesc of a 64-bit machine."""
    assert (ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (32, 12)
    assert (Properties.win32_handle_metadata.offset, Properties.flags.offset) == (16, 24)


def test_rank_0_sees_all_pieces_side_by_side(ranks: FakeRanks) -> None:
    first, *others = ranks.pools(NUM_BYTES)
    assert first.shape == (3, NUM_BYTES) and first.is_contiguous() and not first.any()
    for rank, other in enumerate(others, 1):
        assert other.shape == (1, NUM_BYTES) and not other.any()
        other[0, 7] = rank
        first[rank, 8] = 10 + rank
    first[0, 7] = 9
    assert first[:, 7].tolist() == [9, 1, 2]
    assert [other[0, 8].item() for other in others] == [11, 12]


def test_a_view_keeps_the_memory_mapped(ranks: FakeRanks) -> None:
    views = [pool[-1, :5] for pool in ranks.pools(NUM_BYTES)]
    views[2].fill_(3)
    assert views[0].tolist() == [3] * 5


def test_other_ranks_may_map_all_pieces_too(ranks: FakeRanks) -> None:
    first, *_ = ranks.pools(NUM_BYTES)
    found = [joining.all_pieces(3, NUM_BYTES) for joining in ranks.joinings[1:]]
    wholes = [joining.whole(pieces) for joining, pieces in zip(ranks.joinings[1:], found, strict=True)]
    wholes[0][0, 5], wholes[1][1, 6] = 7, 8
    assert first[:2, 5:7].tolist() == [[7, 0], [0, 8]] and all(torch.equal(whole, first) for whole in wholes)


def test_a_rank_that_does_not_reach_the_others_says_so(ranks: FakeRanks) -> None:
    pools = ranks.pools(NUM_BYTES)
    pieces = ranks.joinings[1].all_pieces(3, NUM_BYTES)
    ranks.libcudas[1].out_of_reach = True
    with pytest.raises(TransportError, match="INVALID_DEVICE"):
        ranks.joinings[1].whole(pieces)
    assert not pools[1].any()


def test_a_rank_that_waits_for_all_pieces_hears_that_rank_0_has_ended(ranks: FakeRanks) -> None:
    for ours, _ in ranks.ends:
        ours.close()
    with pytest.raises(RankLost, match="rank 0"):
        ranks.joinings[1].all_pieces(3, NUM_BYTES)


def test_a_piece_that_is_not_to_be_had_is_named(ranks: FakeRanks) -> None:
    ranks.libcudas[0].most_bytes = NUM_BYTES - 1
    with pytest.raises(ConfigError, match=r"196,608 bytes of KV .*OUT_OF_MEMORY.*lower kv_memory_fraction"):
        ranks.joinings[0].pool(0, NUM_BYTES)


def test_gpus_that_do_not_reach_each_other_are_refused(ranks: FakeRanks) -> None:
    ranks.libcudas[0].out_of_reach = True
    with pytest.raises(ConfigError, match=r"all ranks at rank 0 .*INVALID_DEVICE.*reach each other's memory"):
        ranks.pools(NUM_BYTES)


def test_a_rank_that_ends_instead_is_lost(ranks: FakeRanks) -> None:
    for _, its in ranks.ends:
        its.close()
    with pytest.raises(RankLost, match="rank 1 ended"):
        ranks.joinings[0].pool(0, NUM_BYTES)


def test_a_rank_hears_that_rank_0_has_ended(ranks: FakeRanks) -> None:
    for ours, _ in ranks.ends:
        ours.close()
    with pytest.raises(RankLost, match="rank 2 could not send"):
        ranks.joinings[2].pool(2, NUM_BYTES)


def test_a_rank_that_says_nothing_is_lost_in_time(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.device.joined_memory.STALL", timedelta(milliseconds=1))
    with pytest.raises(RankLost, match="rank 1 did not arrive: timed out"):
        ranks.joinings[0].pool(0, NUM_BYTES)


@pytest.mark.parametrize(("rank", "num_bytes", "num"), [(2, 64, 1), (1, 63, 1), (1, 64, 0), (1, 64, 2), (1, 64, 5)])
def test_what_is_sent_is_checked(rank: int, num_bytes: int, num: int) -> None:
    ours, its = make_link()
    with ours, its, Path(os.devnull).open("rb") as file:
        num_open = num_descriptors(os.devnull)
        message = rank.to_bytes(4, "little") + num_bytes.to_bytes(8, "little")
        socket.send_fds(its, [message], [file.fileno()] * num)
        with pytest.raises(RankLost, match=r"rank 1 sent .* for its 64 bytes"):
            receive_pieces(ours, 1, 64)
        assert num_descriptors(os.devnull) == num_open


def test_a_descriptor_arrives_as_another_of_the_same_file() -> None:
    ours, its = make_link()
    with ours, its, Path(os.devnull).open("rb") as file:
        send_pieces(its, 1, 64, [file.fileno()])
        [received] = receive_pieces(ours, 1, 64)
        assert os.fstat(received).st_rdev == os.fstat(file.fileno()).st_rdev
        os.close(received)


def test_a_gpu_without_virtual_memory_says_so() -> None:
    libcuda = FakeLibCuda()
    libcuda.has_virtual_memory = False
    with pytest.raises(TransportError, match="no virtual memory"):
        make_virtual_memory(libcuda)


def test_a_device_for_tests_has_none() -> None:
    assert virtual_memory_of(FakeDevice()) is None


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
def test_caches_of_ranks_are_one_pool_at_rank_0(ranks: FakeRanks, order: str) -> None:
    layout = replace(LAYOUT, axis_order=order)
    num_blocks = blocks_at_once(layout, GRANULARITY)
    assert num_blocks * layout.rank_block_bytes % GRANULARITY == 0
    caches = ranks.caches(layout, num_blocks)
    for rank, cache in enumerate(caches):
        cache.layer(2)[1].fill_(rank + 1)
    memory = caches[0].memory
    assert memory.region.num_bytes == num_blocks * layout.block_bytes and memory.region.view is None
    assert memory.device is not None and all(cache.memory.device is None for cache in caches[1:])
    runs = memory.runs([1], 2, 1)
    read = torch.frombuffer(bytearray(memory.device.read(runs)), dtype=torch.float32).view(3, -1)
    assert [row.unique().tolist() for row in read] == [[1], [2], [3]]
    assert [cache.tensor.count_nonzero().item() * 4 for cache in caches] == [layout.layer_bytes] * 3


class CopiesSeen(TorchDispatchMode):
    """Off a pool: bytes from its start, and how many, of each copy."""

    def __init__(self, pool: Region) -> None:
        super().__init__()
        self.pool, self.seen = pool, list[tuple[int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            offset = args[1].data_ptr() - self.pool.address
            if 0 <= offset < self.pool.num_bytes:
                self.seen.append((offset, args[1].nbytes))
        return func(*args, **kwargs or {})


def test_no_copy_goes_from_one_rank_s_piece_into_the_next(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of one rank and the first of the next are adjacent. A kernel may read both."""
    caches = ranks.caches(LAYOUT, 128)
    for rank, cache in enumerate(caches):
        cache.tensor[0], cache.tensor[127] = 10 + rank, 20 + rank
    memory = caches[0].memory
    assert memory.device is not None
    runs = memory.runs([0, 127], 0, 3).merged()
    assert runs.offsets.tolist() == [0, 195072, 391680, 588288] and runs.lengths.tolist() == [1536, 3072, 3072, 1536]
    gathered = memory.device.read(runs)
    monkeypatch.setattr(kv_pool, "FEW_RUNS", 6)
    with CopiesSeen(memory.region) as copies:
        read = memory.device.read(runs)
    starts = [0, 195072, 196608, 391680, 393216, 588288]
    assert copies.seen == [(start, 1536) for start in starts]
    assert torch.frombuffer(bytearray(read), dtype=torch.float32)[::384].tolist() == [10, 20, 11, 21, 12, 22]
    assert gathered == read


def test_a_descriptor_of_each_piece_is_kept_for_other_workers(ranks: FakeRanks) -> None:
    caches = ranks.caches(LAYOUT, blocks_at_once(LAYOUT, GRANULARITY))
    pieces = caches[0].memory.region.pieces
    assert pieces is not None and len(pieces.descriptors) == 3
    for rank, (cache, descriptor) in enumerate(zip(caches, pieces.descriptors, strict=True)):
        cache.tensor.fill_(rank + 1)
        assert os.fstat(descriptor).st_size == pieces.num_bytes
        assert os.pread(descriptor, 4, 0) == torch.tensor(float(rank + 1)).numpy().tobytes()
    assert all(cache.memory.region.pieces is None for cache in caches[1:])


def test_blocks_are_planned_so_that_pieces_are_whole() -> None:
    at_once, block = blocks_at_once(LAYOUT, 2 << 20), LAYOUT.block_bytes
    assert at_once == 4096 and LAYOUT.rank_block_bytes == 3 << 9
    assert plan_num_blocks(LAYOUT, 4096, (2 * at_once + 1) * block, at_once) == 2 * at_once
    assert plan_num_blocks(LAYOUT, 16, 10**12, at_once) == at_once, "its cap of 1024 is no multiple"
    with pytest.raises(ConfigError, match="needs 18,874,368 bytes of KV memory, 4096 blocks at once, and 18,869,760"):
        plan_num_blocks(LAYOUT, 16, (at_once - 1) * block, at_once)
