"""Collector of OpenTelemetry that keeps what it gets: a server of the published protocol, over HTTP and over gRPC."""

import gzip
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 60.0


@dataclass(frozen=True)
class Collected:
    """Span as it came. Ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: list[tuple[str, Mapping[str, Any]]]
    status: int
    state: str
    resource: Mapping[str, Any]

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def value_of(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def as_dict(attributes: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in attributes}


@dataclass
class Collector:
    """Spans that came, and what is answered: while `refuses`, an error."""

    endpoint: str = ""
    spans: list[Collected] = field(default_factory=list[Collected])
    num_messages: int = 0
    refuses: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, message: trace_service_pb2.ExportTraceServiceRequest) -> bool:
        with self.changed:
            self.num_messages += 1
            if not self.refuses:
                for group in message.resource_spans:
                    resource = as_dict(group.resource.attributes)
                    for scope in group.scope_spans:
                        self.spans += [_collected(span, resource) for span in scope.spans]
            self.changed.notify_all()
            return not self.refuses

    def wait_for(self, is_there: Any) -> Any:
        """Wait until `is_there` is true of the spans; return what it returns."""
        with self.changed:
            assert self.changed.wait_for(lambda: is_there(self.spans), WAIT_S), [span.name for span in self.spans]
            return is_there(self.spans)


def _collected(span: trace_pb2.Span, resource: Mapping[str, Any]) -> Collected:
    return Collected(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        as_dict(span.attributes),
        [(event.name, as_dict(event.attributes)) for event in span.events],
        span.status.code,
        span.trace_state,
        resource,
    )


@contextmanager
def http_collector() -> Iterator[Collector]:
    """OTLP over HTTP, on a port that the kernel chooses."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            took = collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if took else 400)
            answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """OTLP over gRPC, on a port that the kernel chooses."""
    collector = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if not collector.take(request):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
