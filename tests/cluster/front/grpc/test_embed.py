"""diptych.v1.Inference/Embed on a real socket, with plain stubs and the Python clients."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from diptych import AsyncClient, Client
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.cluster.front.limits import RequestLimits
from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc
from diptych.workers.common.errors import EmbeddingsNotServed, InvalidRequest, Overloaded, Unauthenticated
from diptych.workers.core.embedding import EmbeddingSpec

from ....support.front import CONTEXT, Echo, Served, echo_embedding, served
from ..access.test_limits import ALICE, BOB, SINGLE, ring
from .test_api import failed

SMALL = RequestLimits(max_inputs=40, max_answer_floats=100, max_sequences=8)
TEXTS = ["one", "three", "héllo"]


@pytest.fixture(scope="module")
def server() -> Generator[Served]:
    with served(Echo(), limits=SMALL) as it:
        yield it


@pytest.fixture(scope="module")
def stub(server: Served) -> Generator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def client(server: Served) -> Generator[Client]:
    with Client(server.address) as it:
        yield it


def texts(*given: str, **fields: Any) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.EmbedInput(text=text) for text in given], **fields)


def test_one_message_for_each_input_in_their_order(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    before = len(server.source.requests)
    request = texts("one", "three", model="echo", cache_salt="pepper")
    request.inputs.add(tokens=pb.TokenIds(ids=[7, 8, 9]))
    answers = list(stub.Embed(request))
    assert [answer.index for answer in answers] == [0, 1, 2]
    for answer, ids in zip(answers, (b"one", b"three", [7, 8, 9]), strict=True):
        np.testing.assert_array_equal(np.array(answer.embedding, dtype=np.float32), echo_embedding(list(ids)))
    assert [answer.HasField("usage") for answer in answers] == [False, False, True]
    assert answers[-1].usage == pb.Usage(prompt_tokens=11, cached_tokens=9) and answers[-1].service_tier == "default"
    assert {answer.request_id for answer in answers} == {answers[0].request_id}
    made = server.source.requests[before:]
    assert [request.request_id for request in made] == [f"{answers[0].request_id}-{i}" for i in range(3)]
    assert all(request.embeds and request.cache_salt == b"pepper" for request in made)


def test_usage_has_what_was_stored(client: Client, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.source, "num_stored", 2)
    assert client.embed(["one", "three"]).usage == pb.Usage(prompt_tokens=8, cached_tokens=6, stored_tokens=4)


def test_it_gives_what_http_gives(client: Client, server: Served) -> None:
    many = [chr(ord("a") + i) * (i + 1) for i in range(20)]
    for given in (TEXTS, many, [[5, 6], [7]]):
        body = {"input": given, "dimensions": 2}
        data = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["data"]
        found = client.embed(given, dimensions=2)
        expected = np.array([each["embedding"] for each in data], dtype=np.float32)
        np.testing.assert_array_equal(np.array(found.vectors, dtype=np.float32), expected)


async def test_the_client_for_an_event_loop(server: Served) -> None:
    async with AsyncClient(server.address) as client:
        found = await client.embed(TEXTS, timeout_s=30, ttft_s=1.0, tpot_s=1.0, admission="wait")
        assert (len(found.vectors), found.usage.prompt_tokens, found.service_tier) == (3, 14, "default")
        assert server.source.requests[-1].level.ttft_s == 1.0 and server.source.requests[-1].timeout_s <= 30
        with pytest.raises(InvalidRequest, match="dimensions must be in"):
            await client.embed(TEXTS, dimensions=5)


@pytest.mark.parametrize(
    ("request_", "param", "why"),
    [
        (texts(), "inputs", "empty"),
        (texts(""), "inputs", "empty"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(text="a"), pb.EmbedInput()]), "inputs[1]", "set its text or tokens"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(tokens=pb.TokenIds())]), "inputs", "empty"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(tokens=pb.TokenIds(ids=[999]))]), "inputs", "out of vocabulary"),
        (texts("a" * (CONTEXT + 1)), "inputs", f"the input has {CONTEXT + 1} tokens"),
        (
            pb.EmbedRequest(inputs=[pb.EmbedInput(tokens=pb.TokenIds(ids=[1] * (CONTEXT + 1)))]),
            "inputs",
            f"the input has {CONTEXT + 1} tokens",
        ),
        (texts(*["a"] * 41), "inputs", "41 inputs; a call has at most 40"),
        (texts(*["a"] * 26), "inputs", "have 104 numbers; a call may have at most 100"),
        (texts("a", dimensions=5), "dimensions", "dimensions must be in"),
        (texts("a", dimensions=0), "dimensions", "dimensions must be in"),
        (texts("a", timeout_s=-1), "timeout_s", "timeout_s must be in"),
        (texts("a", admission=7), "admission", "admission must be"),
        (texts("a", service_tier="flex"), "service_tier", "service_tier"),
        (texts("a", level=pb.ServiceLevel(ttft_s=float("nan"))), "ttft_s", "ttft_s"),
        (texts("a", cache_salt="x" * 300), "cache_salt", "cache_salt"),
    ],
)
def test_bad_input_is_told_by_name(
    stub: inference_pb2_grpc.InferenceStub, request_: pb.EmbedRequest, param: str, why: str
) -> None:
    code, found = failed(stub.Embed(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert found["diptych-param"] == param and why in found["details"], found


def test_another_model_is_not_found(stub: inference_pb2_grpc.InferenceStub) -> None:
    assert failed(stub.Embed(texts("a", model="gpt-4")))[0] is grpc.StatusCode.NOT_FOUND


def test_a_model_that_has_none_refuses_by_name() -> None:
    source = Echo()
    source.embedding = EmbeddingSpec(4, refusal="it pools by the first token")
    with (
        served(source) as server,
        Client(server.address) as client,
        pytest.raises(EmbeddingsNotServed, match="it pools by the first token"),
    ):
        client.embed(["a"])


def test_numbers_of_all_calls_are_bounded() -> None:
    source = Echo()
    with served(source, limits=RequestLimits(max_gathered_floats=7)) as server, Client(server.address) as client:
        with pytest.raises(Overloaded, match="too many numbers"):
            client.embed(["a", "b"])
        for _ in range(2):  # what a call held is given back
            assert len(client.embed(["a"]).vectors) == 1


@pytest.mark.parametrize("ends", ["cancelled", "late"])
def test_a_call_that_ends_early_aborts_them(ends: str) -> None:
    source = Echo()
    with served(source) as server, grpc.insecure_channel(server.address) as channel:
        server.loop.call_soon_threadsafe(source.gate.clear)
        started = source.all_started(2)
        timeout_s = 0.2 if ends == "late" else 60.0
        call: Any = inference_pb2_grpc.InferenceStub(channel).Embed(texts("a", "b", timeout_s=timeout_s))
        assert started.wait(60)
        if ends == "late":
            code, found = failed(call)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "within 0.2 s" in found["details"]
        else:
            call.cancel()
        assert source.all_closed.wait(60) and len(source.closed) == 2


def test_inputs_count_for_their_key(tmp_path: Path) -> None:
    source, keys = Echo(), ring(tmp_path, "tokens_per_minute: 8")
    with served(source, access=AccessPolicy(keys)) as server:
        with Client(server.address) as stranger, pytest.raises(Unauthenticated):
            stranger.embed(["abc"])
        with Client(server.address, api_key=ALICE) as alice, Client(server.address, api_key=BOB) as bob:
            alice.embed(["abc", "de"])
            assert [(request.tenant, len(request.cache_salt)) for request in source.requests] == [(b"alice", 32)] * 2
            with pytest.raises(Overloaded, match="tokens a minute"):
                alice.embed(["abc", "de"])
            bob.embed(["abc", "de"])
        metrics = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {SINGLE}"}).text
        assert 'diptych_api_key_prompt_tokens_total{key="alice"} 5.0' in metrics
