"""Devices by their names, one for each rank; what a capture may not be disturbed by."""

import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from diptych.workers.common.errors import ConfigError
from diptych.workers.device.cuda_device import CudaDevice, check_num_gpus, gpu_named
from diptych.workers.device.fake_device import FakeDevice


def test_the_cpu_is_no_gpu() -> None:
    assert gpu_named("cpu") is None and gpu_named("cpu", 1) is None


def test_a_fake_device_is_late_at_rank_0_alone() -> None:
    devices = gpu_named("fake"), gpu_named("fake", 1)
    assert [isinstance(device, FakeDevice) and device.is_late for device in devices] == [True, False]


@pytest.mark.parametrize(
    ("name", "says"), [("gpu", "torch does not know the device 'gpu'"), ("meta", "device 'meta' is not supported")]
)
def test_other_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{says}: use cpu or cuda"):
        gpu_named(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        gpu_named("cuda")


@pytest.mark.parametrize(
    ("name", "num_ranks", "fits"),
    [("cuda", 2, True), ("cuda", 3, False), ("cuda:1", 1, True), ("cuda:1", 2, False)],
)
def test_each_rank_needs_a_gpu(name: str, num_ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if fits:
        check_num_gpus(name, num_ranks)
        return
    with pytest.raises(ConfigError, match=f"tensor_parallel={num_ranks} needs one GPU per rank from {name} on"):
        check_num_gpus(name, num_ranks)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for num_ranks in (1, 2):
        with pytest.raises(ConfigError, match="device 'cuda:2' is set, but torch finds 2: use one"):
            gpu_named("cuda:2", num_ranks=num_ranks)
    with pytest.raises(ConfigError, match="tensor_parallel=2 needs one GPU per rank from cuda:1 on"):
        gpu_named("cuda:1", num_ranks=2)


class Graph:
    """A CUDAGraph that captures nothing. error: of its end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_capturing, self._error = False, error

    def capture_begin(self, **_: object) -> None:
        self.is_capturing = True

    def capture_end(self) -> None:
        self.is_capturing = False
        if self._error is not None:
            raise self._error


def record(graph: Graph, work: Callable[[], object]) -> None:
    device = object.__new__(CudaDevice)  # there is none
    device._pool = (0, 1)
    device._record(cast(Any, graph), work)


def test_what_broke_a_capture_is_raised_and_not_that_it_is_broken() -> None:
    broken = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    graph = Graph(broken)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        record(graph, fail)
    assert not graph.is_capturing
    with pytest.raises(torch.AcceleratorError, match="during capture"):
        record(Graph(broken), lambda: None)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_while_a_graph_is_captured(was_enabled: bool) -> None:
    """What is collected may be pinned memory, whose events would be recorded into the graph."""
    graph, found, before = Graph(), list[tuple[bool, bool]](), gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        record(graph, lambda: found.append((gc.isenabled(), graph.is_capturing)))
        assert found == [(False, True)] and gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
