"""Amazon SageMaker's calls: the same answers as from the operation that the body is for."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ....support.front import Echo, Served, served

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def it() -> Iterator[Served]:
    with served(Echo()) as found:
        yield found


def without_own(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT),
        ("completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
        ("embeddings", {"input": "a"}),
        ("completions", {"prompt": "a", "user": "x" * 100_000, "max_tokens": 1}),  # read in another process
    ],
)
def test_the_body_says_what_is_asked_for(it: Served, path: str, body: dict[str, Any]) -> None:
    asked, own = (httpx.post(f"{it.url}/{each}", json=body) for each in ("invocations", f"v1/{path}"))
    assert without_own(asked) == without_own(own)


def test_a_body_in_gzip_and_a_stream(it: Served) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(json.dumps(CHAT | {"stream": True}).encode())
    answer = httpx.post(f"{it.url}/invocations", content=body, headers=headers)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", ["[]", "{", '{"x": 1}', "[" * 100_000, '{"a": "' + "x" * (3 << 20) + '"}'])
def test_what_is_for_none_is_refused(it: Served, body: str) -> None:
    answer = httpx.post(f"{it.url}/invocations", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == (413 if len(body) > 2 << 20 else 400), answer.text
