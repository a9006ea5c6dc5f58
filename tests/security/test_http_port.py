"""Strangers at the HTTP port: bytes, connections and time that a client may cost before it has shown a key."""

import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from diptych.cluster.common.config import TlsConfig
from diptych.cluster.front.http.listener import origin_of
from diptych.cluster.front.limits import ConnectionLimits, RequestLimits

from ..support.front import Echo, Served, served
from ..support.logs import messages_of

KEY = "sesame-sesame"
FAST = ConnectionLimits(header_timeout_s=0.3, idle_timeout_s=0.3, send_timeout_s=0.3)
START = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WAIT_S = 20.0  # for what must come; a test that passes waits for none of it


@contextmanager
def dialled(server: Served) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT_S) as sock:
        yield sock


def flood(sock: socket.socket, piece: bytes, num_bytes: int) -> int:
    """Send up to this many bytes; return how many were sent before the server closed the connection."""
    sent = 0
    try:
        while sent < num_bytes:
            sent += sock.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


def answer(sock: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    got = b""
    try:
        while piece := sock.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


def status(sock: socket.socket) -> int:
    """The answer's; 0 where the server hung up without one."""
    words = answer(sock).split(b" ", 2)
    return int(words[1]) if len(words) > 1 else 0


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1), api_key=KEY, connections=FAST) as it:
        yield it


@pytest.mark.parametrize("piece", [b"a:\r\n" * 4096, b"x: " + b"y" * 8000 + b"\r\n"], ids=["many", "long"])
def test_headers_without_end_are_refused(piece: bytes) -> None:
    """Before: 60 MiB of them took 1.3 GiB."""
    with served(Echo(), api_key=KEY) as server, dialled(server) as sock:
        sock.sendall(START)
        sent = flood(sock, piece, 64 << 20)
        assert sent < 32 << 20  # what fits into sockets and what lingering reads
        assert status(sock) in {431, 0}  # 0: the answer was lost in the reset


@pytest.mark.parametrize(
    "head",
    [
        START + b"x: y\r\n" * 100 + b"\r\n",
        START + b"x: " + b"y" * (16 << 10) + b"\r\n\r\n",
        b"GET /" + b"y" * (16 << 10) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /" + b"y" * (16 << 10),
        b"\r\n" * (16 << 10),
    ],
    ids=["many fields", "a long field", "a long path", "a path without end", "empty lines"],
)
def test_a_large_head_is_answered_431(server: Served, head: bytes) -> None:
    with dialled(server) as sock:
        sock.sendall(head)
        got = answer(sock)
    assert got.startswith(b"HTTP/1.1 431 ") and b"connection: close" in got
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_the_largest_head_is_served(server: Served) -> None:
    fields = {f"x-{i}": "y" * 200 for i in range(70)}
    assert httpx.get(f"{server.url}/health", headers=fields).status_code == 200


def test_a_head_that_drips_is_answered_408(server: Served) -> None:
    with dialled(server) as sock:
        sock.sendall(START)
        assert status(sock) == 408


def test_a_head_that_begins_behind_a_whole_request_and_drips_is_answered_408(server: Served) -> None:
    with dialled(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + START)
        first, _, second = answer(sock).partition(b"HTTP/1.1 408")
        assert first.startswith(b"HTTP/1.1 200")
        assert second


def test_a_connection_that_says_nothing_is_closed(server: Served) -> None:
    with dialled(server) as sock:
        assert answer(sock) == b""


@pytest.mark.parametrize("then", [b"", b"\r\n", b"G"], ids=["silent", "an empty line", "a first byte"])
def test_an_idle_connection_is_closed(server: Served, then: bytes) -> None:
    """Before: one byte more, and it stood for ever."""
    with dialled(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        sock.sendall(then)
        answer(sock)  # ends


def test_not_http_is_answered_400_and_not_logged(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with dialled(server) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00" * 10)
        assert status(sock) == 400
    assert not messages_of(caplog, "diptych")


def test_a_body_without_a_key_is_not_read(server: Served) -> None:
    with dialled(server) as sock:
        sock.sendall(START + b"content-type: application/json\r\ncontent-length: 1000000000\r\n\r\n")
        assert flood(sock, b"x" * 65536, 100 << 20) < 32 << 20
        assert status(sock) in {401, 0}
    assert not server.source.requests


def test_a_refusal_is_read_by_a_client_that_still_sends(server: Served) -> None:
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * (3 << 20)})
    assert refused.status_code == 401


def test_a_body_that_says_it_is_too_large_is_refused_unread(server: Served) -> None:
    with dialled(server) as sock:
        head = f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: {1 << 30}\r\n\r\n"
        sock.sendall(START + head.encode())
        assert status(sock) == 413


@pytest.mark.parametrize("head", [START, b"GET /health HTTP/1.1\r\nhost: x\r\n"], ids=["no key", "no use for it"])
def test_an_answer_before_the_whole_body_says_that_it_is_the_last(server: Served, head: bytes) -> None:
    """Before: a client that kept the connection for its next call found it closed."""
    request = head + b"content-length: 2\r\n\r\n"
    with dialled(server) as sock:
        sock.sendall(request)
        assert b"connection: close" in answer(sock).lower()
    with dialled(server) as sock:
        sock.sendall(request + b"{}")
        assert b"connection: close" not in sock.recv(65536).lower()


def test_a_body_that_drips_is_answered_408() -> None:
    with served(Echo(), limits=RequestLimits(body_timeout_s=0.3)) as server, dialled(server) as sock:
        sock.sendall(START + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        assert status(sock) == 408


def test_a_body_that_nobody_asked_for_ends_its_connection(server: Served) -> None:
    """Before: whatever came was read and thrown away, for ever."""
    with dialled(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
        assert flood(sock, b"x" * 65536, 100 << 20) < 32 << 20


@pytest.mark.parametrize(
    "body", [b"1;" + b"x" * 64 + b"\r\n{\r\n", b"0\r\n" + b"x: y\r\n" * 16384], ids=["extensions", "trailers"]
)
def test_what_surrounds_a_body_in_chunks_is_bounded(body: bytes) -> None:
    with served(Echo()) as server, dialled(server) as sock:
        sock.sendall(START + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        assert flood(sock, body, 64 << 20) < 8 << 20


def test_requests_ahead_of_their_answers_are_few() -> None:
    with served(Echo()) as server, dialled(server) as sock:
        server.source.gate.clear()
        body = b'{"prompt": "x", "stream": true}'
        head = START + f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        assert flood(sock, (head + body) * 1000, 64 << 20) < 32 << 20
        answer(sock)  # ends, though nothing was answered
    assert len(server.source.requests) <= 1


def test_connections_from_one_address_are_bounded() -> None:
    limits = ConnectionLimits(max_connections_per_address=3)
    with served(Echo(), api_key=KEY, connections=limits) as server, ExitStack() as stack:
        held = [stack.enter_context(dialled(server)) for _ in range(3)]
        with dialled(server) as sock:
            got = answer(sock)
        assert got.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in got
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert status(held[0]) == 200
        # Its place is free.
        assert httpx.get(f"{server.url}/health", headers={"connection": "close"}).status_code == 200


def test_a_new_connection_takes_the_place_of_the_longest_idle() -> None:
    """Clients that hold connections open do not block others."""
    with served(Echo(), api_key=KEY, connections=ConnectionLimits(max_connections=3)) as server, ExitStack() as stack:
        held = [stack.enter_context(dialled(server)) for _ in range(3)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert answer(held[0]) == b""
        held[2].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert status(held[2]) == 200


def test_connections_at_work_are_not_closed_for_new_ones() -> None:
    with served(Echo(laps=1), connections=ConnectionLimits(max_connections=2)) as server, ExitStack() as stack:
        server.source.gate.clear()
        busy = [stack.enter_context(dialled(server)) for _ in range(2)]
        started = server.source.all_started(2)
        for sock in busy:
            body = b'{"prompt": "x"}'
            head = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(START + head.encode() + body)
        assert started.wait(WAIT_S)
        with dialled(server) as sock:
            assert status(sock) == 503
        server.open_gate()
        assert [status(sock) for sock in busy] == [200, 200]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_tls_handshake_has_a_deadline(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *names, "-keyout", key, "-out", cert, "-days", "2"], check=True, capture_output=True)
    tls = TlsConfig(cert=str(cert), key=str(key))
    limits = ConnectionLimits(header_timeout_s=0.5, max_connections_per_address=1)
    with served(Echo(), tls=tls, connections=limits) as server:
        with dialled(server) as sock:
            with dialled(server) as second:
                assert answer(second) == b""  # one that shakes hands has its place already
            assert answer(sock) == b""
        url = f"https://127.0.0.1:{server.http_port}/health"
        assert httpx.get(url, verify=ssl.create_default_context(cafile=cert)).status_code == 200


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_an_ipv6_client_is_its_network(address: str, origin: str) -> None:
    assert origin_of(address) == origin


@pytest.mark.parametrize("body", [b"-1\r\n", b"F" * 17 + b"\r\n", b"1\r\nabc\r\n", b"zz\r\n"])
def test_a_body_whose_chunks_are_broken_is_answered_400(body: bytes) -> None:
    """And not by a connection that ends without a word; what follows it is no request."""
    source = Echo(laps=1)
    with served(source) as server, dialled(server) as sock:
        head = START + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        sock.sendall(head + body + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        got = answer(sock)
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"\r\n\r\n") == 1
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not source.requests


def test_a_request_with_a_coding_that_is_not_known_is_answered_400() -> None:
    source = Echo(laps=1)
    with served(source) as server, dialled(server) as sock:
        sock.sendall(START + b"content-type: application/json\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n")
        assert status(sock) == 400
