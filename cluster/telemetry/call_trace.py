"""Trace of one call of the front door, from its headers to its last byte.

    Tracer.begin ── the call's own span ── journal(i): one for each request to the router ── Tracer.end ──> SpanExport

A call that is not sampled, and every call where traces are off, has no CallTrace. Spans are made of it after its end
(call_spans.py), on another thread. No text of prompts and answers is in it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...workers.common.errors import RequestAborted
from ...workers.common.request import Request
from ...workers.telemetry.export import SpanExport
from ...workers.telemetry.spans import AttributeValue, WallClock
from ...workers.telemetry.trace_context import SpanContext, new_span_id, new_trace_id, parse_context
from ..common.timings import RequestJournal
from .call_spans import CallFacts, call_spans

TRACE = "trace"  # in an HTTP call's state: its CallTrace; absent where it has none
RESPONSE_HEADER = "traceresponse"  # W3C Trace Context, Level 2: ids of the call's span
PROVIDER = "diptych"
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"  # of gen_ai.operation.name


class TracedUsage(Protocol):
    """Tokens that a call used."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...


class TracedAnswer(Protocol):
    """Answer of a call, which its trace asks when it has ended."""

    @property
    def usage(self) -> TracedUsage: ...

    @property
    def finish_reasons(self) -> Sequence[str]: ...


@dataclass(slots=True, eq=False)
class CallTrace:
    """Trace of one call. `began_at`: seconds, on the event loop's clock, as all times of it."""

    context: SpanContext
    parent: SpanContext | None
    clock: WallClock
    began_at: float
    operation: str
    attributes: dict[str, AttributeValue]
    model: str = ""
    journals: list[RequestJournal] = field(default_factory=list[RequestJournal])
    _answer: TracedAnswer | None = None

    @property
    def response_header(self) -> str:
        return self.context.traceparent

    def journal(self, index: int) -> RequestJournal:
        """Make the journal of a request to the router, which is its `trace`."""
        made = RequestJournal(index, self.context.traceparent, self.context.state)
        self.journals.append(made)
        return made

    def follow(self, answer: TracedAnswer, model: str, request: Request, *, request_id: str, n: int = 1) -> None:
        """Note what was asked for. `request`: the first of the call; `model`: as the client named it."""
        self._answer, self.model = answer, model
        sampling = request.sampling
        self.attributes |= {
            "gen_ai.request.model": model,
            "gen_ai.response.id": request_id,
            "diptych.service_tier": request.level.tier,
        }
        if request.embeds:
            return
        self.attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.seed": str(sampling.seed),  # 64 bits without a sign: too large for a number of OTLP
        }
        if n != 1:
            self.attributes["gen_ai.request.choice.count"] = n

    def ended(self, now: float, error: str | None) -> CallFacts:
        """Take what its answer says in the end. `error`: code of what the front door answered; None: none."""
        self.attributes["gen_ai.operation.name"] = self.operation
        if (answer := self._answer) is not None:
            usage, self._answer = answer.usage, None
            self.attributes |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
            if reasons := list(answer.finish_reasons):
                self.attributes["gen_ai.response.finish_reasons"] = reasons
        failed = [j.error.code for j in self.journals if j.error is not None and j.error.code != RequestAborted.code]
        return CallFacts(
            name=f"{self.operation} {self.model}".strip(),
            context=self.context,
            parent=self.parent,
            clock=self.clock,
            began_at=self.began_at,
            ended_at=now,
            attributes=self.attributes,
            journals=self.journals,
            error=failed[0] if failed else error,
        )


class Tracer:
    """Begins the traces of calls and has their spans sent."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    def begin(
        self, operation: str, headers: tuple[str, str], now: float, attributes: Mapping[str, AttributeValue]
    ) -> CallTrace | None:
        """Begin the trace of a call. `headers`: traceparent and tracestate, empty where there are none. None: it is
        not sampled."""
        parent = parse_context(*headers)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        if not self._export.sampler.samples(parent, trace_id):
            return None
        context = SpanContext(trace_id, new_span_id(), True, "" if parent is None else parent.state)
        own: dict[str, AttributeValue] = {"gen_ai.provider.name": PROVIDER}
        return CallTrace(context, parent, WallClock(time.time_ns(), now), now, operation, own | dict(attributes))

    def end(self, trace: CallTrace, now: float, error: str | None = None) -> None:
        """Have the spans of a call sent, which has ended."""
        self._export.put(partial(call_spans, trace.ended(now, error)))
