"""Spans of one worker: of each worker request that is traced, with its phases.

    SERVER span "prefill", "decode", … ── child of the router's span of the call, by the Submit's traceparent
    ├── queue, then prefill or first_decode     until the first token here
    └── announce_to_pull, pull, last_segment, release    at a sink: the hand-off

The worker measures durations, and its spans are placed before the instant at which the token was sent. So they have
the right length; where they lie beside the spans of other processes is as right as their clocks. `pull` is
the time in which a read was under way, as if without pauses.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ... import __version__
from ...proto import worker_pb2
from ..common.timings import HandoffTimings, SequenceTimings
from ..config.worker_config import WorkerConfig
from ..engine.events import StepOutput
from ..handoff.types import HandoffSealed
from ..telemetry.export import SpanExport
from ..telemetry.spans import AttributeValue, SpanKind, SpanRecord
from ..telemetry.trace_context import SpanContext, parse_context

MAX_OPEN = 4096  # worker requests that are followed at a time


@dataclass(slots=True, eq=False)
class _Traced:
    """Worker request that runs."""

    part: str
    parent: SpanContext
    began_ns: int
    ends_with_first: bool  # a sequence that is handed off makes one token here
    attributes: dict[str, AttributeValue]
    first_ns: int = 0  # when its first token was sent; 0: not yet
    timings: SequenceTimings | None = None
    num_tokens: int = 0
    error: str | None = None
    ended_ns: int = 0


class WorkerSpans:
    """Spans of the worker requests that their routers trace. On one event loop; each method ignores what is not
    followed."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export
        self._traced: dict[str, _Traced] = {}  # by key of the sequence

    @property
    def num_dropped(self) -> int:
        return self._export.num_dropped

    def begin(self, key: str, submit: worker_pb2.Submit) -> None:
        """Follow a worker request, if it is traced."""
        parent = parse_context(submit.traceparent, submit.tracestate)
        if parent is None or not parent.is_sampled or len(self._traced) >= MAX_OPEN:
            return
        hands_off = submit.HasField("offer")
        attributes: dict[str, AttributeValue] = {
            "diptych.request.id": submit.request_id,
            "diptych.prompt_tokens": len(submit.prompt_token_ids),
            "diptych.output_tokens_before": len(submit.output_token_ids),
        }
        ends_with_first = hands_off and not submit.offer.is_prefix
        self._traced[key] = _Traced(_part(submit), parent, time.time_ns(), ends_with_first, attributes)

    def on_step(self, output: StepOutput) -> None:
        """Note what a step made."""
        if not self._traced:
            return
        tokens = output.tokens
        for entry, note in tokens.notes.items():
            key = tokens.keys[entry]
            if (traced := self._traced.get(key)) is None:
                continue
            if note.timings is not None:
                traced.first_ns, traced.timings = time.time_ns(), note.timings
            if note.num_cached is not None:
                traced.attributes["diptych.cached_tokens"] = note.num_cached
            if note.finish is not None or (note.timings is not None and traced.ends_with_first):
                traced.num_tokens = tokens.positions[entry] + 1
                self.end(key, "" if note.finish is None else note.finish.value)
        for key, found in output.embeddings:
            if (traced := self._traced.get(key)) is not None:
                traced.first_ns, traced.timings = time.time_ns(), found.timings
                self.end(key, "stop")
        for failure in output.failures:
            self.end(failure.key, "", failure.error.code)
        for event in output.handoffs:
            if isinstance(event, HandoffSealed) and event.key is not None and event.key in self._traced:
                self._traced[event.key].num_tokens = len(event.output_token_ids)
                self.end(event.key, "handed off")

    def end(self, key: str, outcome: str, error: str | None = None) -> None:
        """End a worker request. `error`: its code."""
        if (traced := self._traced.pop(key, None)) is None:
            return
        traced.ended_ns, traced.error = time.time_ns(), error
        if outcome:
            traced.attributes["diptych.outcome"] = outcome
        self._export.put(partial(worker_spans, traced))

    def close(self) -> None:
        """Send what has ended. Blocks for a moment."""
        self._export.close()


def open_spans(config: WorkerConfig, incarnation: str) -> WorkerSpans | None:
    """Spans of the worker process. None: its traces are off. Raises ConfigError."""
    resource = {
        "service.name": "diptych-worker",
        "service.instance.id": incarnation,
        "service.version": __version__,
        "diptych.role": config.role,
    }
    export = SpanExport.open(config.telemetry.trace_settings(os.environ), resource)
    return None if export is None else WorkerSpans(export)


def worker_spans(traced: _Traced) -> Iterator[SpanRecord]:
    """Spans of a worker request that has ended."""
    own, attributes = traced.parent.child(), traced.attributes
    if traced.num_tokens:
        attributes = attributes | {"diptych.output_tokens": traced.num_tokens}
    if traced.error is not None:
        attributes = attributes | {"error.type": traced.error}
    yield SpanRecord(
        name=traced.part,
        context=own,
        parent=traced.parent,
        start_ns=traced.began_ns,
        end_ns=traced.ended_ns,
        kind=SpanKind.SERVER,
        attributes=attributes,
        error=traced.error,
    )
    if (timings := traced.timings) is None:
        return
    computing = "first_decode" if traced.part == "decode" else "prefill"
    started_ns = traced.first_ns - _ns(timings.compute_s)
    ready_ns = started_ns - _ns(timings.queue_s)
    yield _child(computing, own, started_ns, traced.first_ns)
    yield _child("queue", own, ready_ns, started_ns)
    if timings.handoff is not None:
        yield from _handoff_spans(own, timings.handoff, ready_ns)


def _handoff_spans(own: SpanContext, times: HandoffTimings, ready_ns: int) -> Iterator[SpanRecord]:
    """Spans of the hand-off of a sink that might compute from `ready_ns` on."""
    read_ns = ready_ns - _ns(times.release_s)
    pulling_ns = read_ns - _ns(times.pull_s)
    attributes: dict[str, AttributeValue] = {
        "diptych.handoff.bytes": times.num_bytes,
        "diptych.handoff.transport": times.transport,
    }
    yield _child("announce_to_pull", own, pulling_ns - _ns(times.announce_to_pull_s), pulling_ns)
    yield _child("pull", own, pulling_ns, read_ns, attributes)
    yield _child("last_segment", own, read_ns - _ns(times.last_segment_s), read_ns)
    yield _child("release", own, read_ns, ready_ns)


def _child(
    name: str, parent: SpanContext, start_ns: int, end_ns: int, attributes: dict[str, AttributeValue] | None = None
) -> SpanRecord:
    return SpanRecord(name, parent.child(), parent, start_ns, end_ns, attributes=attributes or {})


def _part(submit: worker_pb2.Submit) -> str:
    """Part of the request that the worker computes, as routers call it (cluster/routing/actions.py)."""
    if submit.HasField("source"):
        return "decode"
    if submit.HasField("offer"):
        return "prefix" if submit.offer.is_prefix else "prefill"
    return "alone"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
