"""The supervisor waits for a draining gang and for a starting process, and reports both."""

import asyncio
from typing import Any, cast

import pytest

from diptych.cluster.common.handles import RouterStarted, WorkerHandle, WorkerStarted
from diptych.cluster.control import worker_watch
from diptych.cluster.control.plan import Phase
from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.control.worker_record import WorkerRecord, announced
from diptych.cluster.control.worker_watch import drain, until_dead, until_known, until_started
from diptych.proto.worker_pb2 import LoadReport
from diptych.workers.common.errors import DiptychError, InternalError, WorkerLost
from diptych.workers.common.role import Role
from diptych.workers.common.wire import ROLE_TO_PROTO

from ...support.scripted_worker import scripted


class Control:
    """State of a worker that still has requests at this many checks after it was told to drain."""

    def __init__(self, num_busy: int) -> None:
        self.load = LoadReport()
        self.num_asked = 0
        self._num_busy = num_busy

    @property
    def num_requests(self) -> int:
        self._num_busy -= 1
        return int(self._num_busy >= 0)

    @property
    def is_busy(self) -> bool:
        return self._num_busy > 0

    async def drain(self) -> None:
        self.load = LoadReport(draining=True)

    async def is_drained(self) -> bool:
        self.num_asked += 1
        return not self.is_busy


async def test_books_are_compared_once_nobody_of_the_gang_has_requests() -> None:
    idle, busy = Control(0), Control(2)
    gang = [WorkerRecord(f"decode-1.{rank}", "decode", Phase.DRAINING) for rank in (0, 1)]
    for worker, control in zip(gang, (idle, busy), strict=True):
        worker.control = cast(WorkerControl, cast(Any, control))
    await drain(gang, 60.0)
    assert not busy.is_busy
    assert (idle.num_asked, busy.num_asked) == (1, 1)


class Reporting:
    """Reports of a worker that stops reporting after this many checks."""

    def __init__(self, num_reports: int) -> None:
        self.load = LoadReport(role=ROLE_TO_PROTO[Role.DECODE])
        self._num_reports = num_reports
        self.num_told = 0

    @property
    def num_received(self) -> int:
        self.num_told += self.num_told < self._num_reports
        return self.num_told


class Living:
    async def wait(self) -> DiptychError:
        return await asyncio.get_running_loop().create_future()


async def test_a_worker_that_reports_no_more_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "TICK_S", 0.001)
    control = Reporting(4 * worker_watch.SILENT_TICKS)
    worker = WorkerRecord("decode-1", "decode", Phase.READY)
    handle = cast(WorkerHandle, cast(Any, Living()))
    watching = until_dead(worker, handle, cast(WorkerControl, cast(Any, control)))
    error = await asyncio.wait_for(watching, 60)
    assert isinstance(error, WorkerLost) and "it did not answer for 0.015 s" in error.message
    assert control.num_told == 4 * worker_watch.SILENT_TICKS


async def test_the_supervisor_knows_a_worker_once_it_knows_whether_it_drains() -> None:
    """Else it would count one that an earlier supervisor drained, and drain another in its place."""
    async with scripted("decode") as [worker]:
        control = WorkerControl(worker.info.address, None)
        while not control.num_received:  # the hello
            await asyncio.sleep(0.002)
        assert not control._is_known.is_set()
        worker.load(draining=True)
        await control._is_known.wait()
        assert control.load.draining
        await control.close()


class Silent(Control):
    """Answers of a worker that fails to answer this many times."""

    def __init__(self, num_silent: int, error: DiptychError) -> None:
        super().__init__(0)
        self._num_silent = num_silent
        self._error = error
        self.record = WorkerRecord("decode-1", "decode", Phase.DRAINING)
        self.record.control = cast(WorkerControl, cast(Any, self))

    async def is_drained(self) -> bool:
        if await super().is_drained() and self.num_asked > self._num_silent:
            return True
        raise self._error


async def test_a_worker_that_does_not_say_whether_it_is_done_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "DRAIN_POLL_S", 0.001)
    silent = Silent(3, WorkerLost("UNAVAILABLE"))
    await drain([silent.record], 60.0)
    assert silent.num_asked == 4


async def test_a_worker_whose_books_are_wrong_is_not_asked_again() -> None:
    wrong = Silent(3, InternalError("an invariant is broken"))
    await drain([wrong.record], 60.0)
    assert wrong.num_asked == 1


async def test_a_drain_is_over_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "DRAIN_POLL_S", 0.001)
    gone = Silent(1 << 30, WorkerLost("UNAVAILABLE"))
    draining = asyncio.create_task(drain([gone.record], 60.0))
    while gone.num_asked < 2:
        await asyncio.sleep(0)
    gone.record.enter(Phase.STOPPING)
    await draining


class Ended:
    """A process that ended after its start."""

    async def wait(self) -> DiptychError:
        return WorkerLost("SIGKILL")


async def test_a_worker_that_dies_before_its_hello_is_lost_at_once() -> None:
    async def main() -> None:
        async def never() -> WorkerControl:
            await asyncio.Event().wait()
            raise AssertionError

        await until_known(cast(WorkerHandle, cast(Any, Ended())), never())

    with pytest.raises(WorkerLost, match="SIGKILL"):
        await main()


async def test_a_control_that_opens_as_its_task_is_cancelled_is_closed() -> None:
    class Running:
        async def wait(self) -> DiptychError:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> list[str]:
        closed: list[str] = []
        hello = asyncio.Event()

        class Opened:
            async def close(self) -> None:
                closed.append("closed")

        async def opening() -> WorkerControl:
            await hello.wait()
            return cast(WorkerControl, cast(Any, Opened()))

        task = asyncio.create_task(until_known(cast(WorkerHandle, cast(Any, Running())), opening()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        hello.set()
        await asyncio.sleep(0)  # it opens, and the task that waits for it has not heard so
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return closed

    assert await main() == ["closed"]


async def test_a_control_that_is_closed_tells_no_state() -> None:
    async def main() -> None:
        control = WorkerControl("127.0.0.1:1", None)
        await control.close()
        await control.state()

    with pytest.raises(WorkerLost, match="closed"):
        await main()


def test_a_gang_is_announced_once_it_has_all_its_members() -> None:
    first, second = (WorkerRecord(f"decode-1.{rank}", "decode", Phase.READY) for rank in (0, 1))
    for worker in (first, second):
        worker.started = WorkerStarted("127.0.0.1:1", worker.worker_id, 1, "here")
    second.phase = Phase.STARTING
    assert announced([first, second]) == []
    second.phase = Phase.READY
    assert announced([first, second]) == [first.info(), second.info()]


class Unplaced:
    """A process that waits this many checks to be placed, and then `num_loading` more until it serves."""

    def __init__(self, num_unplaced: int, num_loading: int) -> None:
        self._num_unplaced = num_unplaced
        self._num_loading = num_loading
        self._serves = asyncio.Event()

    async def start(self) -> RouterStarted:
        await self._serves.wait()
        return RouterStarted("127.0.0.1", 1, 2, 3)

    async def alive(self) -> None:
        await self._serves.wait()

    async def waiting_for(self) -> str:
        if self._num_unplaced > 0:
            self._num_unplaced -= 1
            return "a node with GPU: 1"
        self._num_loading -= 1
        if self._num_loading < 0:
            self._serves.set()
        return ""


async def test_the_time_without_a_place_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.001)
    looks = worker_watch.SILENT_START_LOOKS
    said: list[str] = []
    started = await until_started(Unplaced(2 * looks - 1, looks // 2), said.append, looks * 0.001, is_new=False)
    assert started.grpc_port == 2
    assert said.count("a node with GPU: 1") == 2 * looks - 1 and said[-1] == ""


class Slow:
    """A process that begins to answer after `num_importing` checks, and serves after `num_loading` more."""

    def __init__(self, num_importing: int, num_loading: int, *, answers_twice: bool = True) -> None:
        self._num_importing, self._num_loading = num_importing, num_loading
        self._answers_twice = answers_twice
        self._answers, self._serves = asyncio.Event(), asyncio.Event()
        self._num_answers = 0

    async def start(self) -> RouterStarted:
        await self._serves.wait()
        return RouterStarted("127.0.0.1", 1, 2, 3)

    async def alive(self) -> None:
        await self._answers.wait()
        self._num_answers += 1
        if self._num_answers > 1 and not self._answers_twice:
            await asyncio.Event().wait()

    async def waiting_for(self) -> str:
        if self._num_importing > 0:
            self._num_importing -= 1
        elif not self._answers.is_set():
            self._answers.set()
        else:
            self._num_loading -= 1
            if self._num_loading < 0:
                self._serves.set()
        return ""


async def test_a_start_that_is_slow_to_its_first_answer_and_loads_for_long_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.001)
    slow = Slow(worker_watch.SILENT_NEW_LOOKS - 2, 2 * worker_watch.SILENT_NEW_LOOKS)
    assert (await until_started(slow, lambda _: None, 60.0, is_new=True)).grpc_port == 2


async def test_a_start_that_answers_and_does_not_end_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without a place does not count."""
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.001)
    loading = Slow(0, 1 << 20)
    with pytest.raises(WorkerLost, match=r"has not started within 0\.3 s: its load hangs, or start_timeout_s"):
        await until_started(loading, lambda _: None, 0.3, is_new=True)
    assert loading._num_loading == (1 << 20) - 299, "the first look is that of its first answer"


@pytest.mark.parametrize(
    ("process", "is_new", "num_looks"),
    [
        (Slow(1 << 20, 0), True, worker_watch.SILENT_NEW_LOOKS),
        (Slow(1 << 20, 0), False, worker_watch.SILENT_START_LOOKS),
        (Slow(0, 1 << 20, answers_twice=False), True, worker_watch.SILENT_START_LOOKS),
    ],
    ids=["never answered", "was there before", "answered once"],
)
async def test_a_start_that_stays_silent_hangs(
    process: Slow, is_new: bool, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.001)
    with pytest.raises(WorkerLost, match=f"did not answer during its start for {num_looks * 0.001:g} s"):
        await until_started(process, lambda _: None, 60.0, is_new=is_new)
