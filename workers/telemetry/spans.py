"""Spans as plain data. They are made when a request has ended, and otlp.py turns them into OpenTelemetry's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .trace_context import SpanContext

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]


class SpanKind(Enum):
    INTERNAL = "internal"
    SERVER = "server"  # of a call that came from another process


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one time within a span."""

    name: str
    at_ns: int  # since 1970
    attributes: Attributes = field(default_factory=dict[str, AttributeValue])


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """Span that has ended. Its parent may be another process's."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ns: int  # since 1970, as for the end
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict[str, AttributeValue])
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None  # description of what went wrong; None: nothing did


@dataclass(frozen=True, slots=True)
class WallClock:
    """Wall time of the instants of a monotonic clock, of one process, by one reading of both."""

    wall_ns: int
    at: float  # seconds

    def ns(self, at: float) -> int:
        """Nanoseconds since 1970."""
        return self.wall_ns + round((at - self.at) * 1e9)
