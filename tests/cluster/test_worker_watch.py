"""What is asked of a gang that drains."""

import asyncio
from typing import Any, cast

from diptych.cluster.worker_control import WorkerControl
from diptych.cluster.worker_record import WorkerRecord
from diptych.cluster.worker_watch import drain
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
