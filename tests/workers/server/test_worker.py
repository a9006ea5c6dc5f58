"""A worker on a thread of a process that has other things to do."""

import pytest

from diptych.workers.common.errors import InternalError
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.server import worker
from diptych.workers.server.service import WorkerService
from diptych.workers.server.worker import WorkerProcess
from diptych.workers.testing.fake_runner import FakeRunner


def start(monkeypatch: pytest.MonkeyPatch) -> WorkerProcess:
    monkeypatch.setattr(worker, "load_runner", lambda *_: FakeRunner())
    process = WorkerProcess(WorkerConfig.of(model="fake", transports=("grpc",)))
    process.start_in_thread()
    return process


def test_a_worker_that_was_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(monkeypatch)
    assert not process.ended.done()
    process.stop()
    assert process.ended.result().message == "it was stopped"


def test_a_worker_whose_engine_breaks_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and then the failing of its sequences go wrong: nothing is left to trust."""

    def fault(*_: object) -> None:
        raise KeyError("no such block")

    monkeypatch.setattr(Engine, "step", fault)
    monkeypatch.setattr(Engine, "step_failed", fault)
    assert "no such block" in start(monkeypatch).ended.result().message


def test_a_worker_that_fails_by_our_own_fault_does_not_say_that_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault(*_: object) -> None:
        raise KeyError("no such stream")

    monkeypatch.setattr(WorkerService, "run", fault)
    reason = start(monkeypatch).ended.result()
    assert isinstance(reason, InternalError) and "KeyError: 'no such stream'" in reason.message
    assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)
