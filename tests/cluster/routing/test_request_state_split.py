"""One request's state where a route moves inside the prompt."""

from diptych.cluster.routing.actions import FirstToken, Part, PrefixPull, Route, Submit, WorkerToken
from diptych.workers.common.errors import InternalError, InvalidRequest, StepFailedAlone, WorkerDraining
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
    harness.log = list(harness.state.handed_off(1, 0, "secret"))
    assert [type(action) for action in harness.log] == [FirstToken]  # its load is taken off
    harness.token(2, 0)
    assert harness.told == [("first", 2), ("abort", 1)]
    harness.token(2, 1)
    assert harness.told == []
    assert harness.taken() == [100, 101]


def test_what_was_pulled_is_not_reported_as_cached() -> None:
    harness = moved()
    harness.state.token(2, WorkerToken(0, 7, cached=(2, 4)))
    assert (harness.state.notes.num_cached, harness.state.notes.num_stored) == (0, 0)


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
