"""vLLM's /tokenize and /detokenize. A token is a byte; special ones are above 255."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import processors

from diptych.cluster.front.front_door import FrontDoor
from diptych.cluster.tokens.prompt_encoder import MAX_INLINE_CHARS
from diptych.cluster.tokens.prompt_encoding import encode_text
from diptych.cluster.tokens.tokenizer import Tokenizer

from ....support.front import CONTEXT, TEMPLATE, Echo, Served, byte_backend, served
from ....support.harness import TINY

CHAT = [{"role": "user", "content": "Hi"}]
USER, END, ASSISTANT = 258, 256, 259
TOOL = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(scope="module")
def it() -> Iterator[Served]:
    with served(Echo()) as found:
        yield found


def post(it: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{it.url}{path}", json=body)


def tokenized(it: Served, **body: Any) -> dict[str, Any]:
    answer = post(it, "/tokenize", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_has_its_tokens_and_their_names(it: Served) -> None:
    ids = list("é a".encode())
    assert tokenized(it, prompt="é a") == {
        "count": 4,
        "max_model_len": CONTEXT,
        "tokens": ids,
        "token_strs": None,
    }
    named = tokenized(it, prompt="é a<|end|>", return_token_strs=True, model="echo")
    assert named["token_strs"] == ["Ã", "©", "Ġ", "a", "<|end|>"]
    assert named["tokens"] == [*ids, END]


def test_a_conversation_is_rendered_as_it_is_for_an_answer(it: Served) -> None:
    rendered = [USER, *b"Hi", END, ASSISTANT]
    assert tokenized(it, messages=CHAT, add_generation_prompt=True)["tokens"] == rendered
    assert tokenized(it, messages=CHAT, add_generation_prompt=False)["tokens"] == rendered[:-1]
    assert tokenized(it, messages=CHAT, continue_final_message=True)["tokens"] == rendered[:-2]
    with_tools = tokenized(it, messages=CHAT, tools=[TOOL])
    assert bytes(with_tools["tokens"][: -len(rendered)]).startswith(b'[{"type": "function"')
    asked = post(it, "/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "tool_choice": "none"})
    assert asked.json()["usage"]["prompt_tokens"] == with_tools["count"]


def test_a_text_may_be_longer_than_the_context(it: Served) -> None:
    text = "x" * (CONTEXT + 100)
    assert tokenized(it, prompt=text)["count"] == len(text)


def tokenizer_that_begins(template: str | None = None) -> Tokenizer:
    """The tokenizer of bytes, with <|end|> before each text."""
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", END)])
    return Tokenizer(backend, {}, template)


async def test_tokens_of_the_post_processor_may_be_left_out_of_short_and_long_texts() -> None:
    source = Echo()
    source.context = 30_000
    door = FrontDoor(source, tokenizer_that_begins())
    try:
        for size in (10, MAX_INLINE_CHARS + 1):
            text = "x" * size
            assert await door.encode(text) == (END, *text.encode())
            assert await door.encode(text, special=False) == tuple(text.encode())
    finally:
        await door.close()


@pytest.mark.parametrize("padding", [0, MAX_INLINE_CHARS + 1], ids=["small", "large"])  # large: in another process
def test_add_special_tokens_adds_or_leaves_out_those_of_the_post_processor(padding: int) -> None:
    text, source = "x" * (5 + padding), Echo()
    source.context = 60_000
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    with served(source, tokenizer=tokenizer_that_begins(TEMPLATE)) as it:
        for path, body in (("completions", {"prompt": text, "max_tokens": 1}), ("chat/completions", chat)):
            for special in (False, True):
                answer = post(it, f"/v1/{path}", body | {"add_special_tokens": special})
                assert answer.status_code == 200, answer.text
                assert (source.requests[-1].prompt_token_ids[0] == END) is special
            assert post(it, f"/v1/{path}", body).status_code == 200
            assert (source.requests[-1].prompt_token_ids[0] == END) is (path == "completions")
        for special in (False, True):
            answer = post(it, "/v1/embeddings", {"input": text, "add_special_tokens": special})
            assert (source.requests[-1].prompt_token_ids[0] == END) is special
            for body in ({"prompt": text}, {"messages": chat["messages"]}):
                ids = tokenized(it, **body, add_special_tokens=special)["tokens"]
                assert (ids[0] == END) is special


def test_tokens_become_text_again(it: Served) -> None:
    text = "Größe <|end|>"
    ids = tokenized(it, prompt=text)["tokens"]
    answer = post(it, "/detokenize", {"tokens": ids})
    assert answer.json() == {"prompt": text}
    many = post(it, "/detokenize", {"tokens": [97] * 5000, "color": 1})
    assert many.json() == {"prompt": "a" * 5000} and many.headers["x-diptych-ignored"] == "color"
    assert post(it, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_an_empty_text_has_no_tokens_but_those_that_begin_each(it: Served) -> None:
    assert post(it, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    tokenizer = Tokenizer.load(TINY)
    assert encode_text(tokenizer, "", CONTEXT) == tokenizer.encode("") == tokenizer.encode("a")[:1]
    assert encode_text(tokenizer, "", CONTEXT, special=False) == ()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": "a" * (CONTEXT * 20)}, None),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 260]}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(it: Served, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = post(it, path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param or param is None


def test_unknown_models_and_large_bodies_are_refused(it: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert post(it, path, body | {"model": "other"}).status_code == 404
        assert post(it, path, body | {"user": "x" * (2 << 20)}).status_code == 413
