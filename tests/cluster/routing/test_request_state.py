"""The state of one request: it merges the tokens of one or two workers."""

import pytest

from diptych.cluster.routing.actions import (
    CountedTokens,
    OfferPrefix,
    Part,
    PrefixPull,
    PrefixSource,
    Route,
    Submit,
    WorkerToken,
)
from diptych.cluster.routing.token_source import TokenLogprob
from diptych.workers.common.errors import (
    InternalError,
    RequestAborted,
)
from diptych.workers.common.request import FinishReason

from ...support.state_harness import StateHarness, split


def test_one_worker_alone() -> None:
    harness = StateHarness(max_tokens=2)
    harness.begin(None, "W")
    (submit,) = harness.log
    assert isinstance(submit, Submit)
    assert (submit.worker_request.worker, submit.worker_request.part, submit.handoff_id, submit.source) == (
        "W",
        Part.ALONE,
        None,
        None,
    )
    harness.token(1, 0)
    assert harness.told == [("first", 1)]
    assert harness.taken() == [100]
    harness.token(1, 1, FinishReason.LENGTH)
    assert harness.told == [("forget", 1)]
    delta = harness.state.output.take(harness.state.finish)
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason) == ((101,), FinishReason.LENGTH)
    assert harness.state.output.take(harness.state.finish) is None


def test_two_workers_share_a_hand_off_and_the_tokens_merge() -> None:
    harness = split()
    source, sink = harness.log
    assert isinstance(source, Submit)
    assert isinstance(sink, Submit)
    assert (source.worker_request.part, source.handoff_id, source.source) == (Part.PREFILL, "secret", None)
    assert (sink.worker_request.part, sink.handoff_id, sink.source) == (Part.DECODE, "secret", "P")
    harness.token(1, 0)
    assert harness.told == [("first", 1)]
    for position in (1, 2):
        harness.token(2, position)
        assert harness.told == ([("first", 2), ("forget", 1)] if position == 1 else [])
    harness.token(2, 3, FinishReason.LENGTH)
    assert harness.told == [("forget", 2)]


def test_decode_tokens_that_overtake_the_first_wait_for_it() -> None:
    harness = split()
    for position in (1, 2):
        harness.token(2, position)
    harness.token(2, 3, FinishReason.LENGTH)
    assert harness.taken() == []
    harness.token(1, 0)
    assert harness.taken() == [100, 101, 102, 103]
    assert harness.state.finish is FinishReason.LENGTH


def test_a_request_that_ends_with_its_first_token_stops_the_sink() -> None:
    harness = split()
    harness.token(1, 0, FinishReason.STOP)
    assert ("abort", 2) in harness.told
    assert ("forget", 1) in harness.told
    assert harness.state.finish is FinishReason.STOP


def test_a_sink_told_of_the_end_before_we_are() -> None:
    """The source finishes with its first token: the sink is informed first, and fails."""
    harness = split()
    harness.failed(2, RequestAborted("the sequence finished with its first token"), handoff=True)
    assert harness.told == [("forget", 2)]
    harness.token(1, 0, FinishReason.STOP)
    assert harness.told == [("first", 1), ("forget", 1)]
    assert harness.state.finish is FinishReason.STOP


def test_duplicates_and_late_tokens_are_dropped() -> None:
    harness = split()
    harness.token(1, 0)
    harness.token(1, 0)
    harness.token(2, 0)
    harness.token(2, 1)
    harness.token(2, 1)
    harness.token(77, 2)
    assert harness.taken() == [100, 101]
    assert harness.state.error is None


@pytest.mark.parametrize(
    ("handle", "position", "before"), [(2, 2, [(1, 0)]), (2, 2, []), (1, 1, []), (2, 4, [(1, 0), (2, 1)])]
)
def test_a_gap_is_an_error_and_never_a_wrong_answer(handle: int, position: int, before: list[tuple[int, int]]) -> None:
    harness = split()
    for given in before:
        harness.token(*given)
    harness.token(handle, position)
    assert isinstance(harness.state.error, InternalError)
    assert ("abort", 2) in harness.told
    assert (("abort", 1) in harness.told) == (len(before) < 2)


def test_more_tokens_than_asked_for_are_an_error() -> None:
    harness = StateHarness(max_tokens=1)
    harness.begin(None, "W")
    harness.token(1, 0)
    assert isinstance(harness.state.error, InternalError)
    assert ("abort", 1) in harness.told


def test_logprobs_and_cached_tokens_come_with_their_tokens() -> None:
    harness = StateHarness(logprobs=0)
    harness.begin("P", "D")
    values = [TokenLogprob(100 + i, -0.5 * i) for i in range(3)]
    harness.state.token(2, WorkerToken(1, 101, None, values[1], CountedTokens(3, 0)))
    harness.state.token(1, WorkerToken(0, 100, None, values[0], CountedTokens(2, 1)))
    first = harness.state.output.take(harness.state.finish)
    assert first is not None
    assert (first.logprobs, first.num_cached_tokens, first.num_stored_tokens) == (tuple(values[:2]), 2, 1)
    harness.state.token(2, WorkerToken(2, 102, None, values[2]))
    second = harness.state.output.take(harness.state.finish)
    assert second is not None
    assert (second.logprobs, second.num_cached_tokens, second.num_stored_tokens) == ((values[2],), 0, 0)
    harness.token(2, 3)
    assert isinstance(harness.state.error, InternalError)


def test_a_prefix_is_offered_before_it_is_asked_for() -> None:
    for prefill, decode in (("P", "D"), (None, "W")):
        harness = StateHarness()
        route = Route(prefill, decode, PrefixSource("H", 2))
        offer, submit, *_ = harness.state.begin(route, "secret", harness.handles, prefix_id="prefix")
        assert offer == OfferPrefix("H", "prefix", 2)
        assert isinstance(submit, Submit)
        assert (submit.worker_request.worker, submit.prefix) == (prefill or decode, PrefixPull("H", "prefix"))
