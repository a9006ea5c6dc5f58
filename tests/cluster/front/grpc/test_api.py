"""diptych.v1.Inference on a real socket, with plain stubs."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych import __version__
from diptych.cluster.common.config import NamedLevel, ServiceLevel
from diptych.cluster.common.grpc_errors import error_from_rpc, status_of, trailing_metadata
from diptych.cluster.common.worker_stats import Drafts
from diptych.cluster.front.levels import ServiceLevels
from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc
from diptych.workers.common.errors import (
    ERRORS,
    DeadlineExceeded,
    DiptychError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from diptych.workers.common.request import MAX_PREDICTION_TOKENS, RequestLevel

from ....support.front import CONTEXT, TIMINGS, Echo, Served, served


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.fixture
def channel(server: Served) -> Generator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as it:
        yield it


@pytest.fixture
def stub(channel: grpc.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)


def failed(call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    return error.code(), dict(error.trailing_metadata()) | {"details": error.details()}


@pytest.mark.parametrize(
    ("given", "prediction"),
    [
        ({}, ()),
        ({"prediction_text": "aé"}, tuple("aé".encode())),
        ({"prediction_text": ""}, ()),
        ({"prediction_tokens": pb.TokenIds(ids=[5, 259])}, (5, 259)),
        ({"prediction_tokens": pb.TokenIds(ids=[7] * MAX_PREDICTION_TOKENS)}, (7,) * MAX_PREDICTION_TOKENS),
    ],
)
def test_a_prediction_is_a_text_or_token_ids(
    stub: inference_pb2_grpc.InferenceStub, server: Served, given: dict[str, Any], prediction: tuple[int, ...]
) -> None:
    server.source.drafts_a_token = Drafts(3, 1)
    *_, last = stub.Generate(pb.GenerateRequest(text="ab", no_speculation=bool(given), n=2, **given))
    assert [(r.prediction, r.speculates) for r in server.source.requests] == [(prediction, not given)] * 2
    usage = last.usage
    assert (usage.completion_tokens, usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (6, 6, 12)


@pytest.mark.parametrize("given", [{}, {"sparse_attention": True}, {"sparse_attention": False}])
def test_a_call_may_ask_for_sparse_attention_or_for_none(
    stub: inference_pb2_grpc.InferenceStub, server: Served, given: dict[str, Any]
) -> None:
    list(stub.Generate(pb.GenerateRequest(text="ab", **given)))
    assert [r.sparse_attention for r in server.source.requests] == [given.get("sparse_attention")]


@pytest.mark.parametrize(
    "given",
    [
        {"prediction_text": "x" * (MAX_PREDICTION_TOKENS + 1)},
        {"prediction_tokens": pb.TokenIds(ids=[1] * (MAX_PREDICTION_TOKENS + 1))},
        {"prediction_tokens": pb.TokenIds(ids=[260])},
    ],
)
def test_a_prediction_that_cannot_be_is_refused_by_name(
    stub: inference_pb2_grpc.InferenceStub, server: Served, given: dict[str, Any]
) -> None:
    code, metadata = failed(stub.Generate(pb.GenerateRequest(text="ab", **given)))
    assert (code, metadata["diptych-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prediction")
    assert not server.source.requests


def test_usage_counts_a_prompt_once(
    stub: inference_pb2_grpc.InferenceStub, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.source, "num_stored", 1)
    *_, last = stub.Generate(pb.GenerateRequest(text="abcd", n=2))
    assert last.usage == pb.Usage(prompt_tokens=4, completion_tokens=10, cached_tokens=3, stored_tokens=1)


def test_generate(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    answers = list(stub.Generate(pb.GenerateRequest(text="h€")))
    assert [a.text for a in answers] == ["h", "", "", "€", ""]
    assert [i for a in answers for i in a.token_ids] == [104, 226, 130, 172, 256]
    assert [a.finish_reason for a in answers] == [pb.FINISH_REASON_UNSPECIFIED] * 4 + [pb.FINISH_REASON_STOP]
    assert [a.HasField("usage") for a in answers] == [False] * 4 + [True]
    assert answers[-1].usage == pb.Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=3)
    assert [len(a.timings) for a in answers] == [0] * 4 + [1]
    assert answers[-1].timings[0] == replace(TIMINGS, total_s=5).to_proto(0)
    (request,) = server.source.requests
    assert request.request_id == f"{answers[0].request_id}-0"
    assert request.sampling.max_tokens == CONTEXT - 4
    assert request.timeout_s == 600.0


def test_tokens_chat_and_choices(stub: inference_pb2_grpc.InferenceStub) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert "".join(a.text for a in stub.Generate(pb.GenerateRequest(chat=chat))) == "hi"
    tokens = pb.GenerateRequest(tokens=pb.TokenIds(ids=[104, 105]), n=3)
    answers = list(stub.Generate(tokens))
    for i in range(3):
        assert "".join(a.text for a in answers if a.index == i) == "hi"
    assert [a.HasField("usage") for a in answers].count(True) == 1 and answers[-1].HasField("usage")
    assert [t.index for a in answers for t in a.timings] == [t.index for t in answers[-1].timings] == [0, 1, 2]


def test_sampling_parameters_arrive(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    sampling = pb.SamplingParams(
        temperature=0, top_k=3, seed=(1 << 64) - 1, max_tokens=2, logit_bias={5: -100}, ignore_eos=True
    )
    answers = list(stub.Generate(pb.GenerateRequest(text="abc", sampling=sampling, timeout_s=60)))
    assert answers[-1].finish_reason == pb.FINISH_REASON_LENGTH
    (request,) = server.source.requests
    got = request.sampling
    assert (got.temperature, got.top_k, got.seed, got.max_tokens) == (0, 3, (1 << 64) - 1, 2)
    assert (got.logit_bias, got.ignore_eos, request.timeout_s) == ({5: -100}, True, 60)


def test_a_level_arrives_and_the_answer_names_its_tier(server: Served) -> None:
    tiers = ServiceLevels(ServiceLevel(tiers={"flex": NamedLevel(ttft_s=30)}), {"chat": NamedLevel(tpot_s=0.05)})
    with served(server.source, levels=tiers) as other, grpc.insecure_channel(other.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked = pb.GenerateRequest(
            text="abc",
            model="chat",
            service_tier="flex",
            level=pb.ServiceLevel(tpot_s=0.02),
            admission=pb.ADMISSION_REFUSE,
        )
        answers = list(stub.Generate(asked))
        assert [a.service_tier for a in answers] == [""] * (len(answers) - 1) + ["flex"]
        assert server.source.requests[-1].level == RequestLevel(30, 0.02, True, "chat", "flex")
        assert list(stub.Generate(pb.GenerateRequest(text="abc")))[-1].service_tier == "default"
        assert server.source.requests[-1].level == RequestLevel(model="echo")
        for wrong, param in (
            ({"level": pb.ServiceLevel(ttft_s=0)}, "ttft_s"),
            ({"level": pb.ServiceLevel(tpot_s=float("nan"))}, "tpot_s"),
            ({"admission": 7}, "admission"),
            ({"service_tier": "scale"}, "service_tier"),
        ):
            code, metadata = failed(stub.Generate(pb.GenerateRequest(text="abc", **wrong)))
            assert (code, metadata["diptych-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, param)


def test_log_probabilities(stub: inference_pb2_grpc.InferenceStub) -> None:
    sampling = pb.SamplingParams(logprobs=1, max_tokens=2)
    first, second = stub.Generate(pb.GenerateRequest(text="aé", sampling=sampling))
    (entry,) = first.logprobs
    assert (entry.token_id, entry.token, entry.logprob) == (97, "a", pytest.approx(-0.97))
    assert [(t.token_id, t.token) for t in entry.top] == [(97, "a")]
    assert second.logprobs[0].token == "\ufffd"


def test_a_stop_string(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    server.source.laps = None
    answers = list(stub.Generate(pb.GenerateRequest(text="abc", stop=["ca"])))
    assert "".join(a.text for a in answers) == "ab"
    assert (answers[-1].finish_reason, answers[-1].stop_string) == (pb.FINISH_REASON_STOP, "ca")
    assert not answers[0].HasField("stop_string")
    assert server.source.all_closed.wait(60)


def test_the_model(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    model = stub.GetModel(pb.GetModelRequest())
    assert (model.name, model.max_context_tokens, model.version) == ("echo", CONTEXT, __version__)
    server.source.model_error = Unavailable("no worker yet")
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(pb.GetModelRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "prompt"),
        (pb.GenerateRequest(tokens=pb.TokenIds()), "prompt"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[260])), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat()), "messages"),
        (pb.GenerateRequest(text="x" * CONTEXT), "prompt"),
        (pb.GenerateRequest(text="x", n=10_000), "n"),
        (pb.GenerateRequest(text="x", stop=[""]), "stop"),
        (pb.GenerateRequest(text="x", timeout_s=-1), "timeout_s"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=CONTEXT)), "max_tokens"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=0)), "max_tokens"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logprobs=21)), "logprobs"),
    ],
)
def test_bad_requests(
    stub: inference_pb2_grpc.InferenceStub, server: Served, request_: pb.GenerateRequest, param: str
) -> None:
    code, metadata = failed(stub.Generate(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["diptych-error"] in ("InvalidRequest", "PromptTooLong")
    assert metadata["diptych-param"] == param and metadata["diptych-request-id"].startswith("gen-")
    assert server.source.requests == []


def test_typed_errors(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    code, metadata = failed(stub.Generate(pb.GenerateRequest(text="x", model="gpt")))
    assert (code, metadata["diptych-error"]) == (grpc.StatusCode.NOT_FOUND, "UnknownModel")
    server.source.fail = lambda made: WorkerLost("gone") if made == 1 else None
    code, metadata = failed(stub.Generate(pb.GenerateRequest(text="xy")))
    assert (code, metadata["diptych-error"]) == (grpc.StatusCode.UNAVAILABLE, "WorkerLost")
    server.source.admit_error = Overloaded("full", retry_after_s=2.5)
    code, metadata = failed(stub.Generate(pb.GenerateRequest(text="x")))
    assert (code, metadata["retry-after-s"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "2.5")


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_survives_the_wire(name: str) -> None:
    kind = ERRORS[name]
    error = kind("full", retry_after_s=7) if issubclass(kind, Overloaded) else kind("cause: remedy")
    error.param = "n"
    got = error_from_rpc(status_of(error), error.message, trailing_metadata(error, "gen-1"))
    assert type(got) is type(error)
    assert got.message == f"{error.message} (request id: gen-1)" and got.param == error.param
    if isinstance(got, Overloaded):
        assert got.retry_after_s == 7


def test_errors_that_no_server_named() -> None:
    def bare(code: grpc.StatusCode) -> DiptychError:
        return error_from_rpc(code, "words", ())

    assert type(bare(grpc.StatusCode.DEADLINE_EXCEEDED)) is DeadlineExceeded
    assert type(bare(grpc.StatusCode.INVALID_ARGUMENT)) is InvalidRequest
    assert "Is it running" in bare(grpc.StatusCode.UNAVAILABLE).message
    odd = error_from_rpc(grpc.StatusCode.UNKNOWN, None, (("retry-after-s", "soon"), ("diptych-error", "Nonsense")))
    assert odd.code == "internal_error" and odd.message.startswith("Nonsense")


@pytest.mark.parametrize("after", [0, 2])
def test_cancelling_aborts(stub: inference_pb2_grpc.InferenceStub, server: Served, after: int) -> None:
    source = server.source
    source.laps = None
    source.gate_after = after
    source.gate.clear()
    call = stub.Generate(pb.GenerateRequest(text="abc", n=2))
    for _ in range(2 * after):
        next(call)
    assert source.all_started(2).wait(60)
    assert source.closed == []
    call.cancel()
    assert source.all_closed.wait(60)
    assert len(source.closed) == 2 and source.num_delivered <= 2 * (after + 1)


def test_the_calls_own_deadline_is_the_requests(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    server.source.gate.clear()
    code, _ = failed(stub.Generate(pb.GenerateRequest(text="abc"), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.source.all_closed.wait(60)
    assert 0 < server.source.requests[0].timeout_s < 1  # gRPC sends it rounded up


def test_a_deadline_in_the_request_is_named(stub: inference_pb2_grpc.InferenceStub, server: Served) -> None:
    server.source.gate.clear()
    code, metadata = failed(stub.Generate(pb.GenerateRequest(text="abc", timeout_s=0.05)))
    assert (code, metadata["diptych-error"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DeadlineExceeded")


def test_health(channel: grpc.Channel, server: Served) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", "diptych.v1.Inference"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
    server.source.ready = False
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    statuses = iter(watch)
    while next(statuses).status != health_pb2.HealthCheckResponse.NOT_SERVING:
        pass
    watch.cancel()


def test_reflection(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"diptych.v1.Inference", "grpc.health.v1.Health"} <= names


def test_keys() -> None:
    with served(Echo(laps=1), api_key="sesame") as server, grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            code, got = failed(stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata))
            assert (code, got["diptych-error"]) == (grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated")
            assert "the API key is missing or wrong" in got["details"]
        right = (("authorization", "Bearer sesame"),)
        assert "".join(a.text for a in stub.Generate(pb.GenerateRequest(text="x"), metadata=right)) == "x"
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        code, _ = failed(reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest()])))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
