"""Spans of a call that has ended.

    SERVER span of the call: gen_ai.*, http.* or rpc.*, events
    ├── prepare          the call is read, and its prompt tokenised
    ├── queue … decode   phases of its request (docs/observability.md), each with the worker that it was spent on
    ├── respond          the last token is turned into the answer's end
    └── spans of workers, which they send themselves

The children up to `respond` follow each other without a gap: of a call with one completion, they sum to the call. Those
of several completions each sum to their own, and have its index. All times are of the router's clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...workers.telemetry.spans import Attributes, AttributeValue, SpanEvent, SpanKind, SpanRecord, WallClock
from ...workers.telemetry.trace_context import SpanContext
from ..common.timings import RequestJournal, RequestTimings
from .phases import RequestPhase, phases_of

PHASE = "diptych.phase"  # attribute of the spans that sum to the call


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Everything that the spans of a call are made of. `error`: its code; None: none."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    clock: WallClock
    began_at: float
    ended_at: float
    attributes: Attributes
    journals: Sequence[RequestJournal]
    error: str | None


def call_spans(call: CallFacts) -> list[SpanRecord]:
    """Spans of the call and of its phases."""
    begun = [journal for journal in call.journals if journal.times is not None]
    whole = SpanRecord(
        name=call.name,
        context=call.context,
        parent=call.parent,
        start_ns=call.clock.ns(call.began_at),
        end_ns=call.clock.ns(call.ended_at),
        kind=SpanKind.SERVER,
        attributes={**call.attributes, **_outcome(call, begun)},
        events=tuple(_events(call, begun)),
        error=call.error,
    )
    phases = [(phase, journal) for journal in begun for phase in phases_of(journal)]
    children = [_span(call, phase, journal.index if len(begun) > 1 else None) for phase, journal in phases]
    if phases:
        first, last = min(phase.start for phase, _ in phases), max(phase.end for phase, _ in phases)
        children = [
            _span(call, RequestPhase("prepare", call.began_at, first), None),
            *children,
            _span(call, RequestPhase("respond", last, call.ended_at), None),
        ]
    return [whole, *children]


def _span(call: CallFacts, phase: RequestPhase, index: int | None) -> SpanRecord:
    attributes: dict[str, AttributeValue] = {PHASE: phase.name}
    if phase.worker:
        attributes["diptych.worker"] = phase.worker
    if index is not None:
        attributes["diptych.completion.index"] = index
    start_ns, end_ns = call.clock.ns(phase.start), call.clock.ns(phase.end)
    return SpanRecord(phase.name, call.context.child(), call.context, start_ns, end_ns, attributes=attributes)


def _outcome(call: CallFacts, begun: Sequence[RequestJournal]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {} if call.error is None else {"error.type": call.error}
    timings = [journal.timings for journal in begun if journal.timings is not None]
    if not timings:
        return found
    ttft_s = min(each.queue_s + each.prefill_s + each.deliver_first_s for each in timings)
    found |= {
        "gen_ai.server.time_to_first_token": ttft_s,  # seconds
        "diptych.attempts": sum(each.num_attempts for each in timings),
        "diptych.migrations": sum(each.num_migrations for each in timings),
        "diptych.drafted_tokens": sum(each.num_drafted for each in timings),
        "diptych.accepted_tokens": sum(each.num_accepted for each in timings),
    }
    return found | _handoff(timings)


def _handoff(timings: Sequence[RequestTimings]) -> dict[str, AttributeValue]:
    moved = [each for each in timings if each.transport]
    if not moved:
        return {}
    return {
        "diptych.handoff.bytes": sum(each.handoff_bytes for each in moved),
        "diptych.handoff.transport": sorted({each.transport for each in moved}),
        "diptych.handoff.announce_to_pull_s": max(each.announce_to_pull_s for each in moved),
        "diptych.handoff.pull_s": max(each.pull_s for each in moved),
    }


def _events(call: CallFacts, begun: Sequence[RequestJournal]) -> Iterator[SpanEvent]:
    """Attempts, failed ones, migrations and the error that ended a request."""
    for journal in begun:
        for event in journal.events:
            attributes = {"diptych.worker": event.worker, "diptych.detail": event.detail}
            attributes |= {"diptych.completion.index": journal.index} if len(begun) > 1 else {}
            yield SpanEvent(event.what, call.clock.ns(event.at), attributes)
        if journal.error is not None and journal.ended_at is not None:
            yield SpanEvent("ended", call.clock.ns(journal.ended_at), {"error.type": journal.error.code})
