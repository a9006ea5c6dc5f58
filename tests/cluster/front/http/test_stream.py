"""How a stream is written: few messages and few writes, each of which costs as much as the work for a token."""

import asyncio
import json
from typing import Any

import pytest

from diptych.cluster.front.http.api import make_app
from diptych.cluster.front.http.connection import CLIENT, CUT, AnswerTransport, ClientPresence
from diptych.cluster.front.http.stream import while_connected
from diptych.workers.common.errors import RequestAborted

from ....support.front import Echo, front_door

DONE = b"data: [DONE]\n\n"


async def streamed(source: Echo, **body: object) -> list[tuple[bytes, bool]]:
    """Body messages of a streamed completion: bytes, and whether more follow."""
    content = json.dumps({"prompt": "abc", "stream": True} | body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": headers,
        "query_string": b"",
        "state": {CUT: lambda: None, CLIENT: ClientPresence()},
    }
    incoming: list[dict[str, object]] = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[tuple[bytes, bool]] = []

    async def receive() -> dict[str, object]:
        return incoming.pop() if incoming else await asyncio.Future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if DONE in message["body"]:
                assert len(source.closed) == len(source.requests)  # what they held is free for the client's next call
            sent.append((message["body"], message.get("more_body", False)))

    await make_app(front_door(source))(scope, receive, send)
    return sent


@pytest.mark.parametrize("n", [1, 3])
async def test_the_last_events_are_one_message_with_the_end(n: int) -> None:
    sent = await streamed(Echo(), max_tokens=4, n=n, ignore_eos=True, stream_options={"include_usage": True})
    *first, (last, has_more) = sent
    assert all(more for _, more in first) and not has_more
    assert all(b'"finish_reason":"length"' not in body or n > 1 for body, _ in first)
    assert b'"finish_reason":"length"' in last and b'"completion_tokens":%d,' % (4 * n) in last and last.endswith(DONE)


async def test_an_answer_of_one_token_is_one_message() -> None:
    [(body, has_more)] = await streamed(Echo(), max_tokens=1, ignore_eos=True)
    assert body.count(b"data: ") == 2 and body.endswith(DONE) and not has_more


class Recorder(asyncio.Transport):
    """A transport that keeps what is written, one entry for each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def test_a_head_is_written_with_what_follows() -> None:
    raw = Recorder()
    transport = AnswerTransport(raw, raw.close)
    for _ in range(2):
        transport.hold_next()
        transport.write(b"head ")
        transport.write(b"first")
        transport.write(b"second")
    assert raw.written == [b"head first", b"second"] * 2
    await asyncio.sleep(0)
    assert raw.written == [b"head first", b"second"] * 2


async def test_a_head_that_nothing_follows_is_written_soon() -> None:
    raw = Recorder()
    transport = AnswerTransport(raw, raw.close)
    transport.hold_next()
    transport.write(b"head")
    assert raw.written == []
    await asyncio.sleep(0)
    transport.write(b"body")
    assert raw.written == [b"head", b"body"]


@pytest.mark.parametrize("ends", ["close", "hold_next"])
async def test_a_held_head_is_not_lost(ends: str) -> None:
    raw = Recorder()
    transport = AnswerTransport(raw, raw.close)
    transport.hold_next()
    transport.write(b"head")
    getattr(transport, ends)()
    assert raw.written == [b"head"]


async def test_nothing_is_written_after_an_abort() -> None:
    raw = Recorder()
    transport = AnswerTransport(raw, raw.close)
    transport.hold_next()
    transport.write(b"head")
    raw.close()
    await asyncio.sleep(0)
    assert raw.written == []


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_the_work_ends_when_the_client_leaves(leaves_first: bool) -> None:
    client, work = ClientPresence(), asyncio.Event()
    if leaves_first:
        client.leave()
    waiting = asyncio.create_task(while_connected({"state": {CLIENT: client}}, work.wait()))
    await asyncio.sleep(0)
    client.leave()
    with pytest.raises(RequestAborted, match="closed the connection"):
        await waiting


async def test_work_that_has_ended_is_forgotten() -> None:
    client, one = ClientPresence(), asyncio.sleep(0, 1)
    assert await while_connected({"state": {CLIENT: client}}, one) == 1
    assert client.num_tasks == 0
