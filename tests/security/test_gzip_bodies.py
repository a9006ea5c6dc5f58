"""Compressed bodies: their decompressed size is limited before it is stored."""

import gzip
import json
import resource
import zlib
from collections.abc import Generator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.cluster.front.limits import RequestLimits

from ..support.front import Echo, Served, served

MAX_BYTES = 1 << 20
BODY = json.dumps({"prompt": "abc"}).encode()


@pytest.fixture(scope="module")
def server() -> Generator[Served]:
    with served(Echo(laps=1), limits=RequestLimits(max_body_bytes=MAX_BYTES)) as it:
        yield it


def post(server: Served, body: bytes, encoding: str = "gzip") -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)


def bomb(num_bytes: int) -> bytes:
    """A gzip body of this many zeros."""
    deflater = zlib.compressobj(wbits=31)
    piece = bytes(1 << 20)
    return b"".join(deflater.compress(piece) for _ in range(num_bytes >> 20)) + deflater.flush()


@pytest.mark.parametrize("encoding", ["gzip", "X-GZIP"])
def test_a_gzip_body_is_served(server: Served, encoding: str) -> None:
    answered = post(server, gzip.compress(BODY), encoding)
    assert answered.json()["choices"][0]["text"] == "abc"
    padded = json.dumps({"prompt": "abc", "user": "x" * 1000}).encode() + b" " * (MAX_BYTES - 2000)
    assert post(server, gzip.compress(padded)).status_code == 200


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd"])
def test_other_encodings_are_refused_by_name(server: Served, encoding: str) -> None:
    refused = post(server, BODY, encoding)
    assert refused.status_code == 415 and refused.headers["accept-encoding"] == "gzip"
    assert encoding in refused.json()["error"]["message"]


def test_a_bomb_is_refused_before_it_is_inflated() -> None:
    """700 KB that become 700 MB."""
    body = bomb(700 << 20)
    with served(Echo()) as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert post(server, body).status_code == 413
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (BODY, "not gzip"),
        (gzip.compress(BODY)[:-9], "is incomplete"),
        (b"", "is incomplete"),
        (gzip.compress(BODY) * 2, "continues after"),
        (gzip.compress(BODY) + b"x", "continues after"),
        (gzip.compress(BODY)[:-8] + bytes(8), "not gzip"),
    ],
    ids=["plain", "cut", "empty", "two members", "a tail", "a wrong checksum"],
)
def test_what_is_no_gzip_body_is_refused(server: Served, body: bytes, what: str) -> None:
    refused = post(server, body)
    assert refused.status_code == 400 and what in refused.json()["error"]["message"]


def test_any_bytes_get_an_answer(server: Served) -> None:
    good = gzip.compress(BODY)

    def spoilt(at: int, what: bytes) -> bytes:
        return good[:at] + what + good[at + len(what) :]

    bodies = st.binary(max_size=60) | st.builds(spoilt, st.integers(0, 40), st.binary(max_size=3))

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(bodies)
    def check(body: bytes) -> None:
        assert post(server, body).status_code in {200, 400, 413}

    check()
