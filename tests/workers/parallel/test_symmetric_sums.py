"""Sums in symmetric memory: what torch's operations are given, which bits every rank gets, and where there is none."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from diptych.kernels.common.untried import VARIABLE
from diptych.workers.device import device_group
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.parallel import symmetric_sums
from diptych.workers.parallel.groups import GlooGroup
from diptych.workers.parallel.symmetric_sums import (
    BUFFER_BYTES,
    MULTICAST,
    ONE_SHOT,
    TWO_SHOT,
    TWO_SHOT_IN_PLACE,
    SumMethod,
    SymmetricSums,
    why_not_symmetric,
)

from ...support.gpu.fake_symmetric_memory import FakeMemory, MemoryGroup, install

T = TypeVar("T")
HALF = torch.bfloat16


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    made = FakeMemory()
    install(monkeypatch, made)
    # Ranks here are threads of one process, to which a group's name belongs once.
    meet = SymmetricSums.meet.__func__  # type: ignore[attr-defined]
    own = classmethod(lambda cls, name, rank, *rest: meet(cls, f"{name}-{rank}", rank, *rest))  # pyright: ignore
    monkeypatch.setattr(SymmetricSums, "meet", own)
    return made


def as_ranks(size: int, folder: Path, work: Callable[[MemoryGroup], T], *why_not: str) -> list[T]:
    """`work` on every rank, each a thread; their results in rank order. why_not: of the last ranks."""
    place, whys = folder / "rendezvous", [*[""] * (size - len(why_not)), *why_not]

    def rank(number: int) -> T:
        return work(MemoryGroup(GlooGroup.join(number, size, place), place, whys[number]))

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(rank, range(size))]


def sums_of(group: MemoryGroup) -> SymmetricSums:
    assert group.sums is not None
    return group.sums


def parts_of(size: int, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_bits_by_all_methods(size: int, tmp_path: Path, memory: FakeMemory) -> None:
    parts = parts_of(size, 5, 24)

    def work(group: MemoryGroup) -> list[Tensor]:
        sums = sums_of(group)
        found = [sums.add(method, parts[group.rank]) for method in sums.methods]
        sums.add(ONE_SHOT, torch.zeros_like(parts[0]))  # it uses the buffer anew: what was found stays
        return found

    found = as_ranks(size, tmp_path, work)
    assert all(torch.equal(a, b) for of in found[1:] for a, b in zip(of, found[0], strict=True))
    for total in found[0]:
        torch.testing.assert_close(total.float(), parts.float().sum(0), rtol=2e-2, atol=2e-2)
    two_shot = TWO_SHOT_IN_PLACE if size == 3 else TWO_SHOT
    due = {ONE_SHOT.op, two_shot.op, MULTICAST.op}
    assert {op for op, _ in memory.calls} == due and {num_bytes for _, num_bytes in memory.calls} == {5 * 24 * 2}


def test_signatures_are_those_of_this_torch() -> None:
    get_schema: Any = torch._C._get_schema  # pyright: ignore[reportPrivateUsage]
    for method in (ONE_SHOT, TWO_SHOT, TWO_SHOT_IN_PLACE, MULTICAST):
        schema = get_schema(f"symm_mem::{method.op}", "")
        given = list(inspect.signature(getattr(FakeMemory, method.op)).parameters)[1:]
        assert [argument.name for argument in schema.arguments] == given
        assert method.has_out == (len(given) == 4)
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert given[-1 if method.has_out else 0] in written
    assert callable(symmetric_sums.c10d._SymmetricMemory.empty_strided_p2p)
    assert callable(symmetric_sums.c10d._SymmetricMemory.rendezvous)
    assert isinstance(symmetric_sums.c10d._SymmetricMemory.multicast_ptr, property)


def test_each_size_goes_to_whom_it_was_chosen_for(tmp_path: Path, memory: FakeMemory) -> None:
    """Above, and of other dtypes, or odd sizes, gloo adds up, which here stands for NCCL."""
    shapes = [(1, 8), (4, 8), (5, 8), (1, 4), (40, 8)]

    def work(group: MemoryGroup) -> None:
        sums = sums_of(group)
        sums.dtype, sums.chosen = HALF, [(16, None), (64, ONE_SHOT), (128, TWO_SHOT)]
        for shape in shapes:
            assert torch.equal(group.all_reduce(torch.ones(shape, dtype=HALF)), torch.full(shape, 2, dtype=HALF))
        group.all_reduce(torch.ones(4, 8))
        rows = torch.ones(8, 4, dtype=HALF).mT  # of other strides
        assert torch.equal(group.all_reduce(rows), torch.full((4, 8), 2, dtype=HALF))

    as_ranks(2, tmp_path, work)
    assert sorted(memory.calls) == [*[(ONE_SHOT.op, 64)] * 4, *[(TWO_SHOT.op, 80)] * 2]


def test_what_no_method_takes(tmp_path: Path, memory: FakeMemory) -> None:
    def work(group: MemoryGroup) -> None:
        takes = sums_of(group).takes
        assert takes(torch.ones(8, dtype=HALF)) and takes(torch.ones(4)) and takes(torch.ones(3, 8)[:, ::2])
        assert not any(map(takes, (torch.ones(3), torch.ones(0), torch.ones(8).half(), torch.ones(4).double())))
        assert takes(torch.empty(BUFFER_BYTES // 4)) and not takes(torch.empty(BUFFER_BYTES // 4 + 4))

    as_ranks(1, tmp_path, work)


@pytest.mark.parametrize("method", [ONE_SHOT, MULTICAST])
def test_a_graph_of_a_fake_device_holds_a_sum(method: SumMethod, tmp_path: Path, memory: FakeMemory) -> None:
    def work(group: MemoryGroup) -> list[Tensor]:
        device, sums = FakeDevice(), sums_of(group)
        sums.dtype, sums.chosen = HALF, [(BUFFER_BYTES, method)]
        lane, part, results = device.lane("main"), torch.ones(2, 8, dtype=HALF), list[Tensor]()
        replay = device.capture(lane, lambda: results.append(group.all_reduce(part * 3)))
        seen: list[Tensor] = []
        for number in (1, 2):
            part.fill_(number + group.rank)
            lane.run(replay)
            device.synchronize()
            seen.append(results[0].clone())
        return seen

    for found in as_ranks(2, tmp_path, work):
        assert [of.unique().tolist() for of in found] == [[9.0], [15.0]]
    assert len(memory.calls) == 2 * 3


def test_where_one_rank_cannot_no_rank_has_it(
    tmp_path: Path, memory: FakeMemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert as_ranks(2, tmp_path, lambda group: group.sums, "GPU 1 cannot read the memory of GPU 0") == [None, None]
    assert "rank 0: NCCL adds up all messages between ranks, without symmetric memory: another rank" in caplog.text
    assert "rank 1: NCCL adds up all messages between ranks, without symmetric memory: GPU 1 cannot" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("CUDA driver error: invalid device\nand more"), AttributeError("gone")])
def test_where_memory_cannot_be_mapped_nobody_has_it(
    error: Exception,
    tmp_path: Path,
    memory: FakeMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> object:
        raise error

    caplog.set_level("INFO")
    monkeypatch.setattr(memory, "rendezvous", fail)
    assert as_ranks(2, tmp_path, lambda group: group.sums) == [None, None]
    assert f"without symmetric memory: {str(error).partition(chr(10))[0]}" in caplog.text and "more" not in caplog.text


def test_without_a_switch_that_adds_the_others_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeMemory(has_multicast=False))
    methods = as_ranks(1, tmp_path, lambda group: sums_of(group).methods)
    assert methods == [(ONE_SHOT, TWO_SHOT_IN_PLACE)]


def test_reasons_that_are_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def can(gpu: int, other: int) -> bool:
        asked.append((gpu, other))
        return (gpu, other) != (3, 5)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can)
    monkeypatch.setenv(VARIABLE, "symmetric-sums")
    third = torch.device("cuda", 3)
    assert why_not_symmetric(1, 3, third) == "" and asked == [(3, 2), (3, 4)]
    assert "GPU 3 cannot read the memory of GPU 5" in why_not_symmetric(0, 3, third)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "AMD" in why_not_symmetric(1, 3, third)
    monkeypatch.delenv(VARIABLE)
    assert "DIPTYCH_UNTRIED_KERNELS does not name them" in why_not_symmetric(1, 3, third)


PROCESS = """
import sys
from pathlib import Path
import torch
from diptych.workers.parallel.stores import store_at
from diptych.workers.parallel.symmetric_sums import SymmetricSums

rank, device = int(sys.argv[1]), torch.device("cuda", 0)
torch.cuda.set_device(device)
sums = SymmetricSums.meet("ranks", rank, 2, store_at(Path(sys.argv[2])), device)
for num_rows in (1, 3, 700):
    parts = [torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(of)).bfloat16() for of in range(2)]
    own = parts[rank].to(device)
    for method in sums.methods:
        found = [sums.add(method, own) for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = sums.add(method, own)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(of.cpu(), parts[0] + parts[1]) for of in (*found, captured)), method.name
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_two_processes_on_one_gpu_add_up(tmp_path: Path) -> None:
    """Torch allows that for tests, without a switch that adds."""
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    commands = [[sys.executable, "-c", PROCESS, str(rank), str(tmp_path / "rendezvous")] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_a_place_of_its_own_is_asked_for(tmp_path: Path, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NCCL's ranks meet keys are NCCL's."""
    places: list[object] = []
    store_at = device_group.store_at

    def noting(place: Path) -> object:
        places.append(place)
        return store_at(place)

    monkeypatch.setattr(device_group, "store_at", noting)
    as_ranks(2, tmp_path, lambda group: None)
    assert places == [tmp_path / "rendezvous-symmetric"] * 2
