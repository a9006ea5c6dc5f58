"""The client's side of HTTP and of server-sent events, against servers that write their answers byte by byte."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from diptych.cluster.bench.http import HttpClient
from diptych.cluster.bench.openai import Asking, EventReader, OpenAIEndpoint
from diptych.cluster.bench.types import BenchRequest, Reply
from diptych.workers.common.errors import DiptychError, Unauthenticated, Unavailable, UnknownModel

ASKING = Asking("m", False, 30.0, {"temperature": 0})
CALL = BenchRequest([1, 2, 3], 3, 8)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


USAGE = event(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
)
COMPLETION = text("Hel") + text("lö ") + text("x", "length") + USAGE + b"data: [DONE]\n\n"


def read(data: bytes, piece: int) -> Reply:
    """At instant i comes the i-th piece."""
    reader = EventReader(Reply(0.0))
    for i in range(0, len(data), piece):
        reader.feed(data[i : i + piece], float(i + piece))
    return reader.ended()


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_cut_anywhere(piece: int, newline: bytes) -> None:
    reply = read(COMPLETION.replace(b"\n", newline), piece)
    assert reply.failure is None
    assert reply.text == "Hellö x"
    assert len(reply.token_at) == 3
    assert (reply.num_input, reply.num_output, reply.num_cached) == (9, 4, 5)
    assert reply.ended_at == reply.token_at[-1]


def test_what_counts_as_a_token() -> None:
    chat = delta(role="assistant", content="") + delta(content="a") + delta(content="") + delta("stop")
    reply = read(b": a comment\n\n" + chat, len(chat) + 100)
    assert (reply.text, len(reply.token_at)) == ("a", 2), "an opening and a last word are none; half a character is one"
    assert reply.num_output == 2, "without a count of the server's"
    thought = read(delta(role="assistant", reasoning_content="hm") + delta("stop"), 1)
    assert (thought.text, len(thought.token_at)) == ("hm", 1)
    silent = read(text("", "stop"), 1)
    assert silent.failure is None and silent.token_at == [] and silent.ttft_s == silent.e2e_s > 0


def test_an_error_within_the_stream_is_a_failure() -> None:
    reply = read(text("a") + event(error={"message": "it broke", "type": "server_error", "code": "worker_lost"}), 1)
    assert reply.failure is not None
    assert (reply.failure.kind, reply.failure.message) == ("error in the stream worker_lost", "it broke")
    empty = read(b"data: [DONE]\n\n", 1)
    assert empty.failure is not None and empty.failure.kind == "empty answer"


PARTS = [{"type": "text", "text": "a"}]  # of a content, as some servers send it


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {",
        b"data: []",
        b'data: {"choices": [3]}',
        b'data: {"usage": {"a": 1}}',
        b'data: {"usage": {"prompt_tokens": 1e999, "completion_tokens": 1}}',
        b"data: " + b"[" * 100_000,
        delta(content=PARTS),
    ],
)
def test_what_is_no_event(bad: bytes) -> None:
    with pytest.raises(ValueError):
        EventReader(Reply(0.0)).feed(bad + b"\n\n", 1.0)


Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def against(answer: Answer, body: Callable[[str], Awaitable[None]]) -> None:
    """Run `body` with the URL of a server that calls `answer` with each request's first line."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"Content-Le")), 0)
                await reader.readexactly(length)
                await answer(head.split(b"\r\n")[0], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await body(f"http://127.0.0.1:{port}")

    asyncio.run(main())


def whole(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def ask(answer: Answer, asking: Asking = ASKING) -> Reply:
    replies: list[Reply] = []

    async def body(url: str) -> None:
        endpoint = OpenAIEndpoint(urlsplit(url), None)
        replies.append(await endpoint.ask(CALL, asking))
        await endpoint.close()

    against(answer, body)
    return replies[0]


def test_a_chunked_answer_byte_by_byte() -> None:
    async def answer(line: bytes, writer: asyncio.StreamWriter) -> None:
        assert line == b"POST /v1/completions HTTP/1.1"
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in COMPLETION:
            writer.write(b"1\r\n%c\r\n" % byte)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    reply = ask(answer)
    assert reply.failure is None
    assert (reply.text, reply.num_output) == ("Hellö x", 4)
    assert reply.sent_at < reply.token_at[0] <= reply.token_at[-1] == reply.ended_at


def test_an_answer_that_ends_with_the_connection() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + COMPLETION)
        writer.close()

    reply = ask(answer)
    assert (reply.failure, reply.text) == (None, "Hellö x")


@pytest.mark.parametrize("events", [text("Hel"), text("Hel") + USAGE, delta(content="a")])
def test_a_stream_without_its_end_is_a_failure(events: bytes) -> None:
    """A body without a length ends with its connection, whoever ended that."""

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + events)
        writer.close()

    failure = ask(answer).failure
    assert failure is not None and failure.kind == "cut off"
    whole = read(events + b"data: [DONE]\n\n", 7)
    assert whole.failure is None, "some servers have no finish_reason"


async def cut_short(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
    writer.close()


async def garbage(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-x\r\n\r\n")


async def bad_event(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b"data: {\n\n"))


async def overloaded(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"error": {"message": "later", "code": "rate_limit_exceeded"}}', "429 Too Many Requests"))


async def html(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b"<h1>proxy</h1>", "502 Bad Gateway"))


async def silence(_: bytes, writer: asyncio.StreamWriter) -> None:
    pass


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (cut_short, "ConnectionResetError", "closed the connection before its answer ended"),
        (garbage, "ConnectionError", "does not speak HTTP/1"),
        (bad_event, "ConnectionError", "the answer cannot be read"),
        (overloaded, "HTTP 429 rate_limit_exceeded", "later"),
        (html, "HTTP 502", "<h1>proxy</h1>"),
    ],
)
def test_failures_are_named(answer: Answer, kind: str, message: str) -> None:
    failure = ask(answer).failure
    assert failure is not None
    assert failure.kind == kind
    assert message in failure.message


def test_silence_ends_with_the_time_out() -> None:
    failure = ask(silence, Asking("m", False, 0.01, {})).failure
    assert failure is not None and failure.kind == "timeout"


def test_a_connection_is_used_again_and_one_that_was_closed_is_not() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        is_third = len(connections) == 3
        writer.write(whole(COMPLETION, more="Connection: close\r\n" if is_third else ""))

    async def body(url: str) -> None:
        endpoint = OpenAIEndpoint(urlsplit(url), None)
        for _ in range(4):
            assert (await endpoint.ask(CALL, ASKING)).failure is None
        await endpoint.close()

    against(answer, body)
    assert connections[0] is connections[1] is connections[2] is not connections[3]


def test_a_connection_that_dies_idle_costs_no_request() -> None:
    seen: list[asyncio.StreamWriter] = []

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(writer)
        if len(seen) == 2:
            writer.transport.abort()  # the connection ends without an answer
        else:
            writer.write(whole(b"{}"))

    async def body(url: str) -> None:
        client = HttpClient(urlsplit(url), {})
        assert (await client.get("/a")).status == 200
        assert (await client.get("/b")).body == b"{}"
        client.close()

    against(answer, body)
    assert len(seen) == 3


def find(answer: Answer, wanted: str | None) -> str:
    found: list[str] = []

    async def body(url: str) -> None:
        endpoint = OpenAIEndpoint(urlsplit(f"{url}/base/v1/"), "secret")
        try:
            found.append(await endpoint.find_model(wanted, 5.0))
        finally:
            await endpoint.close()

    against(answer, body)
    return found[0]


def listing(*names: str, status: str = "200 OK", root: str | None = None) -> Answer:
    async def answer(line: bytes, writer: asyncio.StreamWriter) -> None:
        assert line == b"GET /base/v1/models HTTP/1.1"
        writer.write(whole(json.dumps({"data": [{"id": n, "root": root} for n in names]}).encode(), status))

    return answer


def test_the_model_is_found() -> None:
    assert find(listing("a"), None) == "a"
    assert find(listing("a", "b"), "b") == "b"
    assert find(listing("b", "a", root="a"), None) == "a", "b is another name for it"
    assert find(listing("a", root="/models/a"), None) == "a"
    assert find(listing(status="404 Not Found"), "x") == "x", "an endpoint without a list is believed"


@pytest.mark.parametrize(
    ("answer", "wanted", "error", "message"),
    [
        (listing("a", "b"), None, UnknownModel, "serves several models: select one with --model: a, b"),
        (listing("a", "b", root="/models/a"), None, UnknownModel, "serves several models"),
        (listing("a"), "x", UnknownModel, "does not serve 'x'. It serves: a"),
        (listing(status="404 Not Found"), None, UnknownModel, "does not list its models"),
        (listing(status="401 Unauthorized"), "a", Unauthenticated, "use --api-key"),
        (garbage, "a", Unavailable, "cannot reach"),
    ],
)
def test_the_model_is_not_found(answer: Answer, wanted: Any, error: type[DiptychError], message: str) -> None:
    with pytest.raises(error, match=message):
        find(answer, wanted)
