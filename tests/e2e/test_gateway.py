"""A real Envoy, with the filter and the clusters of gateways of the Gateway API Inference Extension, before an endpoint
picker and routers. Where these are front doors alone, an answer is the prompt again, byte by byte."""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.common.admission import RouteForecast
from diptych.cluster.picker.messages import DESTINATION
from diptych.cluster.picker.reading import ReadingRules
from diptych.cluster.picker.server import SERVICE, PickerConfig
from diptych.workers.common.errors import Overloaded

from ..support.cluster_harness import CLI, environment, wait_until
from ..support.front import Echo, Served, served
from ..support.gateway import Gateway, Picking, envoy, envoy_binary, picking
from ..support.routed import LASTING_TOKENS, Routed, routed_by

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not envoy_binary().exists(), reason="there is no Envoy for this machine"),
]

LIMIT_S = 60.0
Fleet = tuple[list[Served], Picking, list[str]]


def endpoint(router: Served | Routed) -> str:
    return router.url.removeprefix("http://")


@contextmanager
def fleet(num: int, **settings: Any) -> Generator[Fleet]:
    """Routers and a picker that knows them; and their endpoints."""
    with ExitStack() as stack:
        routers = [stack.enter_context(served(Echo())) for _ in range(num)]
        endpoints = [endpoint(router) for router in routers]
        picker = stack.enter_context(picking(PickerConfig(tuple(endpoints), **settings)))
        yield routers, picker, endpoints


def complete(url: str, prompt: str = "hello", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": len(prompt), **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)


def stream(url: str, text: str) -> str:
    """Text of a streamed chat."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2 * len(text), "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


def num_asked(routers: list[Served]) -> list[int]:
    return [len(router.source.requests) for router in routers]


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "STREAMED", "BUFFERED", "NONE"])
def test_requests_and_streams_pass_in_every_mode_of_bodies(mode: str, tmp_path: Path) -> None:
    with fleet(2) as (routers, picker, _), envoy(Gateway(picker.port, body_mode=mode), tmp_path) as url:
        answer = complete(url, headers={DESTINATION: "192.0.2.1:9"})  # a client's own word does not count
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hello")
        assert stream(url, "parts") == "partsparts"
        assert httpx.get(f"{url}/v1/models", timeout=LIMIT_S).json()["data"][0]["id"] == "echo"
        assert num_asked(routers) == [1, 1], "each goes to the one with less to do, in turn"
        assert picker.count("picked") == 3


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Fleet, str]]:
    """Three routers behind an Envoy in full-duplex mode; the picker knows a model by another name."""
    rules = ReadingRules({"batch": -1}, {"public": "echo"}, reads_rewrite_header=True)
    folder = tmp_path_factory.mktemp("envoy")
    with fleet(3, rules=rules) as found, envoy(Gateway(found[1].port), folder) as url:
        yield found, url


def test_a_stream_is_not_held_until_its_end(three: tuple[Fleet, str]) -> None:
    (routers, _, _), url = three
    for router in routers:
        router.source.gate_after = 3
        router.loop.call_soon_threadsafe(router.source.gate.clear)
    body = {"prompt": "hello", "max_tokens": 5, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        first = [next(line for line in lines if line) for _ in range(3)]
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in first) == "hel"
        for router in routers:
            router.open_gate()
        assert "data: [DONE]" in list(lines)


def test_a_large_body_arrives_as_it_was_sent(three: tuple[Fleet, str]) -> None:
    _, url = three
    texts = [f"{i:07d}" for i in range(20_000)]
    answer = httpx.post(f"{url}/tokenize", json={"prompt": "".join(texts)[:500], "texts": texts}, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] == 500
    answer = httpx.post(f"{url}/detokenize", json={"tokens": [97] * 500, "padding": texts}, timeout=LIMIT_S)
    assert answer.json() == {"prompt": "a" * 500}
    # The same through what keeps bodies.
    body = {"model": "public", "input": "hello", "max_output_tokens": 5, "padding": texts}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "echo"
    assert answer.json()["output"][0]["content"][0]["text"] == "hello"


def test_a_conversation_goes_on_at_the_router_that_keeps_it(three: tuple[Fleet, str]) -> None:
    (_, _, endpoints), url = three
    first = httpx.post(f"{url}/v1/responses", json={"input": "one", "max_output_tokens": 3}, timeout=LIMIT_S).json()
    owners = []
    for end in endpoints:
        owners.append(httpx.get(f"http://{end}/v1/responses/{first['id']}", timeout=LIMIT_S).status_code)
    assert sorted(owners) == [200, 404, 404], "one router has it"
    for _ in range(3):
        body = {"input": "two", "previous_response_id": first["id"], "max_output_tokens": 3}
        assert httpx.post(f"{url}/v1/responses", json=body, timeout=LIMIT_S).status_code == 200
        assert httpx.get(f"{url}/v1/responses/{first['id']}", timeout=LIMIT_S).json()["id"] == first["id"]


def test_a_repeated_request_comes_to_the_same_router(three: tuple[Fleet, str]) -> None:
    (routers, picker, _), url = three
    for key in ("a", "b", "c"):
        before = num_asked(routers)
        for _ in range(3):
            # It learns later that a request has ended; until then it counts for the bound of a router's load.
            wait_until(picker.is_idle, LIMIT_S)
            assert complete(url, headers={"idempotency-key": key}).status_code == 200
        assert sorted(now - then for now, then in zip(num_asked(routers), before, strict=True)) == [0, 0, 3]


def test_a_model_may_have_another_name_for_clients(three: tuple[Fleet, str]) -> None:
    _, url = three
    assert complete(url, model="public").json()["model"] == "echo"
    assert complete(url, model="nobody", headers={"x-gateway-model-name-rewrite": "echo"}).status_code == 200
    refused = complete(url, model="nobody")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_what_may_be_shed_is_shed_while_requests_miss_their_level(three: tuple[Fleet, str]) -> None:
    (routers, picker, _), url = three
    usual = routers[0].source.outlook_now
    late = RouteForecast(9.0, 8.75, 0.01)
    try:
        for router in routers:
            router.source.outlook_now = replace(usual, now=late)
        wait_until(lambda: all(v.outlook.now == late for v in picker.server.policy.routers.views()), LIMIT_S)
        assert complete(url).status_code == 200, "a request waits unless it asks not to"
        for headers in (
            {"x-gateway-inference-objective": "batch"},
            {"x-diptych-admission": "refuse", "x-diptych-ttft-ms": "500"},
        ):
            shed = complete(url, headers=headers)
            assert (shed.status_code, shed.json()["error"]["code"]) == (429, Overloaded.code)
            assert int(shed.headers["retry-after"]) >= 8
            assert shed.headers["x-request-id"] in shed.json()["error"]["message"]
        patient = {"x-diptych-admission": "refuse", "x-diptych-ttft-ms": "60000"}
        assert complete(url, headers=patient).status_code == 200
    finally:
        for router in routers:
            router.source.outlook_now = usual
    wait_until(lambda: all(v.outlook.now == usual.now for v in picker.server.policy.routers.views()), LIMIT_S)
    assert complete(url, headers={"x-gateway-inference-objective": "batch"}).status_code == 200


def test_full_routers_refuse_with_the_time_to_come_again(three: tuple[Fleet, str]) -> None:
    (routers, picker, endpoints), url = three
    usual = routers[0].source.outlook_now
    full = replace(usual, num_requests=7, max_requests=1, mean_s=20.0)
    try:
        for router in routers:
            router.source.outlook = lambda: full
        wait_until(lambda: all(v.outlook.num_requests >= 7 for v in picker.server.policy.routers.views()), LIMIT_S)
        refused = complete(url)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
        routers[1].source.outlook = lambda: usual
        wait_until(lambda: any(v.outlook.num_requests < 7 for v in picker.server.policy.routers.views()), LIMIT_S)
        before = num_asked(routers)
        assert complete(url).status_code == 200
        assert [now - then for now, then in zip(num_asked(routers), before, strict=True)] == [0, 1, 0]
    finally:
        for router in routers:
            vars(router.source).pop("outlook", None)
    wait_until(lambda: all(map(picker.is_ready, endpoints)), LIMIT_S)


def test_routers_that_leave_get_nothing_and_none_ready_is_503(three: tuple[Fleet, str]) -> None:
    (routers, picker, endpoints), url = three
    try:
        for router, end in zip(routers, endpoints, strict=True):
            router.source.ready = False
            wait_until(lambda end=end: not picker.is_ready(end), LIMIT_S)
            if router is not routers[-1]:
                assert complete(url).status_code == 200
        refused = complete(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert "no router is ready (3 known, 0 of them not reached)" in refused.json()["error"]["message"]
        refused = httpx.post(f"{url}/v1/messages", json={}, timeout=LIMIT_S)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
    finally:
        for router in routers:
            router.source.ready = True
    wait_until(lambda: all(map(picker.is_ready, endpoints)), LIMIT_S)


def test_only_routers_of_the_proxys_subset_are_named(tmp_path: Path) -> None:
    with fleet(3) as (routers, picker, endpoints):
        with envoy(Gateway(picker.port, subset=endpoints[1:2]), tmp_path / "one") as url:
            for _ in range(3):
                assert complete(url).status_code == 200
        assert num_asked(routers) == [0, 3, 0]
        with envoy(Gateway(picker.port, subset=["192.0.2.1:8000"]), tmp_path / "none") as url:
            refused = complete(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert "0 of 3 in the subset" in refused.json()["error"]["message"]


def test_the_proxy_goes_down_the_list_where_a_router_does_not_answer(tmp_path: Path) -> None:
    with fleet(2, num_fallbacks=1) as (routers, picker, endpoints), socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # it refuses connections
        gone = f"127.0.0.1:{unheard.getsockname()[1]}"
        policy = picker.server.policy
        views = policy.routers.views
        doubted = threading.Event()
        policy.routers.doubt = lambda _: doubted.set()
        policy.routers.views = lambda: [replace(views()[0], endpoint=gone, num_sent=0), views()[1]]  # as before it knew
        with envoy(Gateway(picker.port, routers=[gone, endpoints[1]]), tmp_path / "list") as url:
            for _ in range(4):
                assert complete(url).status_code == 200
        assert num_asked(routers) == [0, 4]
        assert not doubted.is_set(), "this Envoy does not say who answered"
        policy.routers.views = lambda: [replace(views()[0], endpoint=gone, num_sent=0)]
        with envoy(Gateway(picker.port), tmp_path / "one") as url:
            assert complete(url).status_code == 503
        assert doubted.wait(LIMIT_S), "a gateway's own error counts against the router"


@contextmanager
def command(home: Path, *flags: str) -> Generator[tuple["subprocess.Popen[str]", list[str]]]:
    """`diptych endpoint-picker`, and where it serves the gateway, health and metrics."""
    words = [*CLI, "endpoint-picker", *flags, *("--port", "0", "--health-port", "0", "--metrics-port", "0")]
    with subprocess.Popen(words, env=environment(home), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = process.stdout.readline().split()
            yield process, [found[i] for i in (2, 4, 6)]
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


def test_a_killed_router_is_not_picked_and_the_next_is(tmp_path: Path) -> None:
    """Real routers of one worker, each in a process, and the command."""
    with routed_by(2) as routers, ExitStack() as stack:
        flags = [word for router in routers for word in ("--router", endpoint(router))]
        _, (picker_at, health_at, metrics_at) = stack.enter_context(command(tmp_path, *flags))
        with grpc.insecure_channel(health_at) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def status(name: str) -> int:
                return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S).status

            assert status("liveness") == health_pb2.HealthCheckResponse.SERVING
            wait_until(lambda: status(SERVICE) == health_pb2.HealthCheckResponse.SERVING, LIMIT_S)
        url = stack.enter_context(envoy(Gateway(int(picker_at.rpartition(":")[2])), tmp_path / "envoy"))

        def told(name: str, router: Routed) -> float | None:
            text = httpx.get(f"http://{metrics_at}/metrics").text
            found = [s for f in text_string_to_metric_families(text) for s in f.samples]
            return next(
                (s.value for s in found if s.name == name and endpoint(router) == s.labels.get("endpoint")), None
            )

        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
            for _ in range(4):
                assert client.post("/v1/completions", json=body).status_code == 200
            served_by = {client.post("/v1/completions", json=body).headers["x-request-id"][:12] for _ in range(8)}
            assert len(served_by) == 2, "both take their share"
            lasting = {"prompt": "long", "max_tokens": LASTING_TOKENS, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=lasting) as open_stream:
                lines = open_stream.iter_lines()
                assert next(lines).startswith("data: ")
                tag = open_stream.headers["x-request-id"][4:12]
                loads = [httpx.get(f"{r.url}/load").json() for r in routers]
                [busy] = [r for r, load in zip(routers, loads, strict=True) if load["router"] == tag]
                [idle] = [r for r in routers if r is not busy]
                wait_until(lambda: told("diptych_picker_router_requests", busy) == 1, LIMIT_S)
                for _ in range(3):
                    wait_until(lambda: told("diptych_picker_router_requests", idle) == 0, LIMIT_S)
                    assert client.post("/v1/completions", json=body).headers["x-request-id"][4:12] != tag
                os.kill(idle.pid, signal.SIGKILL)
                wait_until(lambda: told("diptych_picker_router_ready", idle) == 0, LIMIT_S)
                for _ in range(3):
                    assert client.post("/v1/completions", json=body).headers["x-request-id"][4:12] == tag
                os.kill(busy.pid, signal.SIGKILL)
            wait_until(lambda: told("diptych_picker_router_ready", busy) == 0, LIMIT_S)
            assert client.post("/v1/completions", json=body).status_code == 503
