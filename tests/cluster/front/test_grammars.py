"""Grammars at the door, over HTTP and gRPC: what reaches the workers, and what is refused before any does."""

from collections.abc import Generator
from typing import Any

import grpc
import httpx
import pytest

from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc
from diptych.workers.common.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

from ...support.front import Echo, Served, served

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.fixture
def stub(server: Served) -> Generator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def post(server: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | body, timeout=60)


@pytest.mark.parametrize("padding", [0, 100_000], ids=["inline", "read in a process"])
def test_a_grammar_reaches_the_workers_with_each_completion(server: Served, padding: int) -> None:
    answer = post(server, n=2, metadata={"padding": " " * padding}, structured_outputs={"regex": "a+"})
    assert answer.status_code == 200, answer.text
    asked = [request.sampling.grammar for request in server.source.requests[-2:]]
    assert asked == [Grammar(GrammarKind.REGEX, "a+")] * 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: nope"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 4096 strings"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "cannot be compiled"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}},
            "response_format",
            "Invalid type: wat",
        ),
        ({"guided_json": {"description": "a" * MAX_GRAMMAR_BYTES}}, "guided_json", "more than 262144 bytes"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "more than 262144 bytes"),
    ],
)
def test_a_bad_grammar_is_refused_by_its_field_before_a_worker_hears_of_it(
    server: Served, body: dict[str, Any], param: str, words: str
) -> None:
    num_before = len(server.source.requests)
    for stream in (False, True):
        answer = post(server, **body, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_grammar")
        assert words in error["message"]
    assert len(server.source.requests) == num_before


def test_grpc_has_the_same(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    good = pb.SamplingParams(grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_CHOICE, text='["a", "b"]'))
    assert list(stub.Generate(pb.GenerateRequest(text="x", sampling=good)))
    assert server.source.requests[-1].sampling.grammar == Grammar(GrammarKind.CHOICE, '["a", "b"]')
    for grammar, words in (
        (pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="(a"), "unclosed group"),
        (pb.Grammar(text="a"), "kind of the grammar is unknown"),
        (pb.Grammar(kind=pb.GRAMMAR_KIND_JSON_SCHEMA), "is empty"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(grammar=grammar))))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and words in error.details()
