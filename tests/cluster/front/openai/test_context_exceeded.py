"""A request beyond the context is refused in OpenAI's words, by which clients know it.

litellm looks for "this model's maximum context length is" in any case, others for OpenAI's whole pattern.
"""

import re
from collections.abc import Generator
from typing import Any

import httpx
import pytest

from diptych import Client
from diptych.workers.common.errors import PromptTooLong

from ....support.front import CONTEXT, Echo, Served, served

OPENAI = re.compile(
    r"^This model's maximum context length is (\d+) tokens\. However, .+\. Please reduce the length of the prompt"
)
CHAT = "/v1/chat/completions"


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * CONTEXT}),
        ("/v1/completions", {"prompt": [120] * CONTEXT}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": CONTEXT}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": CONTEXT, "stream": True}),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_openais_words(server: Served, path: str, body: dict[str, Any]) -> None:
    response = httpx.post(server.url + path, json=body, timeout=60)
    error = response.json()["error"]
    found = OPENAI.match(error["message"])
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert found is not None and int(found[1]) == CONTEXT, error["message"]


def test_grpc_tells_it_in_the_same_words(server: Served) -> None:
    with Client(server.address) as client:
        for prompt, max_tokens in (("x" * CONTEXT, 1), ("x", CONTEXT)):
            with pytest.raises(PromptTooLong) as caught:
                client.generate(prompt, max_tokens=max_tokens)
            assert OPENAI.match(caught.value.message)
