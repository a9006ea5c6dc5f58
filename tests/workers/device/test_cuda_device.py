"""Devices by their names, one for each rank."""

import pytest
import torch

from diptych.workers.common.errors import ConfigError
from diptych.workers.device.cuda_device import check_num_gpus, gpu_named
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
