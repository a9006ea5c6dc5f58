"""CudaDevice and NcclGroup, in what needs no GPU."""

import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from diptych.workers.device.cuda_device import CudaDevice, CudaLane
from diptych.workers.device.device import Work
from diptych.workers.device.device_group import NcclGroup
from diptych.workers.parallel.groups import GlooGroup

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
