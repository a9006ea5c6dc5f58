"""Limits of a key: refused with a true time, given back at the end, shared by routers. Over HTTP and gRPC."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.client.client import Client
from diptych.cluster.front.access.accounts import Account
from diptych.cluster.front.access.key_file import KeyFile, KeyLimits, NamedKey
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.access.limits import HEADER_NAMES
from diptych.cluster.front.access.usage import Usage
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.workers.common.errors import ConfigError, Overloaded, RateLimited

from ....support.front import Echo, Served, served
from .test_key_file import write

SINGLE, ALICE, BOB = "sesame-sesame", "sk-alice-0123456789", "sk-bob-0123456789"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Work:
    """A generation's usage, which a test changes."""

    def __init__(self, prompt: int, output: int = 0, cached: int = 0) -> None:
        self.usage = Usage(prompt, output, cached)


def account(clock: Clock, num_routers: int = 1, **limits: int) -> Account:
    return Account(NamedKey("a", b"", limits=KeyLimits(**limits)), is_tenant=True, num_routers=num_routers, clock=clock)


def refusal(of: Callable[[], object]) -> RateLimited:
    with pytest.raises(RateLimited) as refused:
        of()
    return refused.value


def test_requests_a_minute() -> None:
    clock = Clock()
    key = account(clock, requests_per_minute=2)
    for _ in range(2):
        with key.begin():
            pass
    refused = refusal(key.begin)
    assert (refused.reason, refused.retry_after_s, refused.status) == ("requests", 30.0, 429)
    clock.now = refused.retry_after_s
    with key.begin():
        pass
    assert key.totals.num_requests == 3 and key.totals.num_refused == {"requests": 1}


def test_requests_at_a_time() -> None:
    clock = Clock()
    key = account(clock, concurrent_requests=2)
    with key.begin():
        with key.begin():
            refused = refusal(key.begin)
            assert refused.reason == "concurrency" and refused.retry_after_s >= 1.0
        with pytest.raises(ZeroDivisionError), key.begin():
            raise ZeroDivisionError  # a call that fails gives its place back
        assert key.limits.num_running == 1
        with key.begin():
            pass
    assert key.limits.num_running == 0


def test_tokens_are_reserved_and_given_back() -> None:
    clock = Clock()
    key = account(clock, tokens_per_minute=100)
    work = Work(prompt=10)
    with key.begin() as call:
        call.admit(work, 80)
        with key.begin() as other:
            refused = refusal(lambda: other.admit(Work(prompt=20), 0))
            assert (refused.reason, refused.retry_after_s) == ("tokens", 6.0)
        work.usage = Usage(10, 5, 4)
    assert dict(key.headers())["x-ratelimit-remaining-tokens"] == "85"
    assert (key.totals.prompt_tokens, key.totals.completion_tokens, key.totals.cached_tokens) == (10, 5, 4)


def test_what_nobody_reserved_counts_at_the_end() -> None:
    clock = Clock()
    key = account(clock, tokens_per_minute=60)
    work = Work(prompt=10)
    with key.begin() as call:
        call.admit(work, 0)  # without max_tokens
        work.usage = Usage(10, 110, 0)
    with key.begin() as call:
        assert refusal(lambda: call.admit(Work(prompt=1), 0)).retry_after_s == 61.0


def test_a_request_that_can_never_be_taken_is_not_to_be_sent_again() -> None:
    key = account(Clock(), tokens_per_minute=100)
    with key.begin() as call:
        refused = refusal(lambda: call.admit(Work(prompt=50), 51))
    assert not refused.retry_helps and "send a shorter one" in refused.message


def test_each_router_enforces_its_share() -> None:
    key = account(Clock(), num_routers=4, requests_per_minute=8, concurrent_requests=6, tokens_per_minute=100)
    headers = dict(key.headers())
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == ("2", "25")
    with key.begin():
        assert refusal(key.begin).reason == "concurrency"
    few = account(Clock(), num_routers=4, requests_per_minute=1, concurrent_requests=1)
    with few.begin():
        pass
    assert refusal(few.begin).retry_after_s == 240.0


def test_a_key_without_limits_is_told_none() -> None:
    assert account(Clock()).headers() == []
    key = account(Clock(), requests_per_minute=1, tokens_per_minute=1)
    assert tuple(name for name, _ in key.headers()) == tuple(
        f"x-ratelimit-{about}-{of}" for of in ("requests", "tokens") for about in ("limit", "remaining", "reset")
    )
    assert set(HEADER_NAMES) == {name for name, _ in key.headers()}


def ring(tmp_path: Path, limits: str) -> KeyRing:
    text = f"alice: {{key: {ALICE}, limits: {{{limits}}}}}\nbob: {BOB}"
    return KeyRing(SINGLE, KeyFile(write(tmp_path / "keys", text)))


def post(server: Served, key: str, route: str = "/v1/completions", **fields: object) -> httpx.Response:
    body = {"prompt": "abcd", "max_tokens": 4, **fields}
    return httpx.post(server.url + route, json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("stream", [False, True])
def test_http_tells_what_is_left_and_refuses_what_is_not(tmp_path: Path, stream: bool) -> None:
    found = ring(tmp_path, "requests_per_minute: 2, tokens_per_minute: 600")
    with served(Echo(laps=1), access=AccessPolicy(found)) as server:
        first = post(server, ALICE, stream=stream)
        assert first.status_code == 200 and first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert int(first.headers["x-ratelimit-reset-requests"].removesuffix("ms")) <= 30_000
        assert post(server, ALICE, prompt="").status_code == 400  # counts too
        refused = post(server, ALICE, stream=stream)
        assert refused.status_code == 429 and 20 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert refused.headers["x-request-id"] in error["message"] and "'alice'" in error["message"]
        others = post(server, BOB)
        assert others.status_code == 200 and not [name for name in others.headers if name.startswith("x-ratelimit")]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=ALICE, max_retries=0)
        with client, pytest.raises(openai.RateLimitError, match="rate limit reached"):
            client.completions.create(model="echo", prompt="x")


def test_what_runs_can_be_cancelled_beyond_the_limits(tmp_path: Path) -> None:
    with served(Echo(laps=1), access=AccessPolicy(ring(tmp_path, "requests_per_minute: 1"))) as server:
        assert [post(server, ALICE).status_code for _ in range(2)] == [200, 429]
        assert post(server, ALICE, "/v1/responses/resp_0/cancel").status_code == 404
        assert post(server, ALICE, "/v1/responses").status_code == 429


def test_grpc_has_the_same_limits(tmp_path: Path) -> None:
    found = ring(tmp_path, "requests_per_minute: 2")
    with served(Echo(laps=1), access=AccessPolicy(found)) as server:
        with Client(server.address, api_key=ALICE) as client:
            client.generate("abc", max_tokens=2)
            assert post(server, ALICE).status_code == 200
            with pytest.raises(Overloaded, match="rate limit reached") as refused:
                client.generate("abc", max_tokens=2)
            assert isinstance(refused.value, RateLimited) and 20 < refused.value.retry_after_s <= 30
        with Client(server.address, api_key=BOB) as client:
            client.generate("abc", max_tokens=2)


def test_too_many_tokens_are_refused_before_they_are_computed(tmp_path: Path) -> None:
    source = Echo(laps=1)
    with served(source, access=AccessPolicy(ring(tmp_path, "tokens_per_minute: 20"))) as server:
        never = post(server, ALICE, max_tokens=6, n=3)
        assert never.status_code == 429 and never.headers["x-should-retry"] == "false"
        assert post(server, ALICE, max_tokens=16).status_code == 200
        assert post(server, ALICE, max_tokens=16).status_code == 429
    assert len(source.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_its_client_leaves_gives_its_place_back(tmp_path: Path, stream: bool) -> None:
    source, found = Echo(), ring(tmp_path, "concurrent_requests: 1, tokens_per_minute: 1000")
    source.gate.clear()
    body = json.dumps({"prompt": "abcd", "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n"
    head += "content-type: application/json\r\n"
    with served(source, access=AccessPolicy(found)) as server:
        started = source.all_started(1)
        with socket.create_connection(("127.0.0.1", server.http_port)) as sock:
            sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert started.wait(60)
            assert post(server, ALICE).status_code == 429
        assert source.all_closed.wait(60)
        server.open_gate()
        (alice,) = (account for account in found.accounts if account.name == "alice")
        asyncio.run_coroutine_threadsafe(until(lambda: not alice.limits.num_running), server.loop).result(30)
        answered = post(server, ALICE)
        assert answered.status_code == 200
        assert int(answered.headers["x-ratelimit-remaining-tokens"]) > 900


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_changed_file_forgives_nothing(tmp_path: Path) -> None:
    found = ring(tmp_path, "requests_per_minute: 1")
    with served(Echo(laps=1), access=AccessPolicy(found)) as server:
        assert post(server, ALICE).status_code == 200
        write(
            tmp_path / "keys",
            f"carol: sk-carol-0123456789\nalice: {{key: {ALICE}, limits: {{requests_per_minute: 2}}}}",
        )
        server.loop.call_soon_threadsafe(found.reload)
        assert post(server, BOB).status_code == 401
        assert [post(server, ALICE).status_code for _ in range(2)] == [200, 429]


def test_use_is_counted_for_each_key(tmp_path: Path) -> None:
    found = ring(tmp_path, "requests_per_minute: 1")
    with served(Echo(laps=1), access=AccessPolicy(found)) as server:
        for key in (ALICE, ALICE, BOB, BOB, SINGLE):
            post(server, key)
        with Client(server.address, api_key=BOB) as client:
            client.generate("abc", max_tokens=2)
        text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {SINGLE}"}).text
        write(tmp_path / "keys", f"bob: {BOB}")
        server.loop.call_soon_threadsafe(found.reload)
        later = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {SINGLE}"}).text
    samples = {
        (s.name.removeprefix("diptych_api_key_"), *s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if "key" in s.labels
    }
    assert samples["requests_total", "alice"] == samples["requests_total", "default"] == 1
    assert samples["requests_total", "bob"] == 3
    assert samples["prompt_tokens_total", "bob"] == 4 + 4 + 3
    assert samples["output_tokens_total", "bob"] == 4 + 4 + 2
    assert samples["cached_tokens_total", "bob"] == 9
    assert samples["requests_in_flight", "bob"] == 0
    assert samples["refusals_total", "alice", "requests"] == 1
    assert 'key="bob"' in later and 'key="alice"' not in later  # a key that is gone leaves no series


def test_limits_are_checked_when_the_file_is_read(tmp_path: Path) -> None:
    for limits in (
        "requests_per_minute: 0",
        "tokens_per_minute: 1.5",
        "requests_per_hour: 1",
        "concurrent_requests: a",
    ):
        with pytest.raises(ConfigError, match="limits"):
            ring(tmp_path, limits)
