"""Choice of the traces that are recorded: OpenTelemetry's samplers by their names in OTEL_TRACES_SAMPLER. Pure.

Each is a ratio of the traces that begin here, and, if it is based on the parent, the caller's own choice for others.
The choice by ratio is a function of the trace's id, so that all processes make the same.
"""

from dataclasses import dataclass

from ..common.errors import ConfigError
from .trace_context import SpanContext

DEFAULT_SAMPLER = "parentbased_always_on"
_PARENT_BASED = "parentbased_"
_ID_BITS = 64  # of a trace's id, the last ones, which are random


@dataclass(frozen=True, slots=True)
class TraceSampler:
    ratio: float = 1.0  # of the traces
    follows_parent: bool = True

    def samples(self, parent: SpanContext | None, trace_id: str) -> bool:
        """Return whether the trace is recorded."""
        if parent is not None and self.follows_parent:
            return parent.is_sampled
        return int(trace_id[-_ID_BITS // 4 :], 16) < round(self.ratio * (1 << _ID_BITS))


def read_sampler(name: str | None, argument: str | None) -> TraceSampler:
    """Sampler that the variables OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG name. Raises ConfigError."""
    name = name or DEFAULT_SAMPLER
    follows_parent, kind = name.startswith(_PARENT_BASED), name.removeprefix(_PARENT_BASED)
    match kind:
        case "always_on":
            return TraceSampler(1.0, follows_parent)
        case "always_off":
            return TraceSampler(0.0, follows_parent)
        case "traceidratio":
            return TraceSampler(_ratio(argument), follows_parent)
        case _:
            raise ConfigError(
                f"OTEL_TRACES_SAMPLER is {name!r}: use always_on, always_off, traceidratio, or one of them after "
                f"{_PARENT_BASED}"
            )


def _ratio(text: str | None) -> float:
    try:
        ratio = 1.0 if not text else float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG is {text!r}: it must be a ratio between 0 and 1")
    return ratio
