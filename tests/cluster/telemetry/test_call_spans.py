"""Spans of a call: the phases of its requests follow each other, and sum to the call."""

from itertools import pairwise

import pytest

from diptych.cluster.common.timings import RequestEvent, RequestJournal, RequestTimes, RequestTimings
from diptych.cluster.telemetry.call_spans import PHASE, CallFacts, call_spans
from diptych.cluster.telemetry.phases import phases_of
from diptych.workers.common.errors import DiptychError, RequestAborted, WorkerLost
from diptych.workers.telemetry.spans import SpanKind, SpanRecord, WallClock
from diptych.workers.telemetry.trace_context import SpanContext

TIMINGS = RequestTimings(0.25, 0.5, 0.125, 0.0625, 0.25, 0.5, 0.125, 9.0, 9.0, 4.0, 64, "nixl", 2, 1, 8, 3)
CONTEXT, PARENT = SpanContext("a" * 32, "b" * 16), SpanContext("a" * 32, "c" * 16)


def journal(
    timings: RequestTimings | None = TIMINGS,
    *,
    began: float = 11.0,
    ended: float = 15.0,
    error: DiptychError | None = None,
    index: int = 0,
) -> RequestJournal:
    """Journal of a request that was tried on prefill-1, failed there, and then handed off."""
    made = RequestJournal(index, CONTEXT.traceparent)
    made.times = RequestTimes(began, delivered_at=[began + 0.875, began + 1.8125])
    made.timings, made.error, made.ended_at = timings, error, ended
    made.note(began + 0.0, "submitted", "prefill-1", "prefill")
    made.note(began + 0.1, "failed", "prefill-1", "worker_lost")
    made.note(began + 0.125, "submitted", "prefill-2", "prefill")
    made.note(began + 0.125, "submitted", "decode-1", "decode")
    made.note(began + 3.0, "migrates from", "decode-1", "decode")
    made.note(began + 3.0, "submitted", "decode-2", "decode")
    return made


def spans(*journals: RequestJournal, error: str | None = None) -> list[SpanRecord]:
    clock = WallClock(1_000_000_000_000, 10.0)
    return call_spans(CallFacts("chat m", CONTEXT, PARENT, clock, 10.0, 16.0, {"x": 1}, journals, error))


def test_phases_are_those_of_the_answer_with_their_workers() -> None:
    found = [(phase.name, phase.start - 11.0, phase.end - phase.start, phase.worker) for phase in phases_of(journal())]
    assert found == [
        ("queue", 0.0, 0.25, "prefill-2"),
        ("prefill", 0.25, 0.5, "prefill-2"),
        ("deliver_first", 0.75, 0.125, ""),
        ("last_segment", 0.875, 0.0625, "decode-1"),
        ("commit", 0.9375, 0.25, "decode-1"),
        ("first_decode", 1.1875, 0.5, "decode-1"),
        ("deliver_second", 1.6875, 0.125, ""),
        ("decode", 1.8125, 2.1875, "decode-2"),
    ]


def test_a_call_is_the_sum_of_its_phases() -> None:
    whole, *children = spans(journal())
    assert (whole.name, whole.kind, whole.context, whole.parent) == ("chat m", SpanKind.SERVER, CONTEXT, PARENT)
    assert all(child.parent == CONTEXT and child.attributes[PHASE] == child.name for child in children)
    assert [child.name for child in children][:: len(children) - 1] == ["prepare", "respond"]
    assert all(one.end_ns == after.start_ns for one, after in pairwise(children))
    assert (children[0].start_ns, children[-1].end_ns) == (whole.start_ns, whole.end_ns)
    assert sum(child.end_ns - child.start_ns for child in children) == 6_000_000_000
    assert len({span.context.span_id for span in (whole, *children)}) == len(children) + 1
    assert whole.attributes["gen_ai.server.time_to_first_token"] == 0.875
    assert (whole.attributes["diptych.attempts"], whole.attributes["diptych.migrations"]) == (2, 1)
    assert (whole.attributes["diptych.handoff.bytes"], whole.attributes["x"]) == (64, 1)
    assert "error.type" not in whole.attributes


def test_attempts_failures_and_migrations_are_events() -> None:
    whole, *_ = spans(journal())
    found = [(each.name, each.attributes["diptych.worker"], each.at_ns - whole.start_ns) for each in whole.events]
    assert found == [
        ("submitted", "prefill-1", 1_000_000_000),
        ("failed", "prefill-1", 1_100_000_000),
        ("submitted", "prefill-2", 1_125_000_000),
        ("submitted", "decode-1", 1_125_000_000),
        ("migrates from", "decode-1", 4_000_000_000),
        ("submitted", "decode-2", 4_000_000_000),
    ]
    assert whole.events[1].attributes["diptych.detail"] == "worker_lost"


def test_several_completions_each_sum_to_their_own() -> None:
    whole, *children = spans(journal(), journal(began=11.25, ended=15.25, index=1))
    assert [child.name for child in children if "diptych.completion.index" not in child.attributes] == [
        "prepare",
        "respond",
    ]
    for index in (0, 1):
        own = [child for child in children if child.attributes.get("diptych.completion.index") == index]
        assert len(own) == 8
        assert sum(child.end_ns - child.start_ns for child in own) == 4_000_000_000
    assert whole.attributes["diptych.attempts"] == 4


def test_a_request_without_a_token_waited_and_failed() -> None:
    error = WorkerLost("it ended")
    whole, *children = spans(journal(None, error=error), error=error.code)
    assert [child.name for child in children] == ["prepare", "queue", "respond"]
    assert (whole.error, whole.attributes["error.type"]) == ("worker_lost", "worker_lost")
    assert (whole.events[-1].name, whole.events[-1].attributes) == ("ended", {"error.type": "worker_lost"})


def test_a_call_that_was_refused_has_no_phases() -> None:
    (whole,) = spans(error="503")
    assert (whole.end_ns - whole.start_ns, whole.error) == (6_000_000_000, "503")


def test_a_journal_is_bounded() -> None:
    made = RequestJournal()
    for number in range(1000):
        made.note(float(number), "submitted", "a", "alone")
    assert len(made.events) == 128
    assert made.events[-1] == RequestEvent(127.0, "submitted", "a", "alone")


@pytest.mark.parametrize("error", [None, RequestAborted("the client went away")])
def test_a_client_that_left_is_no_error_of_ours(error: DiptychError | None) -> None:
    whole, *_ = spans(journal(error=error))
    assert whole.error is None
