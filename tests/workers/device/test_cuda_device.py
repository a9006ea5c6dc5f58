"""CudaDevice and NcclGroup, in what needs no GPU."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from diptych.workers.common.exit_codes import UNAVAILABLE
from diptych.workers.device import device_group
from diptych.workers.device.cuda_device import CudaDevice, CudaLane
from diptych.workers.device.device import Work
from diptych.workers.device.device_group import NcclGroup
from diptych.workers.parallel.groups import GlooGroup
from diptych.workers.parallel.symmetric_sums import SymmetricSums

from ..parallel.test_groups import as_ranks


class Graph:
    """Graph that notes the pool which it was captured into."""

    pool = -1

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.pool = pool

    def capture_end(self) -> None: ...

    def replay(self) -> int:
        return self.pool


class Lane(CudaLane):
    def __init__(self) -> None: ...

    def run(self, work: Work) -> None:
        work()


def test_graphs_get_another_pool_once_all_of_one_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ends a pool with its last graph, and then refuses to capture into it."""
    handles = iter(range(10))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(CudaDevice, "synchronize", lambda _: None)
    device = object.__new__(CudaDevice)
    device._graphs, device._pool = WeakSet(), torch.cuda.graph_pool_handle()
    first, second = (device.capture(Lane(), lambda: None) for _ in range(2))
    assert first() == second()
    del first
    third = device.capture(Lane(), lambda: None)
    assert third() == (pool := second())
    del second, third
    assert device.capture(Lane(), lambda: None)() != pool


def test_the_end_of_a_group_of_gpus_is_waited_for() -> None:
    ended: list[bool] = []

    class Nccl:
        def abort(self) -> None:
            time.sleep(0.05)
            ended.append(True)

    NcclGroup(0, 1, Nccl(), torch.device("cpu")).close()
    assert ended


def test_a_group_without_symmetric_memory_watches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, what is waited for is the whole GPU, whose kernels may wait for the rank that is lost."""
    watched: list[Callable[[], object]] = []
    monkeypatch.setattr(device_group, "end_if_stuck", watched.append)
    monkeypatch.setattr(torch.cuda, "synchronize", str)
    group = NcclGroup(0, 1, SimpleNamespace(abort=lambda: None), torch.device("cpu"))
    group.abandon()
    assert not watched
    group.sums = SymmetricSums(SimpleNamespace(size=lambda: 2), "ranks", torch.empty(16), has_multicast=False)
    group.abandon()
    [thread] = [each for each in threading.enumerate() if each.name == "diptych-stuck-gpu"] or [None]
    if thread is not None:
        thread.join()
    [wait] = watched
    assert wait() == "cpu"


STUCK = """
import sys, threading, time
from diptych.workers.device import device_group
device_group.END_S = 0.05
threading.Thread(target=device_group.end_if_stuck, args=(lambda: time.sleep(float(sys.argv[1])),), daemon=True).start()
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("busy_s", "goes_on_s", "status"), [(3600.0, 3600.0, UNAVAILABLE), (0.0, 0.5, 0)])
def test_a_process_ends_whose_gpu_waits_for_a_lost_rank(busy_s: float, goes_on_s: float, status: int) -> None:
    """Also where all its threads wait for that GPU. One whose GPU comes to an end goes on."""
    run = subprocess.run([sys.executable, "-c", STUCK, str(busy_s), str(goes_on_s)], capture_output=True, check=False)
    assert run.returncode == status
    assert (b"waits for a rank that is lost" in run.stderr) == bool(status)


def test_rows_of_all_and_sums_of_each(tmp_path: Path) -> None:
    """The calls of torch's process groups that NCCL's have, as gloo's compute them."""

    class Waiting:
        """A process group of gloo whose calls return when they are done, as if on a stream that is waited for."""

        def __init__(self, gloo: Any) -> None:
            self._gloo = gloo

        def __getattr__(self, name: str) -> Any:
            return lambda *given: getattr(self._gloo, name)(*given).wait()

    def work(gloo: GlooGroup) -> tuple[list[list[int]], list[list[float]]]:
        group = NcclGroup(gloo.rank, gloo.size, Waiting(gloo._gloo), torch.device("cpu"))
        rows = torch.arange(4, dtype=torch.uint8).view(2, 2) + 10 * gloo.rank
        parts = torch.arange(12.0).view(6, 2) * (gloo.rank + 1)
        return group.all_gather(rows).tolist(), group.reduce_scatter(parts).tolist()

    found: Any = as_ranks(3, tmp_path / "rendezvous", work)
    every = [[first + 10 * rank, first + 10 * rank + 1] for rank in range(3) for first in (0, 2)]
    sums = (torch.arange(12.0).view(3, 2, 2) * 6).tolist()
    assert found == [(every, sums[rank]) for rank in range(3)]
