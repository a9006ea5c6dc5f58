"""Lists of copies, on a CPU by the kernel's twin; and what becomes of a kernel that does not run, or copies wrongly."""

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.kv.run_copy import RunTile, copy_runs_twin
from diptych.workers.device import run_copier
from diptych.workers.device.run_copier import RunCopier
from diptych.workers.kv.device_kv import CopyList

CPU = torch.device("cpu")


def test_runs_are_copied_between_addresses() -> None:
    copier = RunCopier.checked(CPU)
    assert copier is not None
    source, target = torch.arange(4096, dtype=torch.int64), torch.zeros(4096, dtype=torch.int64)
    place = np.arange(32, dtype=np.int64) * 1024
    lengths = np.full(32, 512, dtype=np.int64)
    copier.copy(CopyList(target.data_ptr() + place[::-1], source.data_ptr() + place, lengths))
    found, expected = target.view(32, 2, 64), source.view(32, 2, 64)
    assert torch.equal(found[:, 0], expected[:, 0].flip(0)) and not found[:, 1].any()


def test_a_kernel_that_does_not_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(runs: Tensor, tile: RunTile, num_chunks: int) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(run_copier, "copy_runs", fail)
    assert RunCopier.checked(CPU) is None
    assert "does not run" in caplog.text and "Failed to find C compiler" in caplog.text


@pytest.mark.parametrize("fault", ["too little", "too much"])
def test_a_kernel_that_copies_wrongly_is_left_out(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def copy(runs: Tensor, tile: RunTile, num_chunks: int) -> None:
        runs = runs.clone()
        runs[2, -1] += 16 if fault == "too much" else -16
        copy_runs_twin(runs, tile, num_chunks)

    monkeypatch.setattr(run_copier, "copy_runs", copy)
    assert RunCopier.checked(CPU) is None
    assert "copies wrongly" in caplog.text


def test_without_triton_a_gpu_copies_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_copier, "tl", None)
    assert RunCopier.checked(torch.device("cuda", 0)) is None
