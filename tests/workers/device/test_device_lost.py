"""A GPU that is lost ends its worker by name, also one that has nothing to compute."""

from pathlib import Path

import pytest

from diptych.workers.common.errors import DeviceLost
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.engine import thread as engine_thread
from diptych.workers.server import worker
from diptych.workers.server.worker import WorkerProcess

from ...support.gpu.serving import late, load, steps_of


def test_an_idle_worker_notices_and_ends(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(engine_thread, "IDLE_WAIT_S", 0.01)
    monkeypatch.setattr(worker, "load_runner", lambda *_: load(llama, device, cuda_graphs=False))
    process = WorkerProcess(WorkerConfig.of(model="llama", transports=("grpc",)))
    process.start_in_thread()
    assert not process.ended.done()
    device.is_lost = True
    error = process.ended.result()
    assert isinstance(error, DeviceLost)
    assert "the GPU failed (CUDA error: unspecified launch failure)" in error.message


def test_what_is_asked_of_a_lost_device_says_so(llama: Path) -> None:
    device = late()
    runner = load(llama, device, cuda_graphs=False)
    runner.check()
    device.is_lost = True
    with pytest.raises(DeviceLost, match="is to be started again"):
        runner.check()
    runner.close()


def test_only_what_is_lost_ends_a_worker(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is full, for another process has filled it, has room again later."""
    runner = load(llama, late(), cuda_graphs=False)
    errors = iter([RuntimeError("CUDA error: out of memory"), RuntimeError("a bug of ours")])

    def fail() -> None:
        raise next(errors)

    monkeypatch.setattr(steps_of(runner)._device, "check", fail)
    runner.check()
    with pytest.raises(RuntimeError, match="a bug of ours"):
        runner.check()
