"""The HTTP API on a real socket, with the official client."""

import asyncio
import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from diptych import __version__
from diptych.cluster.common.timings import server_timing
from diptych.cluster.front.choice_seed import choice_seed

from ....support.front import CONTEXT, TIMINGS, Echo, Served, served

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


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


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the stream ends with [DONE] and nothing else."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="héllo", max_tokens=20)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "echo")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("héllo", "stop", None)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 7, 13)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_completion_stops_after_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="echo", prompt="x" * 20).choices
    assert (choice.text, choice.finish_reason) == ("x" * 16, "length")


def test_prompts_and_choices(client: openai.OpenAI, server: Served) -> None:
    answer = client.completions.create(model="echo", prompt=["ab", "cd"], n=2, seed=9)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert answer.usage is not None and answer.usage.prompt_tokens == 4
    seeds = {r.request_id.rsplit("-", 1)[1]: r.sampling.seed for r in server.source.requests}
    assert seeds == {"0": 9, "1": choice_seed(9, 1), "2": 9, "3": choice_seed(9, 1)}
    ids = client.completions.create(model="echo", prompt=[[104, 105], [106]])
    assert [c.text for c in ids.choices] == ["hi", "j"]
    assert client.completions.create(model="echo", prompt=[104, 105]).choices[0].text == "hi"


@pytest.mark.parametrize("prompt", ["hé", list("hé".encode())])
def test_echo(client: openai.OpenAI, prompt: str | list[int]) -> None:
    assert client.completions.create(model="echo", prompt=prompt, echo=True).choices[0].text == "héhé"
    parts = [c.choices[0].text for c in client.completions.create(model="echo", prompt=prompt, echo=True, stream=True)]
    assert parts == ["héh", "", "é", ""]


def test_completion_log_probabilities(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="echo", prompt="aé", logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|end|>"]
    assert choice.logprobs.token_logprobs == [-0.97, -1.95, -1.69, -2.56]
    assert choice.logprobs.text_offset == [0, 1, 1, 2]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"a": -0.97, "b": -0.98}


def test_stop_strings_cut_the_text_and_close_the_stream(client: openai.OpenAI, server: Served) -> None:
    server.source.laps = None
    answer = client.completions.create(model="echo", prompt="abc. ", max_tokens=400, stop=["c.", "zz"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert server.source.all_closed.wait(60)
    text = client.completions.create(model="echo", prompt="abc. ", max_tokens=400, stop="c. a", stream=True)
    assert [c.choices[0].text for c in text] == ["a", "b", "", "", "", ""]


@pytest.mark.parametrize("stop", [None, "cd"])
def test_timings_are_in_a_header_and_in_the_body_when_asked_for(server: Served, stop: str | None) -> None:
    total_s = 7 if stop is None else 4
    header = server_timing(replace(TIMINGS, total_s=total_s))
    plain = post(server, prompt="abcdef", stop=stop)
    assert plain.headers["server-timing"] == header and "timings" not in plain.json()
    asked = post(server, prompt="abcdef", stop=stop, timings=True)
    assert asked.headers["server-timing"] == header
    assert asked.json()["timings"] == [replace(TIMINGS, total_s=total_s).to_json(0)]


def test_the_header_is_of_the_longest_completion(server: Served) -> None:
    answer = post(server, prompt=["a", "bcd"], timings=True)
    assert [t["total_s"] for t in answer.json()["timings"]] == [2, 4]
    assert answer.headers["server-timing"] == server_timing(replace(TIMINGS, total_s=4))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("usage", [False, True])
def test_streamed_timings_come_in_the_last_chunk(server: Served, path: str, usage: bool) -> None:
    prompt: dict[str, Any] = {"messages": USER} if "chat" in path else {"prompt": "hi"}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    response = post(server, path, stream=True, timings=True, **prompt, **options)
    *chunks, last = events(response)
    assert not any("timings" in chunk for chunk in chunks)
    assert (last["choices"], last["timings"]) == ([], [replace(TIMINGS, total_s=3).to_json(0)])
    assert ("usage" in last) == usage
    assert "server-timing" not in response.headers


def test_the_official_client_passes_timings_on(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="echo", prompt="hi", extra_body={"timings": True})
    assert answer.timings[0]["transport"] == "nixl"


def test_a_streamed_completion_has_a_chunk_for_each_token(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="echo", prompt="h€!", stream=True))
    assert [c.choices[0].text for c in chunks] == ["h", "", "", "€", "!", ""]
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 5 + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_streamed_bytes_are_openais(server: Served) -> None:
    response = post(server, prompt="a\n", stream=True, max_tokens=2, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    first, second, usage = events(response)
    head = {"id": first["id"], "object": "text_completion", "created": first["created"], "model": "echo"}
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    assert first == head | {"choices": [choice], "usage": None}
    end = {"text": "\n", "finish_reason": "length", "stop_reason": None}
    assert second == head | {"choices": [choice | end], "usage": None}
    counts = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    details = {
        "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert usage == head | {"choices": [], "usage": counts | details}
    assert first["id"].removeprefix("cmpl-") == response.headers["x-request-id"].removeprefix("req-")


def test_streamed_choices_and_log_probabilities(client: openai.OpenAI) -> None:
    texts, tokens = {0: "", 1: ""}, {0: list[str](), 1: list[str]()}
    for chunk in client.completions.create(model="echo", prompt="h€", n=2, logprobs=0, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        tokens[choice.index] += choice.logprobs.tokens
    expected = ["h", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|end|>"]
    assert texts == {0: "h€", 1: "h€"} and tokens == {0: expected, 1: expected}


def test_chat(client: openai.OpenAI, server: Served) -> None:
    answer = client.chat.completions.create(model="echo", messages=USER, temperature=0, seed=1)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi", "stop")
    (request,) = server.source.requests
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt_token_ids)
    assert request.sampling.is_greedy and request.sampling.seed == 1


def test_chat_log_probabilities(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="echo", messages=USER, logprobs=True, top_logprobs=2, max_tokens=1
    ).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    (token,) = choice.logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("h", -1.04, [104])
    assert [(t.token, t.logprob) for t in token.top_logprobs] == [("h", -1.04), ("i", -1.05)]


def test_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="echo", messages=USER, stream=True, n=2))
    for i in range(2):
        deltas = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert [d.delta.role for d in deltas] == ["assistant", None, None, None]
        assert [d.delta.content for d in deltas] == ["", "h", "i", ""]
        assert [d.finish_reason for d in deltas] == [None, None, None, "stop"]


def test_a_streamed_chat_has_a_chunk_for_each_token(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "€!"}]
    chunks = client.chat.completions.create(model="echo", messages=messages, stream=True)
    assert [c.choices[0].delta.content for c in chunks] == ["", "", "", "€", "!", ""]


def test_streamed_chat_with_log_probabilities_and_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="echo", messages=USER, stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert [e.token for e in entries] == ["h", "i", "<|end|>"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 3


async def test_the_asynchronous_client(server: Served) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        stream = await client.chat.completions.create(model="echo", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert (await client.completions.create(model="echo", prompt="ab")).choices[0].text == "ab"
            return await asyncio.gather(*(one(client, f"text {i}") for i in range(50)))

    assert await main() == [f"text {i}" for i in range(50)]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("echo", "model", "diptych")
    assert client.models.retrieve("echo") == model
    with pytest.raises(openai.NotFoundError, match="'some/other' is not served here"):
        client.models.retrieve("some/other")


def test_health_metrics_version(server: Served) -> None:
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, health.json()["status"], health.json()["decode_workers"]) == (200, "ready", 2)
    server.source.ready = False
    assert httpx.get(f"{server.url}/health").status_code == 503
    metrics = httpx.get(f"{server.url}/metrics")
    assert metrics.text.startswith("diptych_requests_total 7\n")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
