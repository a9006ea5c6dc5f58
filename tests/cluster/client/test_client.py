"""The Python client against a real server."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import diptych
from diptych import AsyncClient, Client
from diptych.cluster.common.config import TlsConfig
from diptych.workers.common.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestAborted,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from diptych.workers.common.request import Grammar, GrammarKind, RequestLevel

from ...support.front import CONTEXT, TIMINGS, Echo, Served, served

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.fixture
def client(server: Served) -> Generator[Client]:
    with Client(server.address) as it:
        yield it


def test_generate(client: Client, server: Served) -> None:
    server.source.num_stored = 1
    got = client.generate("h€", logprobs=1, seed=3)
    assert (got.text, got.token_ids, got.finish_reason, got.stop_string) == (
        "h€",
        (104, 226, 130, 172, 256),
        "stop",
        None,
    )
    used = {"prompt_tokens": 4, "completion_tokens": 5, "cached_tokens": 3, "stored_tokens": 1}
    assert {field.name: value for field, value in got.usage.ListFields()} == used
    assert [entry.token_id for entry in got.logprobs] == list(got.token_ids)
    assert got.request_id.startswith("gen-")
    assert got.timings == replace(TIMINGS, total_s=5).to_proto(0)
    assert client.generate([104, 105], max_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("prediction", ["hé", list("hé".encode())])
def test_wishes_for_drafts_arrive(client: Client, server: Served, prediction: str | list[int]) -> None:
    client.generate("abc", prediction=prediction)
    client.chat(USER, prediction=prediction, speculation=False)
    client.generate("abc", speculation=True)
    expected = tuple("hé".encode())
    found = [(r.prediction, r.speculates) for r in server.source.requests]
    assert found == [(expected, True), (expected, False), ((), True)]


def test_an_answer_with_a_key_comes_again(client: Client, server: Served) -> None:
    for key in ({"idempotency_key": "a"}, {"idempotency_key": "a"}, {"idempotency_key": "b"}, {}):
        client.generate("abc", max_tokens=2, **key)
    seeds = [r.sampling.seed for r in server.source.requests]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3


def test_wishes_for_sparse_attention_arrive(client: Client, server: Served) -> None:
    for asked in ({}, {"sparse_attention": True}, {"sparse_attention": False}):
        client.generate("abc", **asked)
    assert [r.sparse_attention for r in server.source.requests] == [None, True, False]


def test_options_arrive(client: Client, server: Served) -> None:
    got = client.generate(
        "abc",
        temperature=0,
        max_tokens=9,
        stop="bc",
        logit_bias={5: 1.5},
        stop_token_ids=[7],
        timeout_s=9,
        model="echo",
        cache_salt="Ann",
        service_tier="auto",
        ttft_s=0.5,
        admission="refuse",
    )
    assert (got.text, got.stop_string) == ("a", "bc")
    (request,) = server.source.requests
    assert request.sampling.is_greedy and request.sampling.max_tokens == 9 and request.timeout_s == 9
    assert (request.sampling.logit_bias, request.sampling.stop_token_ids) == ({5: 1.5}, (7,))
    assert request.cache_salt == b"Ann"
    assert request.level == RequestLevel(0.5, refuse=True, model="echo")
    assert got.service_tier == "default"


def test_grammars_arrive(client: Client, server: Served) -> None:
    schema = {"type": "object", "properties": {}}
    asked: list[tuple[dict[str, Any], GrammarKind, str]] = [
        ({"json_schema": schema}, GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        ({"json_schema": json.dumps(schema)}, GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"choice": ["a", "b"]}, GrammarKind.CHOICE, '["a", "b"]'),
        ({"grammar": 'start: "a"'}, GrammarKind.GRAMMAR, 'start: "a"'),
    ]
    for option, kind, text in asked:
        client.generate("x", **option)
        assert server.source.requests[-1].sampling.grammar == Grammar(kind, text)
    with pytest.raises(InvalidRequest, match="leave one out"):
        client.generate("x", regex="a", choice=["a"])


def test_stream(client: Client) -> None:
    stream = client.stream("h€!", stop=["zz", "!"])
    assert list(stream) == ["h", "€"]
    assert stream.completion.stop_string == "!"
    with pytest.raises(InvalidRequest, match="no completion yet"):
        _ = client.stream("abc").completion


def test_chat(client: Client) -> None:
    assert client.chat(USER).text == "hi"
    assert list(client.chat_stream(USER)) == ["h", "i"]


def test_model(client: Client) -> None:
    model = client.model()
    assert (model.name, model.max_context_tokens, model.version) == ("echo", CONTEXT, diptych.__version__)


def test_leaving_a_stream_cancels_it(client: Client, server: Served) -> None:
    source = server.source
    source.laps = None
    source.gate_after = 2
    source.gate.clear()
    with client.stream("abc") as stream:
        assert next(stream) == "a"
    assert source.all_closed.wait(60)
    assert list(stream) == []


def test_errors_are_the_servers(client: Client, server: Served) -> None:
    with pytest.raises(PromptTooLong, match="reduce the length") as caught:
        client.generate("x" * CONTEXT)
    assert caught.value.param == "prompt" and "request id: gen-" in caught.value.message
    with pytest.raises(UnknownModel):
        client.generate("x", model="gpt")
    with pytest.raises(InvalidRequest, match="messages is empty"):
        client.chat([])
    server.source.fail = lambda made: WorkerLost("gone") if made == 1 else None
    stream = client.stream("xy")
    assert next(stream) == "x"
    with pytest.raises(WorkerLost):
        next(stream)
    server.source.admit_error = Overloaded("full", retry_after_s=7)
    with pytest.raises(Overloaded) as overloaded:
        client.generate("x")
    assert overloaded.value.retry_after_s == 7
    server.source.model_error = Unavailable("no worker yet")
    with pytest.raises(Unavailable, match="no worker yet"):
        client.model()


def test_what_cannot_be_sent_is_an_invalid_request(client: Client) -> None:
    for name, bad in {"max_tokens": -1, "temperature": "hot"}.items():
        with pytest.raises(InvalidRequest, match=f"^{name} cannot be sent") as caught:
            client.generate("x", **{name: bad})
        assert caught.value.param == name
    for prompt in ("\ud800", [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            client.generate(prompt) if isinstance(prompt, str) else client.chat(prompt)


@pytest.mark.parametrize(
    ("method", "given", "options", "message"),
    [
        ("chat", "hello", {}, "messages must be a list"),
        ("chat", {"role": "user", "content": "a"}, {}, "messages must be a list"),
        ("chat", ["hello"], {}, r"messages\[0\] must be a mapping whose role and content are texts, got hello"),
        ("chat", [{"role": "user"}], {}, r"messages\[0\] must be a mapping"),
        ("chat", [*USER, {"role": "assistant", "content": None}], {}, r"messages\[1\] must be a mapping"),
        ("chat", [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {}, r"content are texts, got"),
        ("generate", ["a", "b"], {}, "prompt must be a text or a list of token ids"),
        ("generate", b"abc", {}, "prompt must be a text or a list of token ids: got bytes"),
        ("generate", [1 << 40], {}, "prompt must be a text or a list of token ids"),
        ("generate", "x", {"max_token": 5}, "no option 'max_token': did you mean max_tokens?"),
        ("generate", "x", {"frobnicate": 1}, "no option 'frobnicate': the options are add_generation_prompt, "),
        ("generate", "x", {"admission": "now"}, "admission must be wait or refuse, got 'now'"),
        ("embed", "hello", {}, r"inputs must be a list, also for one text: write embed\(\[text\]\)"),
        ("embed", [1, 2], {}, r"inputs\[0\] must be a text or a list of token ids"),
        ("embed", ["a"], {"dimension": 2}, "did you mean dimensions?"),
    ],
)
def test_what_is_wrong_is_named(
    client: Client, server: Served, method: str, given: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        getattr(client, method)(given, **options)
    assert not server.source.requests


def test_an_option_that_is_none_is_not_given(client: Client, server: Served) -> None:
    client.generate("abc", seed=None, stop=None, prediction=None, idempotency_key=None, speculation=None, regex=None)
    (request,) = server.source.requests
    assert request.speculates and request.sampling.grammar is None and not request.prediction


def test_deadlines(client: Client, server: Served) -> None:
    server.source.gate.clear()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        client.generate("x", timeout_s=0.05)
    assert server.source.all_closed.wait(60)


def test_nobody_there() -> None:
    with served(Echo()) as server:
        address = server.address
    with Client(address) as client, pytest.raises(Unavailable, match="Is it running at that address"):
        client.generate("x")


def test_keys() -> None:
    with served(Echo(laps=1), api_key="sesame") as server:
        with Client(server.address, api_key="wrong") as client, pytest.raises(Unauthenticated, match="API key"):
            client.generate("x")
        with Client(server.address, api_key="sesame") as client:
            assert client.generate("x").text == "x"
        with Client(server.address, api_key="sesame\n") as client:
            assert client.generate("x").text == "x", "a file ends with a line's end"
        with pytest.raises(ConfigError, match="printable ASCII") as caught:
            Client(server.address, api_key="schl\u00fcssel")
        assert "schl" not in caught.value.message, "a key is not for a terminal"


def test_the_address_of_the_http_api_is_told_from_that_of_grpc() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="without a scheme"):
            kind("http://127.0.0.1:8000")
        for address in ("127.0.0.1", ""):
            with pytest.raises(ConfigError, match="has no port"):
                kind(address)
    wrong = pytest.raises(Unavailable, match="the address is one of HTTP: give that of gRPC")
    with served(Echo()) as server, Client(f"127.0.0.1:{server.http_port}") as client, wrong:
        client.generate("x")


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), None])
def test_a_time_out_that_is_no_time_is_named(client: Client, server: Served, timeout_s: Any) -> None:
    """grpc takes most of them for one that is over, and says that the deadline was exceeded."""
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest, match="timeout_s must be a number of seconds above 0"):
            kind(server.address, timeout_s=timeout_s)
    if timeout_s is not None:
        with pytest.raises(InvalidRequest, match="timeout_s must be a number of seconds above 0"):
            client.generate("x", timeout_s=timeout_s)


def test_a_deadline_that_no_server_tells_of_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cluster.client.client.TIMEOUT_MARGIN_S", 0.0)
    late = pytest.raises(DeadlineExceeded, match=r"no answer came in time .*: raise timeout_s")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Client(address, timeout_s=0.01) as client, late:
            client.generate("x")


def test_an_asynchronous_client_may_be_made_before_its_loop_and_serve_several(server: Served) -> None:
    client = AsyncClient(server.address)
    for _ in range(2):
        assert asyncio.run(client.generate("hi")).text == "hi"
    asyncio.run(client.close())
    with pytest.raises(InvalidRequest, match="the client is closed"):
        asyncio.run(client.generate("hi"))


async def test_a_closed_client_says_so(server: Served) -> None:
    with Client(server.address) as client:
        pass
    async with AsyncClient(server.address) as other:
        pass
    for call in (client.generate, client.chat, client.embed, other.generate):
        with pytest.raises(InvalidRequest, match="the client is closed"):
            found = call(USER if call == client.chat else ["x"] if call == client.embed else "x")
            if asyncio.iscoroutine(found):
                await found
    with pytest.raises(InvalidRequest, match="the client is closed"):
        client.model()


@pytest.mark.parametrize("what", ["stream", "client"])
async def test_a_stream_that_another_task_closes_ends_with_an_error(server: Served, what: str) -> None:
    """And not as if the task that reads it had been cancelled, which a TaskGroup would pass over in silence."""
    server.source.gate_after = 1
    server.source.gate.clear()
    client = AsyncClient(server.address)
    stream = client.stream("abc")
    assert await anext(stream) == "a"
    reading = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)  # it waits now
    if what == "stream":
        stream.close()
    else:
        await client.close()
    with pytest.raises(RequestAborted, match="closed while it was read"):
        await reading
    await client.close()


async def test_a_task_that_is_cancelled_stays_so(server: Served) -> None:
    server.source.gate.clear()
    async with AsyncClient(server.address) as client:
        reading = asyncio.create_task(client.generate("abc"))
        assert await asyncio.to_thread(server.source.all_started(1).wait, 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(server.source.all_closed.wait, 10)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*make, *names, "-keyout", key, "-out", cert, "-days", "2"], check=True, capture_output=True)
    with served(Echo(laps=1), tls=TlsConfig(cert=str(cert), key=str(key))) as server:
        with Client(f"localhost:{server.grpc_port}", tls=cert.read_bytes()) as client:
            assert client.generate("hi").text == "hi"
        with Client(f"localhost:{server.grpc_port}") as plain, pytest.raises(Unavailable):
            plain.generate("hi")
        url = f"https://localhost:{server.http_port}/v1/completions"
        trust = ssl.create_default_context(cafile=cert)
        assert httpx.post(url, json={"prompt": "hi"}, verify=trust).json()["choices"][0]["text"] == "hi"


async def test_the_asynchronous_client(server: Served) -> None:
    source = server.source
    async with AsyncClient(server.address) as client:
        assert (await client.generate("hé")).text == "hé"
        assert (await client.chat(USER)).usage.completion_tokens == 3
        assert (await client.model()).name == "echo"
        stream = client.chat_stream(USER)
        assert [text async for text in stream] == ["h", "i"]
        assert stream.completion.text == "hi"
        with pytest.raises(PromptTooLong):
            await client.generate("x" * CONTEXT)
        texts = await asyncio.gather(*(client.generate(f"text {i}") for i in range(50)))
        assert [t.text for t in texts] == [f"text {i}" for i in range(50)]
        source.laps = None
        source.gate_after = 2
        source.gate.clear()
        async with client.stream("abc") as left:
            assert await anext(left) == "a"
        assert await asyncio.to_thread(source.all_closed.wait, 10)
        assert [text async for text in left] == []


def test_the_client_imports_neither_the_server_nor_torch() -> None:
    code = (
        "import sys; from diptych import Client, AsyncClient; "
        "print(*{m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'ray', 'transformers', 'tokenizers', 'starlette', 'pydantic', 'jinja2', 'numpy'})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
