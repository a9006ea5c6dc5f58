"""Beam search by the front door, with the official client. A token is a byte of log-probability -byte/100: front.py."""

import asyncio
from collections.abc import Generator
from typing import Any

import openai
import pytest

from diptych.workers.common.errors import Overloaded

from ....support.front import Echo, Served, served


@pytest.fixture
def source() -> Echo:
    return Echo()


@pytest.fixture
def server(source: Echo) -> Generator[Served]:
    with served(source) as it:
        yield it


@pytest.fixture
def client(server: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


def complete(client: openai.OpenAI, beams: dict[str, Any] | None = None, **fields: Any) -> Any:
    asked = {"model": "echo", "prompt": "ab", "n": 2, "max_tokens": 3} | fields
    return client.completions.create(**asked, extra_body={"use_beam_search": True} | (beams or {}))


def test_the_most_likely_answers_of_each_prompt_come_best_first(client: openai.OpenAI, source: Echo) -> None:
    source.num_stored = 1
    answer = complete(client, prompt=["ab", "Xab"], logprobs=1)
    # The echo's first token is the prompt's first, the alternatives are the bytes after it: the smallest are likeliest.
    assert [choice.text for choice in answer.choices] == ["aaa", "aab", "XXX", "XXY"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs == [pytest.approx(-ord(char) / 100) for char in choice.text]
        assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    details = {"cached_tokens": 6, "cache_write_tokens": 2}  # of the first steps alone
    assert answer.usage.prompt_tokens_details.model_dump(include=set(details)) == details
    assert all(request.sampling.max_tokens == 1 for request in source.requests)
    assert sorted(source.closed) == sorted(request.request_id for request in source.requests)
    assert len({request.request_id for request in source.requests}) == len(source.requests) == 2 * (1 + 2 + 2)


def test_a_chat_and_a_single_beam(client: openai.OpenAI, source: Echo) -> None:
    source.answer = (*b"hi",)
    answer = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        logprobs=True,
        extra_body={"use_beam_search": True, "length_penalty": 0.5},
    )
    assert answer.choices[0].message.content == "hh"
    assert answer.choices[0].logprobs is not None


@pytest.mark.parametrize(
    ("fields", "beams", "param"),
    [
        ({"n": 20}, {}, "n"),
        ({"stream": True}, {}, "stream"),
        ({"logit_bias": {"97": 1}}, {}, "logit_bias"),
        ({"presence_penalty": 1.0}, {}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, {}, "frequency_penalty"),
        ({}, {"repetition_penalty": 1.5}, "repetition_penalty"),
        ({}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({}, {"guided_regex": "a+"}, "guided_regex"),
        ({}, {"length_penalty": 11}, "length_penalty"),
        ({}, {"length_penalty": 2.0, "use_beam_search": False}, "length_penalty"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(
    client: openai.OpenAI, source: Echo, fields: dict[str, Any], beams: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        complete(client, beams, **fields)
    assert e.value.param == param
    assert not source.requests


def test_a_step_that_fails_ends_the_call_with_its_error(client: openai.OpenAI, source: Echo) -> None:
    source.fail = lambda made: Overloaded("full: try again") if len(source.requests) > 2 else None
    with pytest.raises(openai.RateLimitError, match="full"):
        complete(client)
    assert source.all_closed.wait(60)


@pytest.mark.parametrize("how", ["deadline", "gone"])
def test_a_search_ends_with_its_call(client: openai.OpenAI, source: Echo, how: str) -> None:
    source.gate = asyncio.Event()  # stays clear
    begun = source.all_started(1)
    if how == "deadline":
        with pytest.raises(openai.APIStatusError) as e:
            complete(client, {"timeout_s": 0.2})
        assert e.value.status_code == 504
    else:
        with pytest.raises(openai.APITimeoutError):
            complete(client.with_options(timeout=0.5))
    assert begun.wait(60) and source.all_closed.wait(60)
