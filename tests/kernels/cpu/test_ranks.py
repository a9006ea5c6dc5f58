"""Sums over ranks through shared memory; here the ranks are threads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.library import Library
from diptych.kernels.cpu.load import library
from diptych.kernels.cpu.ranks import SLOT_BYTES, Abandoned, RankSums

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")
SLOT_FLOATS = SLOT_BYTES // 4
Result = TypeVar("Result")


def memory_for(size: int) -> Tensor:
    return torch.zeros(RankSums.num_bytes(size), dtype=torch.uint8)


def make(size: int, memory: Tensor | None = None, **times: float) -> list[RankSums]:
    found = library()
    assert isinstance(found, Library)
    memory = memory_for(size) if memory is None else memory
    return [RankSums(found, memory, rank, size, **{"timeout_s": 60.0} | times) for rank in range(size)]


def at_once(ranks: list[RankSums], work: Callable[[int, RankSums], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks)), ranks))


def parts_of(size: int, *shape: int) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("num", [0, 1, 1023, 4096 + 7, SLOT_FLOATS, 2 * SLOT_FLOATS + 5])
def test_the_sum_in_the_order_of_ranks(size: int, num: int) -> None:
    parts = parts_of(size, num)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    own = [part.clone() for part in parts]
    at_once(make(size), lambda rank, sums: sums.add(own[rank]))
    assert all(torch.equal(found, expected) for found in own)


def test_one_after_another() -> None:
    """Slots are used again, and a rank that is ahead writes none that another still reads."""
    parts = parts_of(3, 200, 700)

    def work(rank: int, sums: RankSums) -> Tensor:
        own = parts[rank].clone()
        for row in own:
            sums.add(row)
        return own

    found = at_once(make(3), work)
    assert all(torch.equal(each, parts[0] + parts[1] + parts[2]) for each in found)


def test_who_sleeps_is_woken() -> None:
    """A sleeping rank would not wake by itself before the test fails. Which of the two sleeps alternates."""
    memory = memory_for(2)
    ranks = make(2, memory, look_again_s=60.0)
    sleepers = [memory[64 * (1 + rank) + 4 :][:4].view(torch.int32) for rank in range(2)]  # ranks.cpp's Rank::sleepers
    with ThreadPoolExecutor(1) as pool:
        for late in [0, 1] * 10:
            part = torch.ones(3)
            first = pool.submit(ranks[1 - late].add, part)
            while not sleepers[late].item():
                time.sleep(0)
            ranks[late].add(torch.ones(3))
            first.result(timeout=20.0)
            assert part.tolist() == [2.0] * 3


def test_pieces_of_unlike_parts() -> None:
    lengths = [2 * SLOT_BYTES + 3, 0, 10]
    parts = [torch.arange(n).to(torch.uint8) + rank for rank, n in enumerate(lengths)]

    def work(rank: int, sums: RankSums) -> list[Tensor]:
        pieces = [of.clone() for _, of in sums.exchange(parts[rank], max(lengths))]
        whole = torch.cat(pieces, dim=1)
        return [row[:n] for row, n in zip(whole, lengths, strict=True)]

    for found in at_once(make(3), work):
        assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))


def test_who_waits_hears_that_a_rank_is_gone() -> None:
    ranks = make(3)
    waiting = threading.Semaphore(0)

    def work(rank: int, sums: RankSums) -> str:
        if rank == 2:
            for _ in range(2):
                waiting.acquire()
            sums.abandon()
            return "ended"
        waiting.release()
        with pytest.raises(Abandoned, match="ended"):
            sums.add(torch.ones(3))
        return "heard"

    assert at_once(ranks, work) == ["heard", "heard", "ended"]
    with pytest.raises(Abandoned):
        ranks[0].add(torch.ones(3))


def test_a_rank_that_does_not_come_is_missed() -> None:
    with pytest.raises(Abandoned, match="in time"):
        make(2, timeout_s=0.01)[0].add(torch.ones(3))


@pytest.mark.parametrize("sizes", [(3, 4, 3), (SLOT_FLOATS, SLOT_FLOATS + 1, SLOT_FLOATS + 1)])
def test_ranks_that_mean_unlike_sums_all_end(sizes: tuple[int, ...]) -> None:
    """Also if their first parts have equal sizes. It was their second collective."""

    def work(rank: int, sums: RankSums) -> str:
        sums.add(torch.ones(7))
        with pytest.raises(Abandoned) as caught:
            sums.add(torch.ones(sizes[rank]))
        return str(caught.value)

    own = [4 * n for n in sizes]
    assert at_once(make(3), work) == [
        f"rank {other} reached collective 2 with {own[other]} bytes, this one with {own[rank]}"
        for rank, other in enumerate((1, 0, 1 if own[2] != own[1] else 0))
    ]


def test_a_sum_that_meets_an_exchange_is_told() -> None:
    def work(rank: int, sums: RankSums) -> str:
        with pytest.raises(Abandoned) as caught:
            sums.add(torch.ones(3)) if rank else next(sums.exchange(torch.ones(5, dtype=torch.uint8), 8))
        return str(caught.value)

    found = at_once(make(2), work)
    assert found[0] == "rank 1 reached collective 1 with 12 bytes, this one with 8"
    assert found[1] == "rank 0 reached collective 1 with 8 bytes, this one with 12"
