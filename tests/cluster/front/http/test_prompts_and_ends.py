"""Prompts that are cut, and answers that show what ended them, as vLLM serves them."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from diptych.cluster.front.http.calls import MAX_INLINE_BYTES

from ....support.front import CONTEXT, END, Echo, Served, echo_embedding, served

LONG = "".join(chr(97 + i % 26) for i in range(CONTEXT + 50))


@pytest.fixture(scope="module")
def it() -> Iterator[Served]:
    with served(Echo(laps=1)) as found:
        yield found


@pytest.fixture(scope="module")
def client(it: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def post(it: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{it.url}{path}", json=body, timeout=60)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, LONG[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 20}, LONG[-(CONTEXT - 20) :]),
        ({"truncate_prompt_tokens": -1}, LONG[-(CONTEXT - 16) :]),  # the default of max_tokens
    ],
)
def test_a_prompt_is_cut(it: Served, fields: dict[str, Any], kept: str) -> None:
    answer = post(it, "/v1/completions", prompt=LONG, **fields)
    assert answer.status_code == 200, answer.text
    assert bytes(it.source.requests[-1].prompt_token_ids).decode() == kept
    assert answer.json()["usage"]["prompt_tokens"] == len(kept)


def test_a_chat_is_cut_after_the_template(it: Served) -> None:
    answer = post(it, "/v1/chat/completions", messages=[{"role": "user", "content": LONG}], truncate_prompt_tokens=4)
    assert answer.status_code == 200, answer.text
    assert it.source.requests[-1].prompt_token_ids == (*LONG[-2:].encode(), END, 259)


SHOWS_DOCUMENTS = "{% for d in documents or [] %}[{{ d.title }}|{{ d.text }}]{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize("padding", [0, MAX_INLINE_BYTES])
def test_documents_are_shown_by_the_template(padding: int) -> None:
    documents = [{"title": "Sea", "text": "salt"}, {"title": "Lake", "text": "sweet"}]
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2, "user": "x" * padding}
    with served(Echo(laps=1), template=SHOWS_DOCUMENTS) as it:
        for given, text in ((documents, "[Sea|salt][Lake|sweet]?"), ([], "?"), (None, "?")):
            answer = post(it, "/v1/chat/completions", **body, documents=given)
            assert answer.status_code == 200, answer.text
            assert bytes(it.source.requests[-1].prompt_token_ids).decode() == text
            count = post(it, "/tokenize", messages=body["messages"], documents=given).json()["count"]
            assert count == len(text)
        refused = post(it, "/tokenize", prompt="?", documents=documents)
        assert refused.json()["error"]["param"] == "documents"


def test_a_large_prompt_is_cut_in_the_process_that_reads_it(it: Served) -> None:
    body = {"prompt": [97] * MAX_INLINE_BYTES, "truncate_prompt_tokens": -1, "max_tokens": 3}
    answer = post(it, "/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    assert len(it.source.requests[-1].prompt_token_ids) == CONTEXT - 3


def test_inputs_of_embeddings_keep_their_beginning(client: openai.OpenAI) -> None:
    def embedded(**extra: Any) -> list[float]:
        answer = client.embeddings.create(model="echo", input=LONG, encoding_format="float", extra_body=extra)
        return answer.data[0].embedding

    def of(text: str) -> list[float]:
        return pytest.approx(echo_embedding(text.encode()).tolist())

    assert embedded(truncate_prompt_tokens=3) == of(LONG[:3])
    assert embedded(truncate_prompt_tokens=-1) == of(LONG[:CONTEXT])
    assert embedded(truncate_prompt_tokens=3, truncation_side="left") == of(LONG[-3:])


def test_a_prompt_that_is_cut_is_not_repeated(it: Served) -> None:
    answer = post(it, "/v1/completions", prompt="abc", truncate_prompt_tokens=2, echo=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "say "),
        ({"include_stop_str_in_output": True}, "say stop"),
        ({"include_stop_str_in_output": True, "stop": ["never"]}, "say stop now"),
    ],
)
def test_a_stop_string_is_shown(client: openai.OpenAI, stream: bool, fields: dict[str, Any], text: str) -> None:
    asked = {"stop": ["stop"]} | fields
    prompt: Any = {"model": "echo", "prompt": "say stop now", "stream": stream}
    answer: Any = client.completions.create(**prompt, extra_body=asked)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize(("shown", "text"), [(None, "a"), (True, "ab")])
def test_a_stop_token_is_shown(it: Served, shown: bool | None, text: str) -> None:
    """As in vLLM, the token that ended an answer is a part of its text where stop strings are."""
    it.source.stop_id = ord("b")
    try:
        found = post(it, "/v1/completions", prompt="abc", stop_token_ids=[98], include_stop_str_in_output=shown)
    finally:
        it.source.stop_id = END
    assert found.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("skip", "text"), [(None, "ab"), (True, "ab"), (False, "a<|user|>b")])
def test_special_tokens_are_shown(it: Served, path: str, skip: bool | None, text: str) -> None:
    it.source.answer = (97, 258, 98, END)
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    try:
        choice = post(it, path, skip_special_tokens=skip, **fields).json()["choices"][0]
    finally:
        it.source.answer = ()
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == text
