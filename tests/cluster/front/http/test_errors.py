"""HTTP errors, keys and clients that leave, on a real socket."""

import json
import socket
from collections.abc import Generator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.cluster.front.http.calls import MAX_INLINE_BYTES
from diptych.cluster.front.limits import RequestLimits
from diptych.workers.common.errors import DeadlineExceeded, DiptychError, Overloaded, Unavailable, WorkerLost

from ....support.front import CONTEXT, Echo, Served, served


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.fixture
def client(server: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


def post(server: Served, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"] in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("num_chars", [1, MAX_INLINE_BYTES])  # read in another process
@pytest.mark.parametrize("num_tokens", [0, CONTEXT])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_error_names_the_field_that_the_chat_has(server: Served, name: str, num_tokens: int, num_chars: int) -> None:
    messages = [{"role": "user", "content": "x", "name": "n" * num_chars}]
    found = error(post(server, "/v1/chat/completions", messages=messages, **{name: num_tokens}))
    assert found["param"] == name
    assert "max_completion_tokens" not in found["message"] or name == "max_completion_tokens"


def test_the_newer_name_is_in_errors_of_log_probabilities_too() -> None:
    limits = RequestLimits(max_answer_logprobs=100)
    messages = [{"role": "user", "content": "x"}]
    with served(Echo(laps=1), limits=limits) as server:
        asked = {"messages": messages, "logprobs": True, "top_logprobs": 9, "max_completion_tokens": 11}
        assert error(post(server, "/v1/chat/completions", **asked))["param"] == "max_completion_tokens"


def test_a_chat_that_is_too_long_is_refused_by_its_messages(server: Served) -> None:
    long = [{"role": "user", "content": "x" * CONTEXT}]
    for stream in (False, True):
        refused = error(post(server, "/v1/chat/completions", messages=long, stream=stream))
        assert (refused["param"], refused["code"]) == ("messages", "context_length_exceeded")


def test_no_such_route(server: Served) -> None:
    missing = httpx.get(f"{server.url}/v1/audio/speech")
    assert missing.status_code == 404 and "GET /v1/audio/speech" in error(missing)["message"]
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert error(wrong)["type"] == "invalid_request_error"
    assert httpx.post(f"{server.url}/v1/completions/", json={}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/conversations", "/v1/batches", "/v1/messages/batches"])
def test_calls_of_official_clients_that_are_not_served_say_what_to_do(server: Served, path: str) -> None:
    refused = httpx.post(f"{server.url}{path}", json={})
    assert refused.status_code == 404
    found = refused.json()["error"]
    assert found["message"].startswith(f"POST {path} is not served: ")
    assert found.get("code", "not_served") == "not_served"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": ""}, "prompt", None),
        ({"prompt": "x" * CONTEXT}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "x", "n": 10_000}, "n", None),
        ({"prompt": "x", "temperature": -1}, "temperature", None),
        ({"prompt": "x", "suffix": "y"}, "suffix", None),
        ({"prompt": "x", "logprobs": 21}, "logprobs", None),
        ({"prompt": [300]}, "prompt", None),
        ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(server: Served, body: dict[str, Any], param: str, code: str | None, stream: bool) -> None:
    response = post(server, **body, stream=stream)
    assert response.status_code == 400
    got = error(response)
    assert (got["type"], got["param"], got["code"]) == ("invalid_request_error", param, code)
    assert server.source.requests == []
    assert post(server, prompt="still serving").json()["choices"][0]["text"] == "still serving"


def test_not_a_number(server: Served) -> None:
    headers = {"content-type": "application/json"}
    for text in ('{"prompt": "x", "temperature": NaN}', '{"prompt": "x", "top_p": Infinity}'):
        response = httpx.post(f"{server.url}/v1/completions", content=text, headers=headers)
        assert response.status_code == 400 and "finite" in error(response)["message"]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.request_id is not None


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_wrong_content_type(server: Served, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 400 and "application/json" in error(response)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large(chunked: bool) -> None:
    with served(Echo(), limits=RequestLimits(max_body_bytes=1000)) as server:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        content = (body[i : i + 100] for i in range(0, len(body), 100)) if chunked else body
        headers = {"content-type": "application/json; charset=utf-8"}
        response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert response.status_code == 413 and "larger than 1000 bytes" in error(response)["message"]
        assert post(server, prompt="x").status_code == 200


@pytest.mark.parametrize(
    ("raised", "status", "kind", "code"),
    [
        (Overloaded("full", retry_after_s=2.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("no worker"), 503, "server_error", "service_unavailable"),
        (WorkerLost("gone"), 503, "server_error", "worker_lost"),
        (DeadlineExceeded("late"), 504, "server_error", "deadline_exceeded"),
        (DiptychError("odd"), 500, "server_error", "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status(
    server: Served, raised: DiptychError, status: int, kind: str, code: str, stream: bool
) -> None:
    server.source.fail = lambda _: raised
    response = post(server, prompt="x", stream=stream)
    assert response.status_code == status
    got = error(response)
    assert (got["type"], got["code"]) == (kind, code) and got["message"].startswith(raised.message)


def test_overload_says_when_to_come_back(server: Served, client: openai.OpenAI) -> None:
    server.source.admit_error = Overloaded("full: come back later", retry_after_s=2.5)
    with pytest.raises(openai.RateLimitError, match="come back later") as caught:
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.response.headers["retry-after"] == "3"
    assert server.source.requests == []


def test_no_model_yet(server: Served) -> None:
    server.source.model_error = Unavailable("no worker is known yet: wait")
    assert httpx.get(f"{server.url}/v1/models").status_code == 503
    assert post(server, prompt="x").status_code == 503


def test_an_error_in_mid_stream_is_an_event(server: Served, client: openai.OpenAI) -> None:
    server.source.fail = lambda made: WorkerLost("the worker is gone") if made == 2 else None
    response = post(server, prompt="abcd", stream=True)
    assert response.status_code == 200
    *texts, last = [json.loads(e.removeprefix("data: ")) for e in response.text.strip().split("\n\n")]
    assert [t["choices"][0]["text"] for t in texts] == ["a", "b"]
    assert last["error"]["code"] == "worker_lost"
    assert response.headers["x-request-id"] in last["error"]["message"]
    with pytest.raises(openai.APIError, match="the worker is gone"):
        list(client.completions.create(model="echo", prompt="abcd", stream=True))


def test_a_bug_is_a_500_that_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: int) -> DiptychError | None:
        raise ZeroDivisionError("secret")

    source = Echo()
    source.fail = fail
    with served(source) as server:
        response = post(server, prompt="x")
    assert response.status_code == 500
    assert error(response)["code"] == "internal_error" and "secret" not in response.text
    assert "ZeroDivisionError" in caplog.text


def test_a_request_that_takes_too_long(server: Served) -> None:
    server.source.gate.clear()
    response = post(server, prompt="x", timeout_s=0.05)
    assert response.status_code == 504 and "0.05 s" in error(response)["message"]
    assert server.source.all_closed.wait(60)


def test_keys() -> None:
    with served(Echo(laps=1), api_key="sésame") as server:

        def status(path: str, header: str | None) -> int:
            headers = {} if header is None else {"authorization": header.encode()}
            return httpx.get(server.url + path, headers=headers).status_code

        for header in (None, "Bearer", "Bearer wrong", "sésame", "Basic sésame", "Bearer sésame2"):
            assert status("/v1/models", header) == 401
            assert status("/metrics", header) == 401
            assert status("/nowhere", header) == 401
        assert status("/v1/models", "Bearer sésame") == status("/metrics", "bearer sésame") == 200
        assert status("/health", None) == status("/version", None) == 200
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert error(refused)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"


def test_keys_with_the_official_client() -> None:
    with (
        served(Echo(laps=1), api_key="sesame") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="sesame").models.list().data


def connect(server: Served, body: dict[str, Any]) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.http_port), timeout=10)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    sock.sendall(head.encode() + b"\r\n\r\n" + content)
    return sock


@pytest.mark.parametrize(
    ("stream", "after", "user"),
    [(True, 0, ""), (False, 0, ""), (True, 2, ""), (False, 2, ""), (False, 0, "x" * 300_000)],
)
def test_a_client_that_leaves_aborts_its_request(server: Served, stream: bool, after: int, user: str) -> None:
    """While nothing is being sent: before the first token (after = 0), and between two. `user`: makes the body so large
    that reading is paused meanwhile."""
    source = server.source
    source.laps = None
    source.gate_after = after
    source.gate.clear()
    with connect(server, {"prompt": "abc", "max_tokens": 400, "n": 2, "stream": stream, "user": user}) as sock:
        if stream and after:
            received = b""
            while received.count(b'"text":') < 4:
                received += sock.recv(65536)
        else:
            assert source.all_started(2).wait(60)
        assert source.closed == []
    assert source.all_closed.wait(60)
    assert len(source.closed) == 2
    assert source.num_delivered <= 2 * (after + 1)


def test_tokens_are_sent_as_they_come(server: Served) -> None:
    """The first is on the wire while the second is not made yet."""
    server.source.gate_after = 1
    server.source.gate.clear()
    with connect(server, {"prompt": "abc", "stream": True}) as sock:
        received = b""
        while b"\n\n" not in received.partition(b"\r\n\r\n")[2]:
            received += sock.recv(65536)
        assert b'"text":"a"' in received and b'"text":"b"' not in received
        server.open_gate()
        while b"[DONE]" not in received:
            received += sock.recv(65536)
    assert b'"text":"b"' in received


def test_stopping_ends_what_still_runs() -> None:
    source = Echo()
    source.gate.clear()
    with served(source) as server:
        sock = connect(server, {"prompt": "abc", "stream": True})
        assert source.all_started(1).wait(60)
    assert source.all_closed.is_set()
    sock.close()


def corrupted(body: bytes) -> st.SearchStrategy[bytes]:
    def change(where: int, what: bytes, cut: int) -> bytes:
        return body[: where % len(body)] + what + body[where % len(body) + cut :]

    return st.builds(change, st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 8))


VALID = json.dumps(
    {
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "x",
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["a"],
        "logit_bias": {"5": 1},
    }
).encode()


def test_any_body_gets_an_answer_or_an_error_object(server: Served) -> None:
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}, timeout=60) as http:

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(
            body=st.binary(max_size=60) | corrupted(VALID), path=st.sampled_from(["completions", "chat/completions"])
        )
        def check(body: bytes, path: str) -> None:
            response = http.post(f"/v1/{path}", content=body)
            if response.status_code != 200:
                assert response.status_code in (400, 404)
                assert error(response)["message"]

        check()
        assert http.get("/health").status_code == 200
