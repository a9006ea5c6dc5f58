"""Choice of what adds up the parts of several GPUs: what is compared, by all ranks alike, and what never computes."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common import sum_choice
from diptych.workers.execution.common.sum_choice import choose_sums
from diptych.workers.execution.common.timed_choice import NUM_RUNS, Contest, Timed, Work
from diptych.workers.parallel.symmetric_sums import MULTICAST, ONE_SHOT, TWO_SHOT, SumMethod, SymmetricSums

from ....support.gpu.fake_symmetric_memory import FakeMemory, MemoryGroup
from ...parallel.test_symmetric_sums import HALF, as_ranks, memory, sums_of

__all__ = ["memory"]  # a fixture

ROW = torch.zeros(1, 8, dtype=HALF)
Add = Callable[[SymmetricSums, SumMethod, Tensor], Tensor]
Chosen = list[tuple[int, SumMethod | None]]


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[str]]]:
    """What rank 0 compared: which sums, of how many rows, by whom. Of 4 rows the first is the fastest, else NCCL."""
    seen: list[tuple[str, int, list[str]]] = []

    def fastest(contest: Contest, own: Work, others: Sequence[tuple[Any, Work]], timed: Timed) -> Any:
        for work in (own, *(work for _, work in others)):
            for _ in range(1 + NUM_RUNS):
                assert not timed(work)[1].any()
        seen.append((contest.what, contest.num_tokens, [method.name for method, _ in others]))
        return others[0][0] if others and contest.num_tokens == 4 else None

    monkeypatch.setattr(sum_choice, "fastest", fastest)
    monkeypatch.setattr(sum_choice, "RANGES", (8, 32, 64, 128))
    return seen


def choose(size: int, folder: Path, *, max_tokens: int = 100, has_graphs: bool = True, like: Tensor = ROW) -> Chosen:
    """What all ranks have chosen."""
    devices = list[FakeDevice]()

    def work(group: MemoryGroup) -> Chosen:
        device = FakeDevice()
        devices.append(device)
        choose_sums(device, group, like, max_tokens, has_graphs=has_graphs)
        assert group.sums is None or group.sums.dtype == (HALF if group.sums.chosen else None)
        return [*group.sums.chosen] if group.sums is not None else []

    first, *others = as_ranks(size, folder, work)
    assert all(other == first for other in others)
    assert len({device.num_captured for device in devices}) == 1 and bool(devices[0].num_captured) == has_graphs
    return first


def test_rank_0_chooses_for_each_size_and_for_all(
    tmp_path: Path, memory: FakeMemory, contests: list[tuple[str, int, list[str]]]
) -> None:
    """No message has less than a row, 16 bytes."""
    assert choose(2, tmp_path) == [(32, None), (64, ONE_SHOT), (128, None)]
    names = [ONE_SHOT.name, TWO_SHOT.name, MULTICAST.name]
    what = "sums of {} bytes of 2 GPUs, 16 at a time,"
    assert contests == [(what.format(16 * rows), rows, names) for rows in (2, 4, 8)]


def test_graphs_are_compared_where_steps_are_graphs(
    tmp_path: Path, memory: FakeMemory, contests: list[tuple[str, int, list[str]]]
) -> None:
    assert choose(2, tmp_path, has_graphs=False, max_tokens=4) == [(32, None), (64, ONE_SHOT)]


def test_messages_that_no_step_has_are_not_compared(
    tmp_path: Path, memory: FakeMemory, contests: list[tuple[str, int, list[str]]]
) -> None:
    assert choose(2, tmp_path, max_tokens=3) == [(32, None), (64, None)]
    assert [rows for _, rows, _ in contests] == [2, 3]


@pytest.mark.parametrize("like", [torch.zeros(1, 3, dtype=HALF), torch.zeros(1, 8, dtype=torch.float16)])
def test_of_messages_that_no_method_takes_nothing_is_compared(like: Tensor, tmp_path: Path, memory: FakeMemory) -> None:
    assert choose(1, tmp_path, like=like, has_graphs=False) == []


def replacing(monkeypatch: pytest.MonkeyPatch, method: SumMethod, changed: Callable[[SymmetricSums, Tensor], Tensor]):
    """Have one method give something else."""
    add: Add = SymmetricSums.add

    def replaced(self: SymmetricSums, of: SumMethod, part: Tensor) -> Tensor:
        found = add(self, of, part)
        return changed(self, found) if of == method else found

    monkeypatch.setattr(SymmetricSums, "add", replaced)


def test_sums_that_are_not_the_same_on_all_ranks_are_refused(
    tmp_path: Path,
    memory: FakeMemory,
    contests: list[tuple[str, int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By one bit, of one number, on one rank."""

    def changed(sums: SymmetricSums, found: Tensor) -> Tensor:
        if sums._group.rank() == 1:
            found.view(torch.int16)[-1, -1] ^= 1
        return found

    replacing(monkeypatch, ONE_SHOT, changed)
    assert choose(2, tmp_path, max_tokens=4) == [(32, None), (64, TWO_SHOT)]
    assert contests[-1][2] == [TWO_SHOT.name, MULTICAST.name]
    assert "not computed by one-shot sums: they are not the same on all ranks" in caplog.text


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_what_is_not_the_sum_is_refused(
    wrong: float,
    tmp_path: Path,
    memory: FakeMemory,
    contests: list[tuple[str, int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replacing(monkeypatch, TWO_SHOT, lambda _, found: found + wrong)
    choose(2, tmp_path, max_tokens=4)
    assert contests[-1][2] == [ONE_SHOT.name, MULTICAST.name]
    assert "not computed by two-shot sums: results differ by" in caplog.text


def test_a_method_that_fails_is_refused(
    tmp_path: Path,
    memory: FakeMemory,
    contests: list[tuple[str, int, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("Not implemented for world_size=2")

    monkeypatch.setattr(memory, ONE_SHOT.op, fail)
    choose(2, tmp_path, max_tokens=4)
    assert contests[-1][2] == [TWO_SHOT.name, MULTICAST.name]
    assert "not computed by one-shot sums: it fails (Not implemented for world_size=2)" in caplog.text


def test_the_times_that_count_are_rank_0_s(
    tmp_path: Path, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What rank 0 measures by itself, whatever that is: all have the same, and the log names it once."""
    caplog.set_level("INFO")
    monkeypatch.setattr(sum_choice, "RANGES", (64,))
    lock, calls = threading.Lock(), list[int]()

    def noting(group: MemoryGroup) -> Sequence[tuple[int, SumMethod | None]]:
        choose_sums(FakeDevice(), group, ROW, 4, has_graphs=True)
        with lock:
            calls.append(group.rank)
        return sums_of(group).chosen

    found = as_ranks(4, tmp_path, noting)
    assert len({str(each) for each in found}) == 1 and sorted(calls) == [0, 1, 2, 3]
    [line] = [record.message for record in caplog.records if "at a time, are computed by" in record.message]
    assert line.startswith("sums of 64 bytes of 4 GPUs, 16 at a time, are computed by ") and "NCCL" in line
