"""Prompts that are cut, ends of answers and their tokens: over gRPC as over HTTP, with the Python client and stubs."""

from collections.abc import Generator
from typing import Any

import grpc
import numpy as np
import pytest

from diptych import Client
from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc
from diptych.workers.common.errors import InvalidRequest

from ....support.front import CONTEXT, END, Echo, Served, echo_embedding, served
from .test_api import failed

LONG = "".join(chr(97 + i % 26) for i in range(CONTEXT + 50))
ASSISTANT = 259  # token of the role
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "we"}]


@pytest.fixture
def it() -> Generator[Served]:
    with served(Echo(laps=1)) as found:
        yield found


@pytest.fixture
def client(it: Served) -> Generator[Client]:
    with Client(it.address) as found:
        yield found


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, LONG[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 20}, LONG[-(CONTEXT - 20) :]),
    ],
)
@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_prompt_is_cut(client: Client, it: Served, options: Any, kept: str, as_tokens: bool) -> None:
    client.generate(list(LONG.encode()) if as_tokens else LONG, **options)
    assert bytes(it.source.requests[-1].prompt_token_ids).decode() == kept


def test_inputs_of_embeddings_keep_their_beginning(client: Client) -> None:
    for options, kept in (({}, LONG[:4]), ({"truncation_side": "left"}, LONG[-4:])):
        found = client.embed([LONG, list(LONG.encode())], truncate_prompt_tokens=4, **options)  # type: ignore[arg-type]
        for vector in found.vectors:
            np.testing.assert_array_equal(np.array(vector, dtype=np.float32), echo_embedding(list(kept.encode())))


def test_a_chat_may_end_with_its_messages_or_be_continued(client: Client, it: Served) -> None:
    client.chat(CHAT, continue_final_message=True)
    client.chat(CHAT, add_generation_prompt=False)
    client.chat(CHAT)
    ends = [r.prompt_token_ids[-3:] for r in it.source.requests]
    assert ends == [(ASSISTANT, *b"we"), (*b"we", END), (ord("e"), END, ASSISTANT)]


def test_an_answer_shows_its_end_and_special_tokens(client: Client, it: Served) -> None:
    assert client.generate("abcd", stop="c").text == "ab"
    assert client.generate("abcd", stop="c", include_stop=True).text == "abc"
    it.source.answer = (97, ASSISTANT, 98)
    assert client.generate("x").text == "ab"
    assert client.generate("x", show_special_tokens=True).text == "a<|assistant|>b"


def test_an_answer_has_allowed_tokens_alone_and_no_bad_words(client: Client, it: Served) -> None:
    client.generate("x", allowed_token_ids=[98, 97])
    grammar = it.source.requests[-1].sampling.grammar
    assert grammar is not None and grammar.text.startswith("start: <[97,98]>")
    client.generate("x", bad_words=["fox"])
    grammar = it.source.requests[-1].sampling.grammar
    assert grammar is not None and '"fox"' in grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": 9}, "truncation_side"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"], "allowed_token_ids": [1, 2]}, "bad_words"),
        (
            {
                "allowed_token_ids": [1, 2],
                "sampling": pb.SamplingParams(grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="a")),
            },
            "allowed_token_ids",
        ),
    ],
)
def test_bad_fields_are_named(it: Served, fields: dict[str, Any], param: str) -> None:
    with grpc.insecure_channel(it.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        status, metadata = failed(stub.Generate(pb.GenerateRequest(text="a", **fields)))
        assert (status, metadata["diptych-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, param)


def test_a_side_has_one_of_two_names(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="truncation_side must be left or right"):
        client.generate("a", truncate_prompt_tokens=1, truncation_side="up")  # type: ignore[arg-type]
