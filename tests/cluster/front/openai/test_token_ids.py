"""Token ids and running usage in answers, as vLLM gives them, with the official client."""

from collections.abc import Generator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from diptych.cluster.front.openai import format as openai_format

from ....support.front import END, Echo, Served, served

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "h€"}]
RENDERED = [258, *"h€".encode(), 256, 259]  # user, the text, end, assistant
IDS = {"return_token_ids": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.fixture
def client(server: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


def test_token_ids_of_completions(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="echo", prompt=["hi", "€"], n=2, extra_body=IDS)
    prompts = [list(b"hi"), list(b"hi"), list("€".encode()), list("€".encode())]
    assert [choice.prompt_token_ids for choice in answer.choices] == prompts
    assert [choice.token_ids for choice in answer.choices] == [[*prompt, END] for prompt in prompts]


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": False}])
def test_token_ids_that_are_not_asked_for_are_null(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    answer: Any = client.completions.create(model="echo", prompt="hi", extra_body=extra)
    assert (answer.choices[0].token_ids, answer.choices[0].prompt_token_ids) == (None, None)
    answer = client.chat.completions.create(model="echo", messages=USER, extra_body=extra)
    assert (answer.choices[0].token_ids, answer.prompt_token_ids) == (None, None)
    chunks = client.completions.create(model="echo", prompt="hi", stream=True, extra_body=extra)
    assert not any("token_ids" in chunk.choices[0].model_dump() for chunk in chunks)


@pytest.mark.parametrize("tokens_a_delta", [1, 3])
def test_streamed_token_ids_of_completions(client: openai.OpenAI, server: Served, tokens_a_delta: int) -> None:
    server.source.tokens_a_delta = tokens_a_delta
    stream: Any = client.completions.create(model="echo", prompt="h€!", n=2, stream=True, extra_body=IDS)
    chunks = [chunk.choices[0] for chunk in stream]
    for index in range(2):
        first, *others = [c for c in chunks if c.index == index]
        assert first.prompt_token_ids == list("h€!".encode())
        assert not any("prompt_token_ids" in c.model_dump() for c in others)
        assert [t for c in (first, *others) for t in c.token_ids] == [*"h€!".encode(), END]
        assert "".join(c.text for c in (first, *others)) == "h€!"


def test_token_ids_of_a_chat(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="echo", messages=USER, n=2, extra_body=IDS)
    assert answer.prompt_token_ids == RENDERED
    assert [c.token_ids for c in answer.choices] == [[*"h€".encode(), END]] * 2


@pytest.mark.parametrize("logprobs", [False, True])
def test_streamed_token_ids_of_a_chat(client: openai.OpenAI, logprobs: bool) -> None:
    stream: Any = client.chat.completions.create(
        model="echo", messages=USER, stream=True, logprobs=logprobs, extra_body=IDS
    )
    first, *others = stream
    assert first.prompt_token_ids == RENDERED and "token_ids" not in first.choices[0].model_dump()
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in others)
    assert [chunk.choices[0].token_ids for chunk in others] == [[t] for t in (*"h€".encode(), END)]


@pytest.mark.parametrize("tokens_a_delta", [1, 4])
def test_a_stop_string_ends_the_token_ids_where_it_ends_the_text(
    client: openai.OpenAI, server: Served, tokens_a_delta: int
) -> None:
    server.source.tokens_a_delta = tokens_a_delta
    answer: Any = client.completions.create(model="echo", prompt="abcd", stop="bc", extra_body=IDS)
    assert (answer.choices[0].text, answer.choices[0].token_ids) == ("a", list(b"abc"))


@pytest.mark.parametrize("param", ["return_token_ids", "echo"])
def test_prompts_that_would_be_repeated_too_often_are_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch, param: str
) -> None:
    monkeypatch.setattr(openai_format, "MAX_REPEATED_TOKENS", 8)

    def ask(n: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json={"prompt": "abcd", "n": n, param: True})

    assert ask(2).status_code == 200
    refused = ask(3)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param and "12 tokens" in refused.json()["error"]["message"]


def test_log_probabilities_name_tokens_by_their_ids(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True}
    (choice,) = client.completions.create(model="echo", prompt="aé", logprobs=2, extra_body=extra).choices
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
    assert choice.logprobs.tokens == ["token_id:97", "token_id:195", "token_id:169", "token_id:256"]
    assert choice.logprobs.top_logprobs[0] == {"token_id:97": -0.97, "token_id:98": -0.98}
    (chosen,) = client.chat.completions.create(
        model="echo", messages=USER, logprobs=True, top_logprobs=1, max_tokens=1, extra_body=extra
    ).choices
    assert chosen.logprobs is not None and chosen.logprobs.content is not None
    (token,) = chosen.logprobs.content
    assert (token.token, token.bytes, token.top_logprobs[0].token) == ("token_id:104", [104], "token_id:104")


def test_streamed_log_probabilities_name_tokens_by_their_ids(client: openai.OpenAI) -> None:
    extra = IDS | {"return_tokens_as_token_ids": True}
    stream: Any = client.completions.create(model="echo", prompt="€", logprobs=1, stream=True, extra_body=extra)
    named, ids = list[str](), list[int]()
    for chunk in stream:
        named += chunk.choices[0].logprobs.tokens
        ids += chunk.choices[0].token_ids
    assert named == [f"token_id:{i}" for i in ids] and ids == [*"€".encode(), END]


def test_usage_in_every_chunk_of_completions(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="echo",
        prompt=["hi", "hey"],
        stream=True,
        stream_options=dict[str, Any](USAGE),  # pyright: ignore
    )
    *chunks, last = stream
    counts = {0: list[int](), 1: list[int]()}
    for chunk in chunks:
        assert chunk.usage is not None
        index = chunk.choices[0].index
        assert chunk.usage.prompt_tokens == (2, 3)[index]
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        counts[index].append(chunk.usage.completion_tokens)
    assert counts == {0: [1, 2, 3], 1: [1, 2, 3, 4]}
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 7


@pytest.mark.parametrize("max_tokens", [3, 100])
def test_usage_in_every_chunk_of_a_chat(client: openai.OpenAI, max_tokens: int) -> None:
    """Each chunk after the first has more tokens than the one before it: the last token's has the finish reason too."""
    *chunks, last = client.chat.completions.create(
        model="echo",
        messages=USER,
        max_tokens=max_tokens,
        stream=True,
        stream_options=dict[str, Any](USAGE),  # pyright: ignore
    )
    num = min(max_tokens, 5)
    assert [c.usage.completion_tokens for c in (*chunks, last) if c.usage] == [*range(num + 1), num]
    assert [c.usage.prompt_tokens for c in (*chunks, last) if c.usage] == [len(RENDERED)] * (num + 2)
    assert chunks[-1].choices[0].finish_reason == ("length" if max_tokens == 3 else "stop")


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": False, **IDS}, {}])
def test_no_usage_without_include_usage(client: openai.OpenAI, options: dict[str, Any]) -> None:
    chunks = client.completions.create(model="echo", prompt="hi", stream=True, stream_options=options)  # pyright: ignore
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("options", [{"include_usage": None}, {"continuous_usage_stats": True}])
def test_stream_options_need_a_stream(client: openai.OpenAI, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="needs stream=true"):
        client.completions.create(model="echo", prompt="hi", extra_body={"stream_options": options})
    assert client.completions.create(model="echo", prompt="hi", extra_body={"stream_options": {}}).choices
