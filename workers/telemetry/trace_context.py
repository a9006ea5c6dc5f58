"""Trace context of W3C (Trace Context, Level 2): reads and writes the headers `traceparent` and `tracestate`. Pure.

traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
             version, id of the trace, id of the span that is the parent, flags (1: it is recorded)
"""

import re
import secrets
from dataclasses import dataclass

MAX_STATE_CHARS = 512  # of tracestate; a longer one is dropped, as section 3.3 allows
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Ids of a span, as other processes know it. Ids are in hexadecimal."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits
    is_sampled: bool = True
    state: str = ""  # tracestate, which is passed on as it came

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.is_sampled else 0:02x}"

    def child(self) -> "SpanContext":
        """Make the context of a new span of the same trace."""
        return SpanContext(self.trace_id, new_span_id(), self.is_sampled, self.state)


def parse_context(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Context that the headers name. None: there is none, or it is not valid; then a new trace begins."""
    if len(traceparent) > MAX_STATE_CHARS or not (found := _PARENT.fullmatch(traceparent.strip())):
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_invalid = version == "ff" or (version == "00" and more is not None)
    if is_invalid or not int(trace_id, 16) or not int(span_id, 16):
        return None
    has_state = len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    return SpanContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), tracestate if has_state else "")


def new_span_id() -> str:
    return f"{secrets.randbits(64) or 1:016x}"


def new_trace_id() -> str:
    return f"{secrets.randbits(128) or 1:032x}"
