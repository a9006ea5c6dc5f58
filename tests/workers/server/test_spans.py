"""Spans of a worker: of what its routers trace, with the durations that it reports."""

import itertools
from collections.abc import Iterator

import pytest

from diptych.proto import worker_pb2
from diptych.workers.common.errors import OutOfBlocks
from diptych.workers.common.request import FinishReason
from diptych.workers.common.timings import HandoffTimings, SequenceTimings
from diptych.workers.core.embedding import Embedding
from diptych.workers.engine.events import FailureEvent, StepOutput, StepTokens, TokenNote
from diptych.workers.handoff.types import HandoffSealed
from diptych.workers.server.spans import MAX_OPEN, WorkerSpans
from diptych.workers.telemetry.export import MakeSpans, SpanExport
from diptych.workers.telemetry.settings import TraceSettings
from diptych.workers.telemetry.spans import SpanKind, SpanRecord
from diptych.workers.telemetry.trace_context import SpanContext

PARENT = SpanContext("a" * 32, "b" * 16, True, "x=1")
FIRST = SequenceTimings(0.25, 0.5)
MOVED = SequenceTimings(0.125, 0.25, HandoffTimings(0.5, 2.0, 0.0625, 0.03125, 640, "nixl"))
Requests = dict[str, list[SpanRecord]]


class Kept(SpanExport):
    """Export that keeps the spans of each worker request, and sends none."""

    def __init__(self) -> None:
        super().__init__(TraceSettings("grpc"), lambda _: True, lambda: None)
        self.requests: Requests = {}

    def put(self, make: MakeSpans) -> None:
        made = list(make())
        self.requests[str(made[0].attributes["diptych.request.id"])] = made


@pytest.fixture
def export() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.close()


def submit(name: str, **fields: object) -> worker_pb2.Submit:
    message = worker_pb2.Submit(request_id=name, prompt_token_ids=[1, 2, 3], **fields)  # type: ignore[arg-type]
    message.traceparent, message.tracestate = PARENT.traceparent, PARENT.state
    return message


def step(*tokens: tuple[str, int, TokenNote | None]) -> StepOutput:
    made = StepTokens()
    for entry, (key, position, note) in enumerate(tokens):
        made.keys.append(key)
        made.token_ids.append(7)
        made.positions.append(position)
        if note is not None:
            made.notes[entry] = note
    return StepOutput(1, ran=True, tokens=made)


def durations(spans: list[SpanRecord]) -> dict[str, float]:
    return {span.name: (span.end_ns - span.start_ns) / 1e9 for span in spans}


def test_a_worker_that_does_everything(export: Kept) -> None:
    spans = WorkerSpans(export)
    spans.begin("1/1", submit("r", output_token_ids=[5]))
    spans.on_step(step(("1/1", 1, TokenNote(num_cached=2, timings=FIRST))))
    spans.on_step(step(("1/1", 2, None)))
    assert export.requests == {}
    spans.on_step(step(("1/1", 3, TokenNote(finish=FinishReason.STOP))))
    (whole, prefill, queue) = export.requests["r"]
    assert (whole.name, whole.kind, whole.parent) == ("alone", SpanKind.SERVER, PARENT)
    assert whole.context.state == "x=1"
    assert whole.attributes == {
        "diptych.request.id": "r",
        "diptych.prompt_tokens": 3,
        "diptych.output_tokens_before": 1,
        "diptych.cached_tokens": 2,
        "diptych.output_tokens": 4,
        "diptych.outcome": "stop",
    }
    assert durations([prefill, queue]) == {"prefill": 0.5, "queue": 0.25}
    assert queue.end_ns == prefill.start_ns
    assert prefill.parent == queue.parent == whole.context


def test_a_source_ends_with_its_first_token_and_a_sink_tells_of_the_hand_off(export: Kept) -> None:
    spans = WorkerSpans(export)
    spans.begin("1/1", submit("source", offer=worker_pb2.HandoffOffer(handoff_id="h")))
    spans.begin("1/2", submit("sink", source=worker_pb2.HandoffSource(handoff_id="h")))
    spans.on_step(step(("1/1", 0, TokenNote(timings=FIRST)), ("1/2", 1, TokenNote(timings=MOVED))))
    assert [span.name for span in export.requests["source"]] == ["prefill", "prefill", "queue"]
    spans.on_step(step(("1/2", 2, TokenNote(finish=FinishReason.LENGTH))))
    whole, *children = export.requests["sink"]
    assert whole.name == "decode"
    assert durations(children) == {
        "first_decode": 0.25,
        "queue": 0.125,
        "announce_to_pull": 0.5,
        "pull": 2.0,
        "last_segment": 0.0625,
        "release": 0.03125,
    }
    by_name = {span.name: span for span in children}
    chain = ("announce_to_pull", "pull", "release", "queue", "first_decode")
    assert [by_name[a].end_ns == by_name[b].start_ns for a, b in itertools.pairwise(chain)] == [True] * 4
    assert by_name["pull"].attributes == {"diptych.handoff.bytes": 640, "diptych.handoff.transport": "nixl"}


def test_what_ends_otherwise(export: Kept) -> None:
    spans = WorkerSpans(export)
    for number, name in enumerate(("failed", "aborted", "moved", "prefix", "embedded")):
        fields = {"offer": worker_pb2.HandoffOffer(handoff_id="h", is_prefix=True)} if name == "prefix" else {}
        spans.begin(f"1/{number}", submit(name, **fields))
    output = step()
    output.failures = [FailureEvent("1/0", OutOfBlocks("a secret"))]
    output.handoffs = [HandoffSealed("h", "1/2", 9, (7, 8), is_live=True), HandoffSealed("h", "1/3", 9, ())]
    output.embeddings = [("1/4", Embedding(b"", 0, 0, FIRST))]  # type: ignore[arg-type]
    spans.on_step(output)
    spans.end("1/1", "aborted")
    first = {name: made[0] for name, made in export.requests.items()}
    assert (first["failed"].error, first["failed"].attributes["error.type"]) == (OutOfBlocks.code, OutOfBlocks.code)
    assert {name: span.attributes.get("diptych.outcome") for name, span in first.items()} == {
        "failed": None,
        "aborted": "aborted",
        "moved": "handed off",
        "prefix": "handed off",
        "embedded": "stop",
    }
    assert (first["moved"].attributes["diptych.output_tokens"], first["prefix"].name) == (2, "prefix")
    assert durations(export.requests["embedded"][1:]) == {"prefill": 0.5, "queue": 0.25}
    assert "secret" not in repr(export.requests)


@pytest.mark.parametrize("header", ["", "garbage", PARENT.traceparent[:-1] + "0"])
def test_what_is_not_traced_is_not_followed(export: Kept, header: str) -> None:
    spans = WorkerSpans(export)
    message = submit("r")
    message.traceparent = header
    spans.begin("1/1", message)
    spans.on_step(step(("1/1", 0, TokenNote(finish=FinishReason.STOP, timings=FIRST))))
    spans.end("1/1", "aborted")
    assert export.requests == {}


def test_a_router_cannot_have_any_number_followed(export: Kept) -> None:
    spans = WorkerSpans(export)
    for number in range(MAX_OPEN + 1):
        spans.begin(f"1/{number}", submit(str(number)))
    for number in range(MAX_OPEN + 1):
        spans.end(f"1/{number}", "aborted")
    assert len(export.requests) == MAX_OPEN
