"""The engine on its thread: commands from other threads and their results."""

import asyncio
import threading

import pytest

from diptych.workers.common.errors import InternalError, Unavailable
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine import thread as engine_thread
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.engine.thread import EngineThread
from diptych.workers.testing.fake_runner import FakeRunner

from ...support.sequences import make_request


def make() -> tuple[EngineThread, "list[InternalError]", threading.Event]:
    errors: list[InternalError] = []
    broken = threading.Event()

    def on_broken(error: InternalError) -> None:
        errors.append(error)
        broken.set()

    return EngineThread(Engine(FakeRunner(), SchedulerConfig()), lambda _: None, on_broken), errors, broken


async def test_a_command_runs_though_its_caller_is_gone() -> None:
    thread, errors, _ = make()
    thread.start()
    held, ran = threading.Event(), threading.Event()
    thread.post(lambda _: held.wait())
    for moment in ("waiting", "running"):
        call = asyncio.create_task(thread.call(lambda _: ran.set()))
        await asyncio.sleep(0)
        if moment == "running":
            thread.post(lambda _: held.wait())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        held.set()
        await asyncio.to_thread(ran.wait)
        ran.clear()
    assert await thread.call(lambda engine: engine.check_integrity().num_unaccounted_blocks) == 0
    await asyncio.to_thread(thread.stop)
    assert errors == []


async def test_a_fault_of_ours_is_told_and_ends_the_thread() -> None:
    thread, errors, broken = make()
    thread.start()
    thread.post(lambda _: {}["no such key"])  # type: ignore[index]
    broken.wait()
    thread.stop()
    assert "KeyError" in errors[0].message
    with pytest.raises(Unavailable):
        await thread.call(lambda engine: engine.check_integrity())


async def test_a_call_that_the_thread_does_not_reach_is_refused() -> None:
    thread, errors, broken = make()
    thread.start()
    held = threading.Event()
    thread.post(lambda _: held.wait())
    thread.post(lambda _: {}["no such key"])  # type: ignore[index]
    call = asyncio.create_task(thread.call(lambda engine: engine.check_integrity()))
    await asyncio.sleep(0)
    held.set()
    with pytest.raises(Unavailable):
        await call
    await asyncio.to_thread(broken.wait)
    assert len(errors) == 1
    thread.stop()


async def test_a_pull_that_ends_after_the_engine_has_nothing_to_free() -> None:
    thread, _, _ = make()
    thread.start()
    await asyncio.to_thread(thread.stop)
    await thread.fail("key", quarantine=True)
    await thread.settle("key")


def test_commands_that_came_during_the_last_step_are_run() -> None:
    ran = threading.Event()

    def on_step(_: StepOutput) -> None:
        thread._is_stopping = True  # as `stop` does, on another thread
        thread.post(lambda _: ran.set())

    thread = EngineThread(Engine(FakeRunner(), SchedulerConfig()), on_step, lambda _: None)
    thread.start()
    thread.stop()
    assert ran.is_set()


def test_a_runner_hears_at_once_that_there_is_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that share experts wait for each other's word of it."""
    monkeypatch.setattr(engine_thread, "IDLE_WAIT_S", 3600.0)
    heard = threading.Event()

    class Runner(FakeRunner):
        def check(self) -> None:
            if ran.is_set():
                heard.set()

    ran = threading.Event()
    engine = Engine(Runner(), SchedulerConfig())
    thread = EngineThread(engine, lambda output: ran.set() if output.ran else None, lambda _: None)
    thread.start()
    thread.post(lambda engine: engine.submit("key", make_request([1, 2, 3]), []))
    assert heard.wait(60)
    thread.stop()
