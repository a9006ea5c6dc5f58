"""What a plain request costs the front door, counted in calls of our own functions: the same on any machine.

The bounds leave 5 % for what comes next. Before a request is made dearer than that, look for what it may do without.
"""

import json
import socket
import threading
from pathlib import Path
from types import FrameType

import pytest

from ...support.front import Echo, served

ROOMS = tuple(str(Path(__file__).parents[3] / room) for room in ("cluster", "workers"))
CHUNKS_END = b"\r\n0\r\n\r\n"
NUM_REQUESTS = 16


class Calls:
    """Counts calls, and resumed coroutines, of our functions on threads that begin while it is entered."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> "Calls":
        threading.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            self.num += 1


def complete(sock: socket.socket, max_tokens: int, *, stream: bool) -> None:
    """One completion on an open connection."""
    body = json.dumps({"prompt": "a diptych", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    answer = b""
    while not answer.endswith(CHUNKS_END if stream else b"}"):
        answer += sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")


def calls_a_request(max_tokens: int, *, stream: bool, tries: int = 3) -> float:
    """The least of several counts: on a busy machine a request may meet the end of the one before, which adds calls."""
    return min(_calls_a_request(max_tokens, stream=stream) for _ in range(tries))


def _calls_a_request(max_tokens: int, *, stream: bool) -> float:
    """Counts on a server that has already served requests."""
    with Calls() as calls, served(Echo()) as server:
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as sock:
            complete(sock, 1, stream=stream)
            before = calls.num
            for _ in range(NUM_REQUESTS):
                complete(sock, max_tokens, stream=stream)
        return (calls.num - before) / NUM_REQUESTS


@pytest.mark.parametrize(("stream", "most"), [(True, 177), (False, 223)], ids=["streamed", "whole"])
def test_a_completion_costs_few_calls(stream: bool, most: float) -> None:
    assert 0 < calls_a_request(1, stream=stream, tries=8) <= most


@pytest.mark.parametrize(("stream", "most"), [(True, 15.8), (False, 13.7)], ids=["streamed", "whole"])
def test_a_token_costs_few_calls(stream: bool, most: float) -> None:
    one, many = calls_a_request(1, stream=stream), calls_a_request(65, stream=stream)
    assert 0 < (many - one) / 64 <= most
