"""Groups: sums and broadcasts over gloo between threads of this process, and a lost rank."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from queue import Queue

import pytest
import torch

from diptych.kernels.cpu.library import Library
from diptych.kernels.cpu.load import library
from diptych.kernels.cpu.ranks import SLOT_BYTES, RankSums
from diptych.workers.common.errors import PeerLost
from diptych.workers.parallel import groups
from diptych.workers.parallel.groups import Alone, GlooGroup


def as_ranks(size: int, rendezvous: Path, work: Callable[[GlooGroup], object]) -> list[object]:
    """`work` on every rank, each a thread; their results in rank order."""
    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(lambda rank: work(GlooGroup.join(rank, size, rendezvous)), rank) for rank in range(size)]
        return [call.result() for call in calls]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_same_sum(size: int, tmp_path: Path) -> None:
    parts = torch.randn(size, 7, 33, generator=torch.Generator().manual_seed(1))
    sums = as_ranks(size, tmp_path / "rendezvous", lambda group: group.all_reduce(parts[group.rank].clone()))
    assert all(isinstance(s, torch.Tensor) and torch.equal(s, torch.as_tensor(sums[0])) for s in sums)
    torch.testing.assert_close(sums[0], parts.sum(0))


def test_bfloat16_is_added_in_float32(tmp_path: Path) -> None:
    """In bfloat16, 256 + 1 is 256: the order of additions would show."""
    parts = torch.tensor([256.0, 1.0, 1.0, 0.0]).bfloat16()
    sums = as_ranks(4, tmp_path / "rendezvous", lambda group: group.all_reduce(parts[group.rank : group.rank + 1]))
    assert [(s.item(), s.dtype) for s in sums if isinstance(s, torch.Tensor)] == [(258.0, torch.bfloat16)] * 4


def test_everybody_gets_what_rank_0_has(tmp_path: Path) -> None:
    def work(group: GlooGroup) -> list[int]:
        tensor = torch.arange(5, dtype=torch.int32) if group.rank == 0 else torch.zeros(5, dtype=torch.int32)
        group.broadcast(tensor, patient=group.rank == 1)
        return tensor.tolist()

    assert as_ranks(3, tmp_path / "rendezvous", work) == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_parts_of_unlike_sizes_meet_at_rank_0(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = [(2, 3), (2, 0), (2, 4)]
    parts = [torch.arange(math.prod(shape)).view(shape).to(dtype) + 10 * rank for rank, shape in enumerate(shapes)]

    def work(group: GlooGroup) -> list[torch.Tensor]:
        gathered = group.gather(parts[group.rank], shapes)
        group.all_reduce(torch.ones(1))  # none leaves before all have come
        return gathered

    found = as_ranks(3, tmp_path / "rendezvous", work)
    assert found[1:] == [[], []]
    assert isinstance(found[0], list)
    assert all(torch.equal(a, b) for a, b in zip(found[0], parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_rows_go_to_whom_they_are_for(dtype: torch.dtype, tmp_path: Path) -> None:
    """Row `10 a + b` goes from rank a to rank b, `counts` times; rank 2 sends nothing."""
    counts = [[1, 2, 0], [0, 3, 1], [0, 0, 0]]

    def work(group: GlooGroup) -> list[list[float]]:
        to, mine = counts[group.rank], [10 * group.rank + b for b in range(3)]
        rows = torch.tensor([[row, row + 0.5] for row, n in zip(mine, to, strict=True) for _ in range(n)])
        sent = rows.view(-1, 2).to(dtype)
        return group.all_to_all(sent, to, [each[group.rank] for each in counts]).tolist()

    half = 0.5 if dtype.is_floating_point else 0
    expected = [[0], [1, 1, 11, 11, 11], [12]]
    assert as_ranks(3, tmp_path / "rendezvous", work) == [[[row, row + half] for row in rows] for rows in expected]


def test_one_that_leaves_is_missed(tmp_path: Path) -> None:
    def work(group: GlooGroup) -> str:
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            return "left"  # and with the last reference goes the connection
        with pytest.raises(PeerLost, match="rank 0 of 2 lost another rank"):
            group.all_reduce(torch.ones(3))
        return "missed it"

    assert as_ranks(2, tmp_path / "rendezvous", work) == ["missed it", "left"]


def test_who_waits_for_a_rank_that_never_comes_hears_that_it_is_gone(tmp_path: Path) -> None:
    waiting: Queue[GlooGroup] = Queue()
    is_over = threading.Event()

    def work(group: GlooGroup) -> str:
        if group.rank == 1:
            waiting.get().abandon()
            is_over.wait()
            return "never came"
        waiting.put(group)
        try:
            with pytest.raises(PeerLost, match="rank 0 of 2 lost another rank: it has ended"):
                group.broadcast(torch.ones(3))
                group.all_reduce(torch.ones(3))  # rank 0 only sends in the one before
        finally:
            is_over.set()
        return "heard of it"

    assert as_ranks(2, tmp_path / "rendezvous", work) == ["heard of it", "never came"]


COLLECTIVES: dict[str, Callable[[GlooGroup], object]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "broadcast": lambda group: group.broadcast(torch.ones(3)),
    "gather": lambda group: group.gather(torch.ones(3), [(3,), (3,)]),
    "all_to_all": lambda group: group.all_to_all(torch.ones(2, 3), [1, 1], [1, 1]),
}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_may_come_later_than_the_others_look_for_it(
    name: str, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost by a look: gloo's receive would close the connection."""
    looks: Queue[None] = Queue()
    has_ended = groups._has_ended

    def looking(call: object) -> bool:
        try:
            return has_ended(call)
        finally:
            looks.put(None)

    def work(group: GlooGroup) -> str:
        group.meet()
        barrier.wait()
        if group.rank == late:
            looks.get()  # not yet, or, where the other only sends, at once
        COLLECTIVES[name](group)
        group.meet()
        return "came"

    monkeypatch.setattr(groups, "POLL", timedelta(milliseconds=1))
    barrier = threading.Barrier(2, action=lambda: monkeypatch.setattr(groups, "_has_ended", looking))
    assert as_ranks(2, tmp_path / "rendezvous", work) == ["came", "came"]


@pytest.fixture
def compiled() -> Library:
    found = library()
    if not isinstance(found, Library):
        pytest.skip("the kernels are not built")
    return found


@pytest.fixture
def memory_fd() -> Iterator[int]:
    """Shared memory of three ranks."""
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, RankSums.num_bytes(3))
    yield fd
    os.close(fd)


def test_ranks_that_share_memory_add_and_gather_through_it(tmp_path: Path, compiled: Library, memory_fd: int) -> None:
    """Parts longer than one transfer, and an empty part. The sum is in the order of the ranks."""
    parts = torch.randn(3, SLOT_BYTES // 4 + 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    shapes = [(3, 2), (0, 2), (SLOT_BYTES, 2)]
    rows = [torch.arange(math.prod(shape)).view(shape).bfloat16() + rank for rank, shape in enumerate(shapes)]

    def work(group: GlooGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        group.share(compiled, memory_fd)
        return group.all_reduce(parts[group.rank].clone()), group.gather(rows[group.rank], shapes)

    found = as_ranks(3, tmp_path / "rendezvous", work)
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    for rank, (total, gathered) in enumerate(found):  # type: ignore[misc]
        assert torch.equal(total, expected)
        assert len(gathered) == (0 if rank else 3)
        assert all(torch.equal(a, b) for a, b in zip(gathered, rows, strict=rank == 0))


def test_who_waits_in_shared_memory_hears_that_a_rank_is_gone(
    tmp_path: Path, compiled: Library, memory_fd: int
) -> None:
    def work(group: GlooGroup) -> str:
        group.share(compiled, memory_fd)
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            group.abandon()
            return "left"
        with pytest.raises(PeerLost, match=f"rank {group.rank} of 3 lost another rank: it has ended"):
            group.all_reduce(torch.ones(3))
        return "missed it"

    assert as_ranks(3, tmp_path / "rendezvous", work) == ["missed it", "left", "missed it"]


def test_alone() -> None:
    part = torch.ones(3)
    assert Alone().all_reduce(part) is part
    Alone().broadcast(part)
    assert Alone().gather(part, [(3,)]) == [part]
    assert Alone().all_to_all(part, [3], [3]) is part
    assert (Alone().rank, Alone().size) == (0, 1)
