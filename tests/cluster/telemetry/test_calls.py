"""Which calls of the front door are traced, and what they say of it."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import httpx
import pytest

from diptych.cluster.telemetry.call_trace import Tracer
from diptych.proto import inference_pb2, inference_pb2_grpc
from diptych.workers.common.errors import InternalError
from diptych.workers.telemetry.export import MakeSpans, SpanExport
from diptych.workers.telemetry.logs import JsonFormatter
from diptych.workers.telemetry.sampling import TraceSampler
from diptych.workers.telemetry.settings import TraceSettings
from diptych.workers.telemetry.spans import SpanRecord
from diptych.workers.telemetry.trace_context import parse_context

from ...support.front import Echo, Served, served

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "a secret", "max_tokens": 5}


class Kept(SpanExport):
    """Export that keeps the spans of each call, and sends none."""

    def __init__(self, sampler: TraceSampler) -> None:
        super().__init__(TraceSettings("grpc", sampler=sampler), lambda _: True, lambda: None)
        self.calls: list[list[SpanRecord]] = []
        self.came = threading.Condition()

    def put(self, make: MakeSpans) -> None:
        with self.came:
            self.calls.append(list(make()))
            self.came.notify_all()

    def wait(self, num: int) -> list[list[SpanRecord]]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.calls) >= num, 60)
            return self.calls


@dataclass
class Traced:
    served: Served
    export: Kept

    def post(self, path: str, body: dict[str, object], **headers: str) -> httpx.Response:
        return httpx.post(f"{self.served.url}{path}", json=body, headers=headers)


@contextmanager
def tracing(sampler: TraceSampler) -> Iterator[Traced]:
    export = Kept(sampler)
    with served(Echo(), tracer=Tracer(export)) as it:
        yield Traced(it, export)
    export.close()


@pytest.fixture(scope="module")
def front_door() -> Iterator[Traced]:
    with tracing(TraceSampler()) as it:
        yield it


@pytest.fixture
def traced(front_door: Traced) -> Traced:
    front_door.export.calls.clear()
    front_door.served.source.requests.clear()
    return front_door


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", BODY, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5}, "chat"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5}, "chat"),
        ("/v1/responses", {"input": "a secret", "max_output_tokens": 5}, "chat"),
        ("/v1/responses", {"input": "a secret", "max_output_tokens": 5, "background": True}, "chat"),
        ("/v1/embeddings", {"input": "a secret"}, "embeddings"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_compute_are_traced(
    traced: Traced, path: str, body: dict[str, object], operation: str, stream: bool
) -> None:
    if stream and operation != "embeddings":
        body = body | {"stream": True}
    answer = traced.post(path, body, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="a=1")
    assert answer.status_code == 200, answer.text
    ((whole, *_),) = traced.export.wait(1)
    assert whole.name == f"{operation} echo"
    assert answer.headers["traceresponse"] == whole.context.traceparent
    assert (whole.parent, whole.context.state) == (parse_context(f"00-{TRACE}-{SPAN}-01", "a=1"), "a=1")
    said = whole.attributes
    assert (said["gen_ai.operation.name"], said["gen_ai.provider.name"]) == (operation, "diptych")
    assert (said["http.route"], said["http.response.status_code"]) == (path, 200)
    assert said["diptych.request.id"] == answer.headers["x-request-id"]
    assert said["gen_ai.usage.input_tokens"]
    if operation != "embeddings":
        assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (5, ["length"])
        assert said["gen_ai.request.max_tokens"] == 5
    assert "secret" not in repr(traced.export.calls)
    requests = traced.served.source.requests
    assert all(r.trace and r.trace.traceparent == whole.context.traceparent for r in requests)


def test_each_completion_has_a_journal(traced: Traced) -> None:
    traced.post("/v1/completions", BODY | {"n": 3})
    traced.export.wait(1)
    traces = [request.trace for request in traced.served.source.requests]
    assert sorted(trace.index for trace in traces) == [0, 1, 2]  # type: ignore[union-attr]


def test_an_answer_that_is_wrong_is_named(traced: Traced) -> None:
    assert traced.post("/v1/completions", BODY | {"temperature": -1}).status_code == 400
    traced.served.source.model_error = InternalError("a secret bug")
    assert traced.post("/v1/completions", BODY).status_code == 500
    traced.served.source.model_error = None
    (refused,), (failed,) = traced.export.wait(2)
    assert (refused.error, refused.attributes["http.response.status_code"]) == (None, 400)
    assert (failed.error, failed.attributes["error.type"]) == ("500", "500")
    assert "secret" not in repr((refused, failed))


def test_other_paths_are_not_traced(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/version"):
        assert "traceresponse" not in httpx.get(f"{traced.served.url}{path}").headers
    assert "traceresponse" not in traced.post("/tokenize", {"prompt": "x"}).headers
    assert traced.export.calls == []


@pytest.mark.parametrize(
    ("sampler", "flags", "is_traced"),
    [
        (TraceSampler(0.0), None, False),
        (TraceSampler(0.0), "01", True),
        (TraceSampler(1.0), "00", False),
        (TraceSampler(1.0, follows_parent=False), "00", True),
    ],
)
def test_callers_choose_what_is_traced_unless_the_sampler_does(
    sampler: TraceSampler, flags: str | None, is_traced: bool
) -> None:
    headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
    with tracing(sampler) as traced:
        answer = traced.post("/v1/completions", BODY, **headers)
    assert answer.status_code == 200
    assert ("traceresponse" in answer.headers) == is_traced
    assert (traced.served.source.requests[0].trace is not None) == is_traced


def test_a_call_over_grpc(traced: Traced) -> None:
    with grpc.insecure_channel(traced.served.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = inference_pb2.SamplingParams(max_tokens=5)
        metadata = (("traceparent", f"00-{TRACE}-{SPAN}-01"),)
        call = stub.Generate(inference_pb2.GenerateRequest(text="a secret", sampling=sampling), metadata=metadata)
        header = dict(call.initial_metadata())["traceresponse"]
        list(call)
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(inference_pb2.GenerateRequest(sampling=sampling)))
    (whole, *_), (refused,) = traced.export.wait(2)
    assert (whole.name, whole.context.traceparent) == ("text_completion echo", header)
    assert whole.parent == parse_context(f"00-{TRACE}-{SPAN}-01")
    assert (whole.attributes["rpc.method"], whole.attributes["rpc.grpc.status_code"]) == ("Generate", 0)
    assert (refused.error, refused.attributes["rpc.grpc.status_code"]) == (None, 3)


def test_lines_of_the_log_have_the_ids_of_their_call(traced: Traced) -> None:
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(JsonFormatter("router").format(record))

    log, handler = logging.getLogger("diptych.fields"), Handler()
    source = traced.served.source
    original = source.stream

    def stream(request: object) -> object:
        log.warning("asked")
        return original(request)  # type: ignore[arg-type]

    source.stream = stream  # type: ignore[method-assign, assignment]
    log.addHandler(handler)
    try:
        answer = traced.post("/v1/completions", BODY)
    finally:
        log.removeHandler(handler)
        source.stream = original  # type: ignore[method-assign]
    (line,) = [json.loads(each) for each in written]
    ((whole, *_),) = traced.export.wait(1)
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["trace_id"], line["span_id"]) == (whole.context.trace_id, whole.context.span_id)


def test_without_a_tracer_nothing_is_traced() -> None:
    with served(Echo()) as it:
        answer = httpx.post(f"{it.url}/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert "traceresponse" not in answer.headers
        assert it.source.requests[0].trace is None
