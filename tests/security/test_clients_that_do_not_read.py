"""A client with a key that sends a request and reads nothing: it holds a slot no longer than its deadline, and little
memory."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from diptych.cluster.front.delivery import GRACE_S, Delivery
from diptych.cluster.front.generation import MAX_UNREAD_DELTAS
from diptych.cluster.front.limits import ConnectionLimits
from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc

from ..support.front import Echo, Served, served

NUM_TOKENS = 20_000
WAIT_S = 60.0  # for what must come; a test that passes waits for none of it
LOGPROBS = 20  # so that a token is some kB of text
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))  # a client takes little ahead
SHORT = ConnectionLimits(send_timeout_s=0.5)


def endless() -> Echo:
    source = Echo()
    source.context = 2 * NUM_TOKENS
    return source


@contextmanager
def asked(server: Served, **body: object) -> Generator[socket.socket]:
    """A socket on which a completion was asked for. It has little room for an answer."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT_S)
        sock.connect(("127.0.0.1", server.http_port))
        content = json.dumps({"prompt": "abc", "max_tokens": NUM_TOKENS, "logprobs": LOGPROBS} | body).encode()
        head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + content)
        yield sock


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the readable data ends before the answer does."""
    got = b""
    try:
        while piece := sock.recv(1 << 20):
            got = got[-100:] + piece
    except ConnectionResetError:
        return True
    return not got.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_is_not_read_ends_at_its_deadline(n: int) -> None:
    # Until then the socket's buffers are full, on a loaded machine too.
    with served(endless()) as server, asked(server, stream=True, n=n, timeout_s=3) as sock:
        assert server.source.all_started(n).wait(WAIT_S)
        assert server.source.all_closed.wait(WAIT_S)
        assert server.source.num_delivered < n * NUM_TOKENS  # it was the deadline
        until_alone(server)
        assert is_cut_off(sock)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_is_not_read_ends_before_a_deadline_that_is_far(n: int) -> None:
    with served(endless(), connections=SHORT) as server, asked(server, stream=True, n=n) as sock:
        assert server.source.all_started(n).wait(WAIT_S)
        assert server.source.all_closed.wait(WAIT_S)
        assert is_cut_off(sock)


def test_an_answer_in_one_piece_that_is_not_read_is_thrown_away() -> None:
    source = endless()
    source.tokens_a_delta = 100
    with served(source, connections=SHORT) as server, asked(server, max_tokens=2000, n=2) as sock:
        assert source.all_started(2).wait(WAIT_S)
        assert source.all_closed.wait(WAIT_S)  # its slots are free when it is computed
        until_alone(server)
        assert is_cut_off(sock)


def until_alone(server: Served) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_alone(server):
        assert time.monotonic() < deadline


def is_alone(server: Served) -> bool:
    """Whether the server has no connection but this question's own."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT_S) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return b"diptych_http_connections 1.0\n" in b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize("n", [1, 2])
def test_a_call_that_is_not_read_ends_at_its_deadline(n: int) -> None:
    with served(endless()) as server, grpc.insecure_channel(server.address, NARROW) as channel:
        call = generate(channel, n=n, timeout_s=0.5)
        assert server.source.all_started(n).wait(WAIT_S)
        assert server.source.all_closed.wait(WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)  # it gets the error when it finally reads
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_call_ends_whose_first_message_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's loop stands still as soon as it began to send: it sees the deadline before the message's end."""
    send = Delivery.of

    async def send_late(self: Delivery, sending: Awaitable[None]) -> None:
        asyncio.get_running_loop().call_soon(time.sleep, 2 * GRACE_S)
        await send(self, sending)

    monkeypatch.setattr(Delivery, "of", send_late)
    with served(endless()) as server, grpc.insecure_channel(server.address) as channel:
        call = generate(channel, timeout_s=0.1)
        timer = threading.Timer(WAIT_S, call.cancel)  # so that what never ends fails
        timer.start()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        timer.cancel()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("n", [1, 2])
def test_a_call_that_is_not_read_ends_before_a_deadline_that_is_far(n: int) -> None:
    with served(endless(), connections=SHORT) as server, grpc.insecure_channel(server.address, NARROW) as channel:
        call = generate(channel, n=n)
        assert server.source.all_started(n).wait(WAIT_S)
        assert server.source.all_closed.wait(WAIT_S)
        call.cancel()


def generate(channel: grpc.Channel, **fields: object) -> Any:
    """A call that nothing is read of until someone iterates it."""
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, logprobs=LOGPROBS)
    request = pb.GenerateRequest(text="abc", sampling=sampling, **fields)  # type: ignore[arg-type]
    return inference_pb2_grpc.InferenceStub(channel).Generate(request)


@pytest.mark.parametrize("n", [1, 4])
def test_what_waits_for_a_reader_is_bounded(n: int) -> None:
    """Sockets, one event, and this many deltas of several completions."""
    with served(endless(), connections=SHORT) as server, asked(server, stream=True, n=n):
        assert server.source.all_closed.wait(WAIT_S)
        event_bytes = 1000  # at least
        in_sockets = (1 << 20) // event_bytes
        assert server.source.num_delivered < in_sockets + (n > 1) * 2 * (MAX_UNREAD_DELTAS + n)
