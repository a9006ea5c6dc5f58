"""Traces of gRPC calls: which are traced, by which names, and what their metadata say."""

import asyncio
from collections.abc import Iterable, Sequence

import grpc

from ....workers.telemetry.logs import CALL, CallIds
from ...telemetry.call_trace import COMPLETION, EMBEDDINGS, RESPONSE_HEADER, CallTrace, Tracer
from ...telemetry.http_trace import context_headers

# Operation and method of each call, by the beginning of its id.
_CALLS = {"gen": (COMPLETION, "Generate"), "embd": (EMBEDDINGS, "Embed")}
_SERVICE = "diptych.v1.Inference"
# Status codes that tell of a fault of ours, as OpenTelemetry's conventions for gRPC name them.
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def begin_rpc(
    tracer: Tracer | None, kind: str, metadata: Iterable[tuple[str, str | bytes]], request_id: str
) -> CallTrace | None:
    """Begin the trace of a call. None: traces are off, or it is not sampled. Log lines of the call have its ids."""
    trace = None
    if tracer is not None:
        operation, method = _CALLS[kind]
        headers = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in metadata]
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": _SERVICE,
            "rpc.method": method,
            "diptych.request.id": request_id,
        }
        trace = tracer.begin(operation, context_headers(headers), asyncio.get_running_loop().time(), attributes)
    ids = () if trace is None else (trace.context.trace_id, trace.context.span_id)
    CALL.set(CallIds(request_id, *ids))
    return trace


def trace_metadata(trace: CallTrace | None) -> Sequence[tuple[str, str]]:
    """Metadata of the answer that name its trace."""
    return () if trace is None else ((RESPONSE_HEADER, trace.response_header),)


def end_rpc(tracer: Tracer | None, trace: CallTrace | None, status: grpc.StatusCode) -> None:
    if tracer is not None and trace is not None:
        trace.attributes["rpc.grpc.status_code"] = status.value[0]
        tracer.end(trace, asyncio.get_running_loop().time(), status.name if status in _FAULTS else None)
