"""What the supervisor waits for: a gang that drains, a process that starts."""

import asyncio
from typing import Any, cast

import pytest

from diptych.cluster import worker_watch
from diptych.cluster.handles import RouterStarted
from diptych.cluster.worker_control import WorkerControl
from diptych.cluster.worker_record import WorkerRecord
from diptych.cluster.worker_watch import drain, until_started
from diptych.proto.worker_pb2 import LoadReport


class Control:
    """Of a worker that has requests at so many looks after it was told to drain."""

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


def test_books_are_compared_once_nobody_of_the_gang_has_requests() -> None:
    idle, busy = Control(0), Control(2)
    gang = [WorkerRecord(f"decode-1.{rank}", "decode") for rank in (0, 1)]
    for worker, control in zip(gang, (idle, busy), strict=True):
        worker.control = cast(WorkerControl, cast(Any, control))
    asyncio.run(drain(gang, 60.0))
    assert not busy.is_busy
    assert (idle.num_asked, busy.num_asked) == (1, 1)


class Unplaced:
    """A process that waits for a place at so many looks, then for `num_loading` more until it serves."""

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


def test_the_time_without_a_place_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "PLACED_S", 0.001)
    looks = worker_watch.SILENT_START_LOOKS
    said: list[str] = []
    started = asyncio.run(until_started(Unplaced(2 * looks - 1, looks // 2), said.append))
    assert started.grpc_port == 2
    assert said.count("a node with GPU: 1") == 2 * looks - 1 and said[-1] == ""
