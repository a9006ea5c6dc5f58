"""Unauthenticated clients at the gRPC port, on raw sockets: an HTTP/2 client can write any bytes."""

import resource
import socket
import struct
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cluster.front.limits import ConnectionLimits
from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc

from ..support.front import Echo, Served, served

KEY = "sesame-sesame"
NUM_BYTES = 256 << 20  # of a flood
WAIT_S = 30.0  # for what must come; a test that passes waits for none of it
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {
    "maxAttempts": 5, "initialBackoff": "0.01s", "maxBackoff": "1s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""  # of a call that the idle timeout cut
SETTINGS, PING, GOAWAY, HEADERS, CONTINUATION = 4, 6, 7, 1, 9


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


@pytest.fixture
def server() -> Generator[Served]:
    limits = ConnectionLimits(header_timeout_s=0.5, idle_timeout_s=0.5, max_connections=3)
    with served(Echo(laps=1), api_key=KEY, connections=limits) as it:
        yield it


@pytest.fixture
def patient_server() -> Generator[Served]:
    """Serve with the default limits: a call of a slow client does not race the idle timeout."""
    with served(Echo(laps=1), api_key=KEY) as it:
        yield it


def dial(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.grpc_port), timeout=WAIT_S)


def until_closed(sock: socket.socket) -> bytes:
    got = b""
    try:
        while piece := sock.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half a preface", "no settings"])
def test_a_connection_without_its_first_frames_is_closed(server: Served, said: bytes) -> None:
    with dial(server) as sock:
        sock.sendall(said)
        until_closed(sock)


def test_a_connection_without_a_call_is_closed(server: Served) -> None:
    with dial(server) as sock:
        sock.sendall(PREFACE + frame(SETTINGS))
        assert bytes([GOAWAY]) in until_closed(sock)


def test_headers_without_end_take_no_memory(server: Served) -> None:
    """The gRPC library continues to read, and drops what exceeds the limit."""
    sent = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with dial(server) as sock:
        sock.sendall(PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, b"\x00\x01a\x01b"))
        field = b"\x00\x01a\x7f\x81\x0e" + b"x" * 1920  # a literal field that is not remembered
        try:
            while sent < NUM_BYTES:
                sent += sock.send(frame(CONTINUATION, 0, 1, field * 8))
        except (BrokenPipeError, ConnectionResetError):
            pass
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (NUM_BYTES // 2) >> 10  # KiB


def test_large_metadata_is_refused(patient_server: Served) -> None:
    with grpc.insecure_channel(patient_server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        large = (("authorization", f"Bearer {KEY}"), ("x", "y" * (17 << 10)))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="x"), metadata=large))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_pings_without_end_are_refused(server: Served) -> None:
    with dial(server) as sock:
        sock.sendall(PREFACE + frame(SETTINGS) + frame(PING, 0, 0, bytes(8)) * 100)
        assert b"too_many_pings" in until_closed(sock)


def test_connections_are_bounded(server: Served) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(dial(server)) for _ in range(3)]
        for sock in held:
            sock.sendall(PREFACE + frame(SETTINGS))
            assert sock.recv(9)  # it is served
        with dial(server) as sock:
            assert until_closed(sock) == b""
        held[0].close()
        for sock in held[1:]:
            until_closed(sock)
    with grpc.insecure_channel(server.address, [("grpc.service_config", RETRIES)]) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=WAIT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
