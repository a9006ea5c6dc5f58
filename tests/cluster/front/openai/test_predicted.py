"""What a chat's answer is expected to be like, and whether drafts are wanted: from the body to the requests, and what
the answer says of the drafts."""

import json
from collections.abc import Generator
from typing import Any

import httpx
import openai
import pytest

from diptych.cluster.common.worker_stats import Drafts
from diptych.cluster.front.http.calls import MAX_INLINE_BYTES
from diptych.cluster.front.openai.types import ChatBody, CompletionBody, parse
from diptych.cluster.tokens.prompt_encoder import MAX_INLINE_CHARS
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import MAX_PREDICTION_TOKENS

from ....support.front import CONTEXT, Echo, Served, served

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=({"prompt": "abc"} if path == COMPLETIONS else CHAT) | body, timeout=60)


def predicting(content: object, **others: object) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content} | others}


def usages(response: httpx.Response) -> list[Any]:
    """The usage of each chunk that has one."""
    chunks = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n")[:-2]]
    return [chunk["usage"] for chunk in chunks if chunk.get("usage")]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("é b", "é b"),
        ([{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}], "a\nb"),
        ("", ""),
        ([], ""),
    ],
)
def test_a_prediction_is_tokenised_once_for_all_choices(server: Served, content: object, text: str) -> None:
    assert post(server, CHATS, n=2, **predicting(content)).status_code == 200
    assert [r.prediction for r in server.source.requests] == [tuple(text.encode())] * 2
    assert all(r.speculates for r in server.source.requests)


def test_the_official_client_sends_one(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "hi"}],
            prediction={"type": "content", "content": "hi there"},
            extra_body={"speculation": False},
        )
    assert answer.choices[0].message.content == "hi"
    (request,) = server.source.requests
    assert (request.prediction, request.speculates) == (tuple(b"hi there"), False)


@pytest.mark.parametrize("size", [MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1, MAX_PREDICTION_TOKENS])
def test_long_predictions_reach_the_request_whole(server: Served, size: int) -> None:
    """Encoded in the router, in another process, and there together with the rest of a large body."""
    text = "0123456789"[:7] * (size // 7) + "x" * (size % 7)
    answer = post(server, CHATS, max_tokens=2, stop="never", **predicting(text))
    assert answer.status_code == 200 and len(json.dumps(text)) <= MAX_INLINE_BYTES + 2
    (request,) = server.source.requests
    assert request.prediction == tuple(text.encode()) and len(request.prompt_token_ids) < CONTEXT
    assert request.sampling.max_tokens == 2


def test_a_large_body_without_a_prediction_has_none(server: Served) -> None:
    assert post(server, CHATS, metadata={"a": "b" * MAX_INLINE_BYTES}).status_code == 200
    (request,) = server.source.requests
    assert request.prediction == ()
    empty = post(server, CHATS, metadata={"a": "b" * MAX_INLINE_BYTES}, **predicting(""))
    assert empty.status_code == 200 and server.source.requests[1].prediction == ()


@pytest.mark.parametrize("size", [MAX_PREDICTION_TOKENS + 1, 20 * MAX_PREDICTION_TOKENS])
def test_a_prediction_that_is_too_long_is_refused_by_name(server: Served, size: int) -> None:
    answer = post(server, CHATS, **predicting("x" * size))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prediction")
    assert "at most 65536" in error["message"] and not server.source.requests


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "other", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text", "text": 1}]}, "prediction.content[0].text"),
    ],
)
def test_what_is_no_prediction_is_refused_by_name(prediction: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatBody, json.dumps(CHAT | {"prediction": prediction}).encode()).call()
    assert refused.value.param == param


def test_unknown_fields_of_a_prediction_are_named(server: Served) -> None:
    answer = post(server, CHATS, **predicting([{"type": "text", "text": "a", "shade": 1}], colour="red"))
    assert answer.headers["x-diptych-ignored"] == "prediction.colour, prediction.content[].shade"


def test_completions_have_no_prediction(server: Served) -> None:
    answer = post(server, COMPLETIONS, **predicting("a"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize("value", [None, True, False])
def test_a_call_may_ask_for_no_drafts(server: Served, path: str, value: bool | None) -> None:
    given = {"speculation": value}
    assert post(server, path, **given).status_code == 200
    large = post(server, path, metadata={"a": "b" * MAX_INLINE_BYTES}, **given)
    assert large.status_code == 200
    assert [r.speculates for r in server.source.requests] == [value is not False] * 2


@pytest.mark.parametrize("value", ["no", 0, {"method": "ngram"}])
def test_other_values_of_speculation_are_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(CompletionBody, json.dumps({"prompt": "a", "speculation": value}).encode()).call()
    assert refused.value.param == "speculation"


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_usage_counts_accepted_and_rejected_drafts_of_all_choices(server: Served, path: str) -> None:
    none = {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert post(server, path).json()["usage"]["completion_tokens_details"] == none
    server.source.drafts_a_token = Drafts(5, 2)
    plain = post(server, path, n=2).json()["usage"]
    num = plain["completion_tokens"]
    expected = {"reasoning_tokens": 0, "accepted_prediction_tokens": 2 * num, "rejected_prediction_tokens": 3 * num}
    assert num >= 6 and plain["completion_tokens_details"] == expected
    (streamed,) = usages(post(server, path, n=2, **USAGE))
    assert streamed == plain


def test_an_answer_that_a_stop_string_ends_has_the_drafts_until_then(server: Served) -> None:
    server.source.drafts_a_token = Drafts(5, 2)
    answer = post(server, COMPLETIONS, prompt="abcdef", stop="cd", timings=True).json()
    assert answer["usage"]["completion_tokens"] == 4
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 8, "rejected_prediction_tokens": 12}
    (timings,) = answer["timings"]
    assert (timings["num_drafted"], timings["num_accepted"]) == (20, 8)


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize("value", [None, True, False])
def test_a_call_may_ask_for_sparse_attention_or_for_none(server: Served, path: str, value: bool | None) -> None:
    given = {"sparse_attention": value}
    small, large = post(server, path, **given), post(server, path, metadata={"a": "b" * MAX_INLINE_BYTES}, **given)
    assert [answer.status_code for answer in (small, large)] == [200, 200]
    assert "x-diptych-ignored" not in small.headers
    assert [r.sparse_attention for r in server.source.requests] == [value] * 2


@pytest.mark.parametrize("value", ["quest", 1, {"method": "quest"}])
def test_other_values_of_sparse_attention_are_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(CompletionBody, json.dumps({"prompt": "a", "sparse_attention": value}).encode()).call()
    assert refused.value.param == "sparse_attention"
