"""/v1/embeddings on a real socket, with the official client."""

import base64
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from diptych.cluster.front.http.calls import MAX_INLINE_BYTES
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.front.limits import RequestLimits
from diptych.workers.common.errors import StepFailed
from diptych.workers.core.embedding import EmbeddingSpec

from ....support.front import CONTEXT, Echo, Served, echo_embedding, served
from ..access.test_limits import ALICE, BOB, SINGLE, ring

SMALL = RequestLimits(max_inputs=90, max_answer_floats=300, max_sequences=8)


@pytest.fixture(scope="module")
def server() -> Generator[Served]:
    with served(Echo(), limits=SMALL) as it:
        yield it


@pytest.fixture
def client(server: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


def post(server: Served, body: object, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers, timeout=60)


def of_text(text: str) -> np.ndarray:
    return echo_embedding(list(text.encode()))


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("héllo", [list("héllo".encode())]),
        (["one", "three"], [list(b"one"), list(b"three")]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
@pytest.mark.parametrize("encoding", ["base64", "float"])
def test_every_form_of_input(client: openai.OpenAI, given: Any, ids: Sequence[Sequence[int]], encoding: Any) -> None:
    answer = client.embeddings.create(model="echo", input=given, encoding_format=encoding, user="me")
    assert (answer.object, answer.model) == ("list", "echo")
    assert [each.index for each in answer.data] == list(range(len(ids)))
    for each, own in zip(answer.data, ids, strict=True):
        found: Any = each.embedding
        if encoding == "base64":
            found = np.frombuffer(base64.b64decode(found), dtype="<f4")
        np.testing.assert_array_equal(np.array(found, dtype=np.float32), echo_embedding(own))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (sum(map(len, ids)),) * 2


def test_the_client_reads_what_it_asks_for_by_default(client: openai.OpenAI) -> None:
    """Its default is base64, which it decodes; ours, without the field, is numbers."""
    [found] = client.embeddings.create(model="echo", input="abc").data
    np.testing.assert_array_equal(np.array(found.embedding, dtype=np.float32), of_text("abc"))


def test_without_the_field_numbers_come(server: Served) -> None:
    answer = post(server, {"input": "abc"}).json()
    np.testing.assert_array_equal(np.array(answer["data"][0]["embedding"], dtype=np.float32), of_text("abc"))
    details = {"cached_tokens": 3, "cache_write_tokens": 0}
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": details}


def test_dimensions_cut_and_normalise(client: openai.OpenAI) -> None:
    [found] = client.embeddings.create(model="echo", input="abc", dimensions=2).data
    first = of_text("abc")[:2]
    np.testing.assert_allclose(found.embedding, first / np.linalg.norm(first), atol=1e-6)


def test_many_inputs_come_in_their_order_a_few_at_a_time(server: Served, client: openai.OpenAI) -> None:
    texts = [chr(ord("a") + i % 26) * (1 + i % 40) for i in range(70)]
    server.loop.call_soon_threadsafe(server.source.gate.clear)
    before = len(server.source.requests)
    started = server.source.all_started(before + SMALL.max_sequences)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(client.embeddings.create(model="echo", input=texts)))
    asking.start()
    assert started.wait(60)
    assert len(server.source.requests) == before + SMALL.max_sequences, "the others wait"
    server.open_gate()
    asking.join(30)
    [answer] = answers
    for each, text in zip(answer.data, texts, strict=True):
        np.testing.assert_array_equal(np.array(each.embedding, dtype=np.float32), of_text(text))
    assert len({request.request_id for request in server.source.requests[before:]}) == 70


def test_a_large_body_is_read_by_another_process(server: Served, client: openai.OpenAI) -> None:
    """An input may fill the context: no token is made after it."""
    ids = [[1 + (i + j) % 250 for j in range(CONTEXT)] for i in range(60)]
    assert len(str(ids)) > MAX_INLINE_BYTES
    answer = client.embeddings.create(model="echo", input=ids)
    for each, own in zip(answer.data, ids, strict=True):
        np.testing.assert_array_equal(np.array(each.embedding, dtype=np.float32), echo_embedding(own))
    too_long = post(server, {"input": [*ids, [1] * (CONTEXT + 1)]})
    assert too_long.status_code == 400 and f"the input has {CONTEXT + 1} tokens" in too_long.text
    assert too_long.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({}, "input", "input is missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": {"text": "a"}}, "input", "input must be a string, an array of strings"),
        ({"input": ["a", 1]}, "input", "input must be a string"),
        ({"input": [999]}, "input", "out of vocabulary"),
        ({"input": "a" * (CONTEXT + 1)}, "input", f"the input has {CONTEXT + 1} tokens"),
        ({"input": ["a"] * 91}, "input", "91 inputs; a call has at most 90"),
        ({"input": ["a"] * 76}, "input", "have 304 numbers; a call may have at most 300"),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions must be in"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be in"),
        ({"input": "a", "dimensions": "2"}, "dimensions", "integer"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format", "float"),
        ({"input": "a", "timeout_s": -1}, "timeout_s", "timeout_s must be in"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        ({"input": "a", "service_tier": "flex"}, "service_tier", "service_tier"),
    ],
)
def test_bad_input_is_told_by_name(server: Served, body: dict[str, Any], param: str, why: str) -> None:
    answer = post(server, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and why in error["message"]


def test_other_models_and_fields(server: Served) -> None:
    answer = post(server, {"input": "a", "model": "gpt-4"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = post(server, {"input": "a", "inptu": 1, "priority": 0})
    assert (answer.status_code, answer.headers["x-diptych-ignored"]) == (200, "inptu")


def test_a_model_that_has_none_refuses_by_name() -> None:
    source = Echo()
    source.embedding = EmbeddingSpec(4, refusal="it pools by the first token")
    with served(source) as server:
        error = post(server, {"input": "a"}).json()["error"]
        assert error["code"] == "embeddings_not_served" and "it pools by the first token" in error["message"]
        source.embedding = None
        assert post(server, {"input": "a"}).json()["error"]["code"] == "embeddings_not_served"
        source.embedding = EmbeddingSpec(4)
        error = post(server, {"input": "a", "dimensions": 2}).json()["error"]
        assert "does not say that its embeddings may be cut" in error["message"]
        assert post(server, {"input": "a", "dimensions": 4}).status_code == 200


def test_one_that_fails_ends_the_call_and_aborts_the_others() -> None:
    source = Echo()
    source.fail = lambda num: StepFailed("a step failed") if num == 3 else None
    with served(source) as server:
        answer = post(server, {"input": ["a", "bb", "ccc", "dddd"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "step_failed")
        assert source.all_closed.wait(60)


def test_a_client_that_leaves_aborts_them() -> None:
    source = Echo()
    with served(source) as server:
        server.loop.call_soon_threadsafe(source.gate.clear)
        started = source.all_started(2)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a", "b"]}, timeout=httpx.Timeout(30, read=0.5))
        assert started.wait(60) and source.all_closed.wait(60)
        assert len(source.closed) == 2


def test_a_deadline_ends_the_call() -> None:
    source = Echo()
    with served(source) as server:
        server.loop.call_soon_threadsafe(source.gate.clear)
        answer = post(server, {"input": ["a", "b"], "timeout_s": 0.2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "within 0.2 s" in answer.text and len(source.closed) == 2


def test_numbers_of_all_calls_are_bounded() -> None:
    source = Echo()
    with served(source, limits=RequestLimits(max_gathered_floats=7)) as server:
        refused = post(server, {"input": ["a", "b"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert post(server, {"input": ["a"]}).status_code == 200


def test_inputs_count_for_their_key(tmp_path: Path) -> None:
    source, keys = Echo(), ring(tmp_path, "tokens_per_minute: 8")
    with served(source, access=AccessPolicy(keys)) as server:
        assert post(server, {"input": "abc"}).status_code == 401
        alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
        assert post(server, {"input": ["abc", "de"]}, **alice).status_code == 200
        assert [(request.tenant, len(request.cache_salt)) for request in source.requests] == [(b"alice", 32)] * 2
        refused = post(server, {"input": ["abc", "de"]}, **alice)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert post(server, {"input": ["abc", "de"]}, **bob).status_code == 200
        assert source.requests[-1].cache_salt != source.requests[0].cache_salt
        metrics = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {SINGLE}"}).text
        assert 'diptych_http_responses_total{route="/v1/embeddings",status="200"} 2.0' in metrics
        assert 'diptych_api_key_prompt_tokens_total{key="alice"} 5.0' in metrics
