"""CORS, the key of /metrics, and the counters, on a real socket."""

from collections.abc import Generator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http.edge import AccessPolicy

from ....support.front import Echo, Served, served

PAGE = "https://app.example"
KEY, METRICS_KEY = "sesame-sesame", "only-for-metrics"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


@pytest.fixture
def guarded() -> Generator[Served]:
    with served(Echo(laps=1), access=AccessPolicy(KeyRing(KEY), METRICS_KEY, (PAGE,))) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_preflight_needs_no_key(guarded: Served) -> None:
    url = f"{guarded.url}/v1/chat/completions"
    asked = httpx.options(url, headers={"origin": PAGE} | PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    assert httpx.options(url, headers={"origin": "https://evil.example"} | PREFLIGHT).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_reads_answers_and_errors(guarded: Served, stream: bool) -> None:
    body = {"prompt": "abc", "stream": stream}
    for key, status in ((KEY, 200), ("wrong", 401)):
        headers = bearer(key) | {"origin": PAGE}
        answered = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=headers)
        assert answered.status_code == status
        assert answered.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answered.headers["access-control-expose-headers"]


def test_cors_is_off_unless_configured() -> None:
    with served(Echo(laps=1)) as server:
        asked = httpx.options(f"{server.url}/v1/completions", headers={"origin": PAGE} | PREFLIGHT)
        assert asked.status_code == 405
        answered = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"origin": PAGE})
        assert not [name for name in (*asked.headers, *answered.headers) if name.startswith("access-control")]


def status(server: Served, path: str, key: str) -> int:
    return httpx.get(server.url + path, headers=bearer(key)).status_code


def test_the_key_of_metrics_opens_nothing_else(guarded: Served) -> None:
    assert status(guarded, "/metrics", METRICS_KEY) == status(guarded, "/metrics", KEY) == 200
    assert status(guarded, "/metrics", "wrong") == status(guarded, "/v1/models", METRICS_KEY) == 401
    assert httpx.get(f"{guarded.url}/metrics").status_code == 401


def test_metrics_may_have_a_key_where_nothing_else_has_one() -> None:
    with served(Echo(), access=AccessPolicy(metrics_key=METRICS_KEY)) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert status(server, "/metrics", METRICS_KEY) == 200


def test_answers_are_counted_by_route_and_status() -> None:
    with served(Echo(laps=1), api_key=KEY) as server, httpx.Client(base_url=server.url, headers=bearer(KEY)) as http:
        http.post("/v1/completions", json={"prompt": "x"})
        http.post("/v1/completions", json={"prompt": "x", "stream": True})
        http.post("/v1/completions", json={"prompt": ""})
        http.get("/v1/models/gpt-9")
        http.get("/a")
        http.get("/b")
        http.get("/v1/models", headers={"authorization": "Bearer wrong"})
        http.get("/health", headers={"x": "y" * 20_000})
        families = text_string_to_metric_families(http.get("/metrics").text)
    found = {
        (s.labels["route"], s.labels["status"]): s.value
        for family in families
        for s in family.samples
        if s.name == "diptych_http_responses_total"
    }
    assert found == {
        ("/v1/completions", "200"): 2,
        ("/v1/completions", "400"): 1,
        ("/v1/models/{name}", "404"): 1,
        ("other", "404"): 2,
        ("/v1/models", "401"): 1,
        ("none", "431"): 1,
    }
