"""Messages that wait to be sent are sent as one, in order and in bounded sizes."""

import asyncio

import pytest

from diptych.proto import worker_pb2
from diptych.workers.common.channel import (
    MAX_BATCH_BYTES,
    SendQueue,
    each_of,
    join_router_messages,
    join_worker_messages,
)


def pong(number: int) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(pong=worker_pb2.Pong(number=number))


def numbers(message: worker_pb2.WorkerMessage | None) -> list[int]:
    assert message is not None
    return [each.pong.number for each in each_of(message)]


async def test_a_single_message_is_sent_as_it_is() -> None:
    queue = SendQueue(join_worker_messages)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    message = pong(1)
    queue.put(message)
    assert await taking is message


async def test_those_that_wait_are_one_in_their_order() -> None:
    queue = SendQueue(join_worker_messages)
    for number in range(5):
        queue.put(pong(number))
    received = worker_pb2.WorkerMessage.FromString((await queue.take() or pong(9)).SerializeToString())
    assert received.WhichOneof("message") == "batch" and numbers(received) == [0, 1, 2, 3, 4]
    queue.put(pong(5))
    queue.end()
    assert numbers(await queue.take()) == [5]
    assert await queue.take() is None


async def test_an_end_wakes_who_waits_and_a_cleared_message_is_not_sent() -> None:
    queue = SendQueue(join_worker_messages)
    queue.put(pong(1))
    queue.clear()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.end()
    assert await taking is None


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_large_message_is_not_joined(place: int) -> None:
    """So that a batch is never larger than what is allowed for one message."""
    queue = SendQueue(join_router_messages)
    sent = [worker_pb2.RouterMessage(ping=worker_pb2.Ping(number=i)) for i in range(3)]
    sent[place] = worker_pb2.RouterMessage(submit=worker_pb2.Submit(request_id="x" * MAX_BATCH_BYTES))
    for message in sent:
        queue.put(message)
    queue.end()
    found: list[worker_pb2.RouterMessage] = []
    while (taken := await queue.take()) is not None:
        assert taken.WhichOneof("message") == "submit" or taken.ByteSize() < MAX_BATCH_BYTES
        found += each_of(taken)
    assert found == sent
