"""Trace context by W3C's rules."""

import pytest

from diptych.workers.telemetry.trace_context import SpanContext, new_span_id, new_trace_id, parse_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # other flags are of later versions
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_a_context_is_read(header: str, is_sampled: bool) -> None:
    assert parse_context(header, "a=1,b=2") == SpanContext(TRACE, SPAN, is_sampled, "a=1,b=2")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
    ],
)
def test_what_is_not_valid_is_no_context(header: str) -> None:
    assert parse_context(header) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=\n", "a=é"])
def test_a_state_that_may_not_be_passed_on_is_dropped(state: str) -> None:
    assert parse_context(f"00-{TRACE}-{SPAN}-01", state) == SpanContext(TRACE, SPAN)


def test_a_child_is_a_new_span_of_the_same_trace() -> None:
    parent = SpanContext(TRACE, SPAN, False, "a=1")
    child = parent.child()
    assert (child.trace_id, child.is_sampled, child.state) == (TRACE, False, "a=1")
    assert child.span_id != SPAN
    assert parse_context(child.traceparent, child.state) == child


def test_ids_are_new_each_time() -> None:
    ids = {new_trace_id() for _ in range(100)} | {new_span_id() for _ in range(100)}
    assert len(ids) == 200
    assert {len(each) for each in ids} == {16, 32}
