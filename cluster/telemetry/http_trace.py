"""Traces of HTTP calls: which are traced, by which names, and what their headers say."""

from collections.abc import Iterable
from http import HTTPStatus

from ...workers.telemetry.spans import AttributeValue
from .call_trace import CHAT, COMPLETION, EMBEDDINGS, CallTrace, Tracer

# Calls that compute, by their paths.
OPERATIONS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDINGS,
    "/invocations": CHAT,  # most are
}
CLIENT_LEFT = 499  # no status was sent: the client closed the connection

Headers = Iterable[tuple[bytes, bytes]]


def begin_http(
    tracer: Tracer, method: str, path: str, scheme: str, headers: Headers, now: float, request_id: str
) -> CallTrace | None:
    """Begin the trace of a call. None: such a call has none, or it is not sampled."""
    operation = OPERATIONS.get(path) if method == "POST" else None
    if operation is None:
        return None
    attributes: dict[str, AttributeValue] = {
        "http.request.method": method,
        "http.route": path,
        "url.path": path,
        "url.scheme": scheme,
        "diptych.request.id": request_id,
    }
    return tracer.begin(operation, context_headers(headers), now, attributes)


def context_headers(headers: Headers) -> tuple[str, str]:
    """traceparent and tracestate; empty where they are missing. Of several states, all in order."""
    parent, states = "", list[str]()
    for name, value in headers:
        if name == b"traceparent" and not parent:
            parent = value.decode("latin-1")
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    return parent, ",".join(states)


def end_http(tracer: Tracer, trace: CallTrace, status: int | None, now: float) -> None:
    """End a trace. `status`: of the answer; None: none was sent."""
    status = CLIENT_LEFT if status is None else status
    trace.attributes["http.response.status_code"] = status
    tracer.end(trace, now, str(status) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None)
