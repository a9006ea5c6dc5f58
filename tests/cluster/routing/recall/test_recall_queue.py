"""Names that are asked for together."""

import asyncio
from collections.abc import Sequence

import pytest

from diptych.cluster.routing.recall.recall_queue import RecallQueue
from diptych.proto import worker_pb2
from diptych.workers.common.request import MAX_RECALLED

Answers = Sequence[worker_pb2.RecalledAnswer] | None


class Worker:
    """Answers each name by itself, once it may."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.may_answer = asyncio.Event()
        self.num_fewer = 0

    async def send(self, names: Sequence[bytes], timeout_s: float) -> Answers:
        self.asked.append(list(names))
        assert 0 < timeout_s <= 60.0
        await self.may_answer.wait()
        return [worker_pb2.RecalledAnswer(call=name) for name in names][self.num_fewer :]


async def test_names_that_come_meanwhile_are_in_the_next_message() -> None:
    worker = Worker()
    queue = RecallQueue(worker.send)
    first = [queue.ask(b"%d" % i, 60.0) for i in range(3)]
    while not worker.asked:
        await asyncio.sleep(0)
    later = [queue.ask(b"%d" % i, 60.0) for i in range(3, MAX_RECALLED + 5)]
    first[1].cancel()
    worker.may_answer.set()
    answers = await asyncio.gather(first[0], first[2], *later)
    assert [each and each.call for each in answers] == [b"%d" % i for i in range(MAX_RECALLED + 5) if i != 1]
    assert [len(names) for names in worker.asked] == [3, MAX_RECALLED, 2]
    assert (found := await queue.ask(b"again", 60.0)) and found.call == b"again"


async def test_an_answer_of_another_length_is_none() -> None:
    worker = Worker()
    worker.num_fewer = 1
    worker.may_answer.set()
    assert await asyncio.gather(*(RecallQueue(worker.send).ask(b"n", 60.0) for _ in range(2))) == [None, None]


async def test_names_whose_time_has_passed_are_not_asked_for() -> None:
    worker = Worker()
    worker.may_answer.set()
    queue = RecallQueue(worker.send)
    assert await queue.ask(b"late", -1.0) is None and not worker.asked


async def test_who_asks_hears_of_a_message_that_failed() -> None:
    tasks: list[asyncio.Task[None] | None] = []

    async def fails(names: Sequence[bytes], timeout_s: float) -> Answers:
        tasks.append(asyncio.current_task())
        raise OSError("a bug")

    queue = RecallQueue(fails)
    asked = [queue.ask(b"n", 60.0) for _ in range(MAX_RECALLED + 1)]  # two messages
    assert await asyncio.gather(*asked) == [None] * len(asked)
    [task] = tasks
    assert task is not None
    with pytest.raises(OSError, match="a bug"):
        await task
