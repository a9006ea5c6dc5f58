"""OTLP by OpenTelemetry's own exporters; the only file that imports its SDK, and only where traces are on."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ... import __version__
from ..common.errors import ConfigError
from .settings import TraceSettings
from .spans import SpanKind, SpanRecord
from .trace_context import SpanContext

SCOPE = "diptych"
TRACES_PATH = "/v1/traces"
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}
Send = Callable[[Sequence[SpanRecord]], bool]  # returns whether the collector took them


def check_installed(settings: TraceSettings | None) -> None:
    """Raise ConfigError where traces are configured and OpenTelemetry is not installed."""
    needed = () if settings is None else ("opentelemetry.sdk.trace", _EXPORTERS[settings.protocol])
    try:
        missing = [name for name in needed if find_spec(name) is None]
    except ModuleNotFoundError as e:
        missing = [e.name or "opentelemetry"]
    if missing:
        raise ConfigError(
            f"traces are configured (otlp_endpoint, or OTEL_* variables), but {missing[0]} is not installed: run "
            "`pip install 'diptych[otel]'`, or leave them out (OTEL_SDK_DISABLED=true turns the variables off)"
        )


def open_exporter(settings: TraceSettings, resource: Mapping[str, str]) -> tuple[Send, Callable[[], object]]:
    """Function that sends spans, and one that ends it, also while it tries again. `resource`: attributes of this
    process, below those of OTEL_RESOURCE_ATTRIBUTES. Raises ConfigError."""
    check_installed(settings)
    # Each failed message would be a log line of theirs: ours says it once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter, readable = _exporter(settings), readable_by(resource)

    def send(records: Sequence[SpanRecord]) -> bool:
        made: list[Any] = []
        for record in records:
            made.append(readable(record))
            time.sleep(0)  # the event loop may need the interpreter
        return exporter.export(made) is SpanExportResult.SUCCESS

    return send, exporter.shutdown


def _exporter(settings: TraceSettings) -> Any:
    endpoint = settings.endpoint
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = None if endpoint is None else endpoint.startswith("http://")
        return OTLPSpanExporter(endpoint=endpoint, insecure=insecure)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    if endpoint is not None:
        endpoint = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
    return OverHttp(endpoint=endpoint)


def readable_by(resource: Mapping[str, str]) -> Callable[[SpanRecord], Any]:
    """Function that gives a span the form of the SDK, which its exporters take."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext as OtelContext
    from opentelemetry.trace import SpanKind as OtelKind
    from opentelemetry.trace import Status, StatusCode, TraceFlags, TraceState

    own = Resource.create({**resource, **OTELResourceDetector().detect().attributes})
    scope = InstrumentationScope(SCOPE, __version__)
    kinds = {SpanKind.INTERNAL: OtelKind.INTERNAL, SpanKind.SERVER: OtelKind.SERVER}

    def context_of(context: SpanContext, *, is_remote: bool) -> OtelContext:
        return OtelContext(
            trace_id=int(context.trace_id, 16),
            span_id=int(context.span_id, 16),
            is_remote=is_remote,
            trace_flags=TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT),
            trace_state=TraceState.from_header([context.state] if context.state else []),
        )

    def readable(record: SpanRecord) -> ReadableSpan:
        parent, error = record.parent, record.error
        return ReadableSpan(
            name=record.name,
            context=context_of(record.context, is_remote=False),
            parent=None if parent is None else context_of(parent, is_remote=record.kind is SpanKind.SERVER),
            resource=own,
            attributes=dict(record.attributes),
            events=[Event(each.name, dict(each.attributes), each.at_ns) for each in record.events],
            kind=kinds[record.kind],
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=record.start_ns,
            end_time=record.end_ns,
            instrumentation_scope=scope,
        )

    return readable
