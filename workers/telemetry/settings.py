"""Settings of traces: those of the cluster, and OpenTelemetry's own variables where it says nothing.

    OTEL_SDK_DISABLED                          true: no traces, whatever else is set
    OTEL_TRACES_EXPORTER                       otlp: on; none: off
    OTEL_EXPORTER_OTLP[_TRACES]_ENDPOINT       on, and where to
    OTEL_EXPORTER_OTLP[_TRACES]_PROTOCOL       http/protobuf (default) or grpc
    OTEL_TRACES_SAMPLER, …_ARG                 which traces
    OTEL_BSP_*                                 queue and batches

The exporter itself reads the others: headers, time-out, certificates, compression, OTEL_RESOURCE_ATTRIBUTES.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..common.errors import ConfigError
from .sampling import TraceSampler, read_sampler

PROTOCOLS = ("http/protobuf", "grpc")
BATCH_SPANS = 64  # OpenTelemetry has 512: while a message is made, the event loop waits for the interpreter
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of one process: the collector, the traces that are recorded, and how many wait."""

    protocol: str
    endpoint: str | None = None  # None: as the exporter's variables say
    sampler: TraceSampler = field(default_factory=TraceSampler)
    max_waiting: int = 2048  # parts of traces, each of one process: further ones are dropped
    batch_spans: int = BATCH_SPANS  # in a message to the collector
    delay_s: float = 5.0  # between two messages


def trace_settings(
    endpoint: str | None, protocol: str | None, ratio: float | None, environ: Mapping[str, str]
) -> TraceSettings | None:
    """Settings of traces; None: there are none. The first three are the cluster's. Raises ConfigError."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (endpoint or _is_on(environ)):
        return None
    named = protocol or _first(environ, _PROTOCOLS) or PROTOCOLS[0]
    if named not in PROTOCOLS:
        raise ConfigError(f"{_PROTOCOLS[1]} is {named!r}: use {' or '.join(PROTOCOLS)}")
    sampler = read_sampler(environ.get("OTEL_TRACES_SAMPLER"), environ.get("OTEL_TRACES_SAMPLER_ARG"))
    return TraceSettings(
        protocol=named,
        endpoint=endpoint,
        sampler=sampler if ratio is None else TraceSampler(ratio),
        max_waiting=_number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 2048),
        batch_spans=_number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS),
        delay_s=_number(environ, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3,
    )


def _is_on(environ: Mapping[str, str]) -> bool:
    """Return whether the variables ask for traces. Raises ConfigError for an exporter that is not there."""
    if exporters := environ.get("OTEL_TRACES_EXPORTER", ""):
        names = {name.strip() for name in exporters.split(",")}
        if "otlp" not in names and names != {"none"}:
            raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporters!r}: only otlp is there, and none")
        return "otlp" in names
    return _first(environ, _ENDPOINTS) is not None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigError(f"{name} is {text!r}: it must be a whole number above 0")
    return int(text)
