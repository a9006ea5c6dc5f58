"""One request's state where a route moves inside the prompt."""

import pytest

from diptych.cluster.routing.actions import CountedTokens, FirstToken, Part, PrefixPull, Route, Submit, WorkerToken
from diptych.workers.common.errors import (
    DiptychError,
    InternalError,
    InvalidRequest,
    PromptReturned,
    StepFailedAlone,
    WorkerDraining,
)
from diptych.workers.common.request import FinishReason

from ...support.state_harness import KV_GONE, LOST, StateHarness


def moved() -> StateHarness:
    """A request whose first two tokens P computes for D."""
    harness = StateHarness()
    harness.log = list(harness.state.begin(Route("P", "D", None, 2), "secret", harness.handles))
    return harness


def test_one_computes_the_beginning_and_the_other_all_after_it() -> None:
    harness = moved()
    source, sink = harness.log
    assert isinstance(source, Submit) and isinstance(sink, Submit)
    assert (source.worker_request.worker, source.worker_request.part) == ("P", Part.PREFIX)
    assert (source.handoff_id, source.move_at, source.prefix) == ("secret", 2, None)
    assert (sink.worker_request.worker, sink.worker_request.part) == ("D", Part.ALONE)
    assert (sink.handoff_id, sink.source, sink.prefix) == (None, None, PrefixPull("P", "secret", 2))
    harness.log = list(harness.state.handed_off(1, 0, "secret", CountedTokens(0, 2)))
    assert [type(action) for action in harness.log] == [FirstToken]  # its load is taken off
    harness.token(2, 0)
    assert harness.told == [("first", 2), ("abort", 1)]
    harness.token(2, 1)
    assert harness.told == []
    assert harness.taken() == [100, 101]


def counted(harness: StateHarness) -> tuple[int, int]:
    """Tokens of the prompt that count as cached, and as stored."""
    delta = harness.state.output.take(harness.state.finish)
    assert delta is not None
    return delta.num_cached_tokens, delta.num_stored_tokens


@pytest.mark.parametrize(
    ("source", "sink", "expected"),
    [
        ((0, 4), (4, 4, 4), (0, 8)),  # all is computed
        ((2, 2), (4, 4, 4), (2, 6)),  # the source had the beginning
        ((4, 0), (4, 4, 1), (4, 4)),
        ((0, 4), (6, 2), (6, 2)),  # the sink had more than the beginning, which was of no use
        ((3, 1), (2, 6), (2, 6)),  # the pull failed: the sink has computed what it had not
        (None, (4, 4, 4), (0, 4)),  # the source has not said: what it computed does not count as cached
        (None, (2, 6), (2, 6)),
        ((2, 99), (4, 99, 4), (2, 6)),  # not more than the prompt has
    ],
)
def test_cached_is_what_neither_worker_has_computed(
    source: tuple[int, int] | None, sink: tuple[int, ...], expected: tuple[int, int]
) -> None:
    harness = StateHarness(num_prompt=8, max_attempts=5)
    harness.state.begin(Route("P", "D", None, 4), "secret", harness.handles)
    if source is not None:
        harness.state.handed_off(1, 0, "secret", CountedTokens(*source))
    harness.state.token(2, WorkerToken(0, 7, cached=CountedTokens(*sink)))
    assert counted(harness) == expected


def test_what_the_last_sink_says_counts() -> None:
    harness = StateHarness(num_prompt=8, max_attempts=5)
    harness.state.begin(Route("P", "D", None, 4), "secret", harness.handles)
    harness.state.handed_off(1, 0, "secret", CountedTokens(2, 2))
    harness.failed(2, LOST)
    harness.sink("E")
    harness.state.token(3, WorkerToken(0, 7, cached=CountedTokens(4, 4, 4)))
    assert counted(harness) == (2, 6)


@pytest.mark.parametrize("error", [LOST, KV_GONE, PromptReturned("it computes no prompts any more")])
def test_what_the_route_of_the_first_token_says_counts(error: DiptychError) -> None:
    harness = StateHarness(num_prompt=8, max_attempts=5)
    harness.state.begin(Route("P", "D", None, 4), "secret", harness.handles)
    harness.state.handed_off(1, 0, "secret", CountedTokens(2, 2))
    harness.failed(2, error)
    harness.sink(None)
    harness.begin(None, "E")  # resumed: it has the whole prompt to compute
    harness.failed(3, error)
    harness.begin("F", "G")
    harness.state.token(5, WorkerToken(1, 8, cached=CountedTokens(8, 0)))  # the sink's, early
    harness.state.token(4, WorkerToken(0, 7, cached=CountedTokens(6, 2)))
    harness.failed(5, LOST)
    harness.begin(None, "E")
    harness.state.token(6, WorkerToken(2, 9, cached=CountedTokens(0, 8)))  # resumed after the first token
    assert counted(harness) == (6, 2)


def test_a_first_token_that_is_the_last_closes_both() -> None:
    harness = moved()
    harness.token(2, 0, FinishReason.STOP)
    assert sorted(harness.told) == [("abort", 1), ("first", 2), ("forget", 2)]
    assert harness.state.is_over


def test_the_sink_goes_on_without_its_source() -> None:
    for error in (LOST, KV_GONE, InvalidRequest("no")):
        harness = moved()
        harness.failed(1, error)
        assert harness.told == [("forget", 1)]
        harness.token(2, 0)
        assert harness.told == [("first", 2)]
        harness.failed(2, LOST)
        assert harness.told == [("forget", 2), ("choose", "")]


def test_a_source_that_drains_has_offered_nothing() -> None:
    harness = moved()
    harness.failed(1, WorkerDraining("draining"))
    assert harness.told == [("forget", 1), ("abort", 2), ("choose", "")]


def test_another_sink_is_sent_to_the_same_offer_once() -> None:
    harness = moved()
    harness.failed(2, LOST)
    assert harness.told == [("forget", 2), ("choose sink", "P")]
    assert harness.state.failures.workers == {"D"}
    harness.sink("E")
    (again,) = harness.log
    assert isinstance(again, Submit)
    assert (again.worker_request.worker, again.worker_request.part) == ("E", Part.ALONE)
    assert again.prefix == PrefixPull("P", "secret", 2)
    harness.failed(3, LOST)
    assert harness.told == [("forget", 3), ("abort", 1), ("choose", "")]


def test_without_another_sink_the_request_is_resumed() -> None:
    harness = moved()
    harness.failed(2, LOST)
    harness.sink(None)
    assert harness.told == [("abort", 1), ("choose", "")]
    harness.begin(None, "E")
    harness.token(3, 0)
    assert harness.taken() == [100]


def test_both_lost() -> None:
    harness = moved()
    harness.failed(1, LOST)
    harness.failed(2, LOST)
    assert harness.told == [("forget", 2), ("choose", "")]


def test_a_step_that_fails_on_both_sides_alone_is_the_requests_fault() -> None:
    harness = moved()
    harness.failed(1, StepFailedAlone("raised"))
    assert harness.told == [("forget", 1)]
    harness.failed(2, StepFailedAlone("raised"))
    assert harness.state.error is not None and "raised" in harness.state.error.message


def test_a_token_of_the_source_is_an_error() -> None:
    harness = moved()
    harness.token(1, 0)
    assert isinstance(harness.state.error, InternalError)
    assert sorted(harness.told) == [("abort", 1), ("abort", 2)]


def test_a_moved_request_migrates_like_any_other() -> None:
    harness = moved()
    assert harness.state.movable() is None
    harness.token(2, 0)
    movable = harness.state.movable()
    assert movable is not None and movable.worker == "D"
